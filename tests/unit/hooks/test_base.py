"""The example hook in the docstring of the hook contract works as it stands."""

import textwrap
from typing import Any

from fakes import make_session, run_all

import kdist
from kdist.hooks import StopAtStep, base


def test_the_example_hook_prints_a_line_at_multiples_of_500_steps() -> None:
    text = str(base.__doc__)
    example = text[text.index("    class PrintLoss") : text.index("Asynchronous workers keep")]
    names: dict[str, Any] = {"kdist": kdist}
    exec(textwrap.dedent(example), names)
    printed: list[str] = []
    run_all(make_session([names["PrintLoss"](), StopAtStep(last_step=1100)], print_line=printed.append))
    assert [line.partition(":")[0] for line in printed] == ["500", "1000"]
    assert all(float(line.partition(":")[2]) > 0 for line in printed)
