"""The picture of a sweep."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kdist.sweeps.groups import OBJECTIVE, Group, group_by, text_of
from kdist.sweeps.load import SEED, Row
from kdist.sweeps.sweep import Sweep

_PANEL_INCHES = (5.0, 4.2)
#: A category has at least this part of the width, for a name that is turned.
_CATEGORY_INCHES = 0.17
#: More characters than this of all names of categories together are turned; a longer name loses its beginning.
_MAX_CHARACTERS, _MAX_NAME = 45, 28
_COLUMNS = 3
#: The axis is logarithmic from this ratio of the largest to the smallest value.
_LOG_RATIO = 10.0
#: If there are more series than this, each trial is a point.
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
    most = max(len({row[key] for row in rows}) for key, _ in panels)
    size = (num_columns * max(_PANEL_INCHES[0], most * _CATEGORY_INCHES), num_rows * _PANEL_INCHES[1])
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
    series = group_by(rows, others, mixed=True)
    values = list(dict.fromkeys(row[key] for row in rows))
    is_number = key != SEED and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    places = {value: float(value if is_number else index) for index, value in enumerate(values)}
    is_named = len(series) <= _MAX_SERIES
    if not is_named:
        found = [row for row in rows if row[column] is not None]
        at = [places[row[key]] for row in found]
        axes.plot(at, [row[column] for row in found], "o", alpha=0.4, clip_on=False)
    for index, each in enumerate(series if is_named else []):
        offset = 0.0 if is_number else _CATEGORY_WIDTH * ((index + 0.5) / len(series) - 0.5)
        draw = _draw_line if is_number else _draw_points
        draw(each, key, column, {value: place + offset for value, place in places.items()}, axes)
    if is_number and min(values) > 0 and max(values) / min(values) >= _LOG_RATIO:
        axes.set_xscale("log")
    if not is_number or len(values) <= _MAX_SERIES:
        names = [_shortened(text_of(value) or "not given") for value in values]
        is_turned = sum(map(len, names)) > _MAX_CHARACTERS
        axes.set_xticks(
            list(places.values()), names, rotation=90 if is_turned else 0, fontsize=8 if is_turned else None
        )
        axes.minorticks_off()
    if not is_number:
        axes.set_xlim(-0.5, len(values) - 0.5)
    axes.set_xlabel(key)
    _set_ends(axes, column, label)
    if len(series) > 1 and is_named:
        # Above, where no point is.
        legend = {"title": ", ".join(others), "title_fontsize": "small", "alignment": "left"}
        num_columns = 2 if max(len(_name(each)) for each in series) <= _MAX_NAME // 2 else 1
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=num_columns, frameon=False, fontsize="small", **legend
        )


def _draw_line(series: Group, key: str, column: str, places: Mapping[object, float], axes: Axes) -> None:
    """Means over numbers, joined, in a band of a standard deviation where there are several values."""
    found = [(places[g.values[key]], s) for g in group_by(series.rows, [key]) if (s := g.spread(column)) is not None]
    found.sort(key=lambda pair: pair[0])
    at, means = [place for place, _ in found], [spread.mean for _, spread in found]
    (line,) = axes.plot(at, means, "o-", clip_on=False, label=_name(series))
    if any(spread.deviation is not None for _, spread in found):
        low, high = ([s.mean + sign * (s.deviation or 0.0) for _, s in found] for sign in (-1, 1))
        axes.fill_between(at, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def _draw_points(series: Group, key: str, column: str, places: Mapping[object, float], axes: Axes) -> None:
    """Means of categories; of several values with a bar of a standard deviation to each side, and as points."""
    found = [(g, s) for g in group_by(series.rows, [key]) if (s := g.spread(column)) is not None]
    at = [places[group.values[key]] for group, _ in found]
    (points,) = axes.plot(at, [spread.mean for _, spread in found], "o", clip_on=False, label=_name(series))
    several = [(place, g.rows, s) for place, (g, s) in zip(at, found) if s.deviation is not None]
    if several:
        color = points.get_color()
        middles, deviations = zip(*((spread.mean, spread.deviation) for _, _, spread in several))
        bars = {"fmt": "none", "ecolor": color, "capsize": 4, "clip_on": False}
        axes.errorbar([place for place, _, _ in several], middles, deviations, **bars)
        for place, rows, _ in several:
            values = [row[column] for row in rows if row[column] is not None]
            axes.plot([place + 0.06] * len(values), values, ".", color=color, alpha=0.4, clip_on=False)


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
    return ", ".join(_shortened(text_of(value) or "not given") for value in series.values.values())


def _shortened(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"…{name[1 - _MAX_NAME :]}"
