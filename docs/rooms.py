"""Draws docs/pictures/rooms.svg, the rooms of kdist and their imports, from the code.

    python docs/rooms.py

`make docs` runs it; a test fails while the picture differs from the code. The order of the rooms is that of the lint
contract in pyproject.toml.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

REPO = Path(__file__).parents[1]
PICTURE = REPO / "docs" / "pictures" / "rooms.svg"
_ROW, _LEFT, _TOP = 22, 580, 90


def rooms() -> list[list[str]]:
    """Floors from the top of the house to the ground, each with the rooms beside each other."""
    contract = re.search(
        r'containers = \["kdist"\].*?layers = \[(.*?)\]', (REPO / "pyproject.toml").read_text(), re.DOTALL
    )
    assert contract is not None
    return [re.split(r" [|:] ", floor) for floor in re.findall(r'"(.*?)"', contract[1])]


def files_of(room: str) -> list[Path]:
    return sorted((REPO / "kdist" / room).rglob("*.py")) or [REPO / "kdist" / f"{room}.py"]


def purpose_of(room: str) -> str:
    """The first sentence of the room's docstring."""
    docstring = ast.get_docstring(ast.parse(files_of(room)[0].read_text())) or ""
    purpose = re.sub(r"^`\w+`: ", "", docstring).replace("`", "").replace("\n", " ")
    return re.split(r"[.:;](?: |$)", purpose[0].upper() + purpose[1:], maxsplit=1)[0]


def imports_of(room: str) -> Iterator[str]:
    """Names of the rooms that a room imports, also for types and inside of functions."""
    for file in files_of(room):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if modules == ["kdist"] and isinstance(node, ast.ImportFrom):
                modules = [f"kdist.{alias.name}" for alias in node.names]
            yield from (module.split(".")[1] for module in modules if module.startswith("kdist."))


def picture() -> str:
    """One row and one column for each room; a dot means that the room of the row imports the room of the column."""
    floors = rooms()
    names = [room for floor in floors for room in floor]
    place = {room: number for number, room in enumerate(names)}
    width, height = _LEFT + _ROW * len(names) + 30, _TOP + _ROW * len(names) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        "<title>The rooms of kdist: each row imports the rooms with a dot</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for floor in floors:
        y = _TOP + _ROW * place[floor[0]]
        lines.append(f'<line x1="8" y1="{y}" x2="{width - 8}" y2="{y}" stroke="#ddd"/>')
    for room, row in place.items():
        x, y = _LEFT + _ROW * row + _ROW / 2, _TOP + _ROW * row + _ROW / 2
        lines += [
            f'<text x="12" y="{y + 4:g}" font-weight="bold">{room}</text>',
            f'<text x="110" y="{y + 4:g}" fill="#555">{escape(purpose_of(room))}</text>',
            f'<text transform="translate({x + 4:g} {_TOP - 6}) rotate(-60)" fill="#555">{room}</text>',
            f'<rect x="{x - 8:g}" y="{y - 8:g}" width="16" height="16" fill="#e8eefc"/>',
        ]
        columns = sorted({place[name] for name in imports_of(room) if name in place} - {row})
        lines += [f'<circle cx="{_LEFT + _ROW * c + _ROW / 2:g}" cy="{y:g}" r="5" fill="#4c6fbf"/>' for c in columns]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture())
