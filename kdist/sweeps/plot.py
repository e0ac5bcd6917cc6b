"""The picture of a sweep."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kdist.sweeps.groups import OBJECTIVE, Group, group_by, text_of
from kdist.sweeps.load import SEED, Row
from kdist.sweeps.sweep import Sweep

_PANEL_INCHES = (5.0, 4.2)
_COLUMNS = 3
#: The axis is logarithmic from this ratio of the largest to the smallest value.
_LOG_RATIO = 10.0
#: More series than this are drawn as one.
_MAX_SERIES = 6
#: An axis begins at 0 if values then still fill this part of it.
_FILLED_PART = 0.25
#: The part of the place of a category over which its series are spread.
_CATEGORY_WIDTH = 0.6


def picture_of(sweep: Sweep) -> bytes | None:
    """The finished trials as a PNG: the objective over each swept key, speed, staleness; None without any."""
    rows = [row for row in sweep.rows if row[OBJECTIVE] is not None]
    if not rows:
        return None
    keys = [key for key in sweep.swept if key != SEED] or [SEED]
    labels = {OBJECTIVE: sweep.metric, "examples_per_second": "examples/s", "staleness": "staleness, mean"}
    places = [key for key in keys if key in ("cluster", "strategy")]
    panels = [(key, column) for key in places[:1] for column in labels]
    panels += [(key, OBJECTIVE) for key in keys if key not in places]
    num_columns = min(_COLUMNS, len(panels))
    num_rows = -(-len(panels) // num_columns)
    size = (num_columns * _PANEL_INCHES[0], num_rows * _PANEL_INCHES[1])
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for (key, column), panel in zip(panels, axes):
        _draw(rows, keys, key, column, labels[column], panel)
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    name = str(sweep.folder).rpartition("/")[2]
    over = "" if SEED in keys or SEED not in sweep.swept else "\nmean ± standard deviation over seeds"
    figure.suptitle(f"{name}: {len(rows)} of {len(sweep.trials)} trials done{over}", fontsize="medium")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _draw(rows: Sequence[Row], keys: Sequence[str], key: str, column: str, label: str, axes: Axes) -> None:
    """A column over a key, with a series for each value of the other keys."""
    others = [other for other in keys if other != key]
    series = group_by(rows, others)
    if len(series) > _MAX_SERIES:
        series = group_by(rows, [])
    values = list(dict.fromkeys(row[key] for row in rows))
    if key != SEED and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        for each in series:
            _draw_line(each, key, column, axes)
        if min(values) > 0 and max(values) / min(values) >= _LOG_RATIO:
            axes.set_xscale("log")
    else:
        for index, each in enumerate(series):
            offset = _CATEGORY_WIDTH * ((index + 0.5) / len(series) - 0.5)
            _draw_points(each, key, column, {value: place + offset for place, value in enumerate(values)}, axes)
        axes.set_xticks(range(len(values)), [text_of(value) or "not given" for value in values])
        axes.set_xlim(-0.5, len(values) - 0.5)
    axes.set_xlabel(key)
    _set_ends(axes, column, label)
    if len(series) > 1:
        # Above, where no point is.
        legend = {"title": ", ".join(others), "title_fontsize": "small", "alignment": "left"}
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize="small", **legend)


def _draw_line(series: Group, key: str, column: str, axes: Axes) -> None:
    """Means over numbers, joined, in a band of a standard deviation."""
    found = [(g.values[key], s) for g in group_by(series.rows, [key]) if (s := g.spread(column)) is not None]
    found.sort(key=lambda pair: pair[0])
    places, means = [place for place, _ in found], [spread.mean for _, spread in found]
    deviations = [spread.deviation or 0.0 for _, spread in found]
    (line,) = axes.plot(places, means, "o-", clip_on=False, label=_name(series))
    low, high = ([m + sign * d for m, d in zip(means, deviations)] for sign in (-1, 1))
    axes.fill_between(places, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def _draw_points(series: Group, key: str, column: str, places: dict[object, float], axes: Axes) -> None:
    """Means of categories with a bar of a standard deviation to each side, and their single values as points."""
    found = [(g, s) for g in group_by(series.rows, [key]) if (s := g.spread(column)) is not None]
    means = [spread.mean for _, spread in found]
    deviations = [spread.deviation or 0.0 for _, spread in found]
    at = [places[group.values[key]] for group, _ in found]
    (points, *_) = axes.errorbar(at, means, yerr=deviations, fmt="o", capsize=4, clip_on=False, label=_name(series))
    for place, (group, _) in zip(at, found):
        if len(group.rows) > 1:
            values = [row[column] for row in group.rows if row[column] is not None]
            axes.plot([place + 0.06] * len(values), values, ".", color=points.get_color(), alpha=0.4, clip_on=False)


def _set_ends(axes: Axes, column: str, label: str) -> None:
    """Begins the axis of values at 0; if that hid the differences between them, it says that it does not."""
    low, high = axes.dataLim.y0, axes.dataLim.y1
    axes.ticklabel_format(axis="y", useOffset=False)
    if low < 0 or (column == OBJECTIVE and high - low < _FILLED_PART * high):
        label += "" if low < 0 else "  (axis does not begin at 0)"
    else:
        axes.set_ylim(0, 1.08 * high or 1)
    axes.set_ylabel(label)


def _name(series: Group) -> str:
    return ", ".join(text_of(value) or "not given" for value in series.values.values())
