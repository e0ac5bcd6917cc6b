"""The placement plan as a picture: one bar per server, its variables stacked by their bytes."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw

from kdist.parameters.placement.plan import PlacementPlan

_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d")
_BAR_WIDTH, _BAR_HEIGHT, _GAP, _TOP, _BOTTOM = 190, 320, 40, 40, 50
_SMALLEST_LABELLED = 14


def draw_plan(plan: PlacementPlan, path: Path) -> None:
    """Draws `plan` as a PNG; all bars have the same scale, so that an uneven plan looks uneven."""
    totals = plan.bytes_by_server
    width = _GAP + plan.num_servers * (_BAR_WIDTH + _GAP)
    image = Image.new("RGB", (width, _TOP + _BAR_HEIGHT + _BOTTOM), "white")
    draw = ImageDraw.Draw(image)
    draw.text((_GAP, 14), f"bytes by server, optimizer slots included; imbalance {plan.imbalance:.2f}", fill="black")
    scale = _BAR_HEIGHT / max(1, *totals)
    floor = _TOP + _BAR_HEIGHT
    tops = [float(floor)] * plan.num_servers
    for shard in plan.shards:
        server = shard.server
        left = _GAP + server * (_BAR_WIDTH + _GAP)
        top = tops[server] - plan.num_bytes(shard) * scale
        box = (left, top, left + _BAR_WIDTH, tops[server])
        draw.rectangle(box, fill=_COLORS[shard.variable % len(_COLORS)], outline="white")
        if tops[server] - top >= _SMALLEST_LABELLED:
            draw.text((left + 6, top + 1), plan.name(shard)[:30], fill="white")
        tops[server] = top
    for server, total in enumerate(totals):
        left = _GAP + server * (_BAR_WIDTH + _GAP)
        draw.line((left, floor, left + _BAR_WIDTH, floor), fill="black")
        draw.text((left, floor + 8), f"ps:{server}", fill="black")
        draw.text((left, floor + 22), f"{total:,} bytes", fill="black")
    image.save(path)
