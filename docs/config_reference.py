"""Writes docs/reference/config.md, every config key with its default and meaning, from the schema.

    python docs/config_reference.py

`make docs` runs it; a test fails while the page differs from the schema.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from kdist.cli.help import describe_keys

PAGE = Path(__file__).parent / "reference" / "config.md"
HEAD = """\
# Config

<!-- Written by docs/config_reference.py; change kdist/config/schema.py instead. -->

Every key of the command line (`KEY=VALUE`) and of config files. `null` means that the key is not given.
`python -m kdist --help` prints the same, with the options of each group and the arguments of the hooks.
"""


def page() -> str:
    """The page as Markdown."""
    parts = [HEAD]
    for group, rows in groupby(describe_keys(), key=lambda row: row[0].partition(".")[0] if "." in row[0] else ""):
        parts.append(f"\n## {group or 'Loss and metrics'}\n\n| key | default | meaning |\n| --- | --- | --- |\n")
        parts += [
            f"| `{key}` | `{default}` | {meaning.replace('|', chr(92) + '|')} |\n" for key, default, meaning in rows
        ]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
