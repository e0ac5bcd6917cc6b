"""Errors about wrong values, which name the key, the value and what is allowed."""

import math
from typing import Any

import numpy as np
import pytest

from kdist.config.checks import (
    check_more_than_zero,
    check_one_of,
    check_target,
    check_whole_number,
    number_or_auto,
)
from kdist.errors import ConfigError


def test_whole_numbers_may_be_those_of_numpy() -> None:
    for fine in (None, 1, np.int64(3)):
        check_whole_number("train.steps", fine)
    for wrong in (0, -1, 1.0, True, "3", np.float32(2)):
        with pytest.raises(ConfigError, match=rf"train\.steps={wrong}: must be a whole number, at least 1"):
            check_whole_number("train.steps", wrong)


def test_a_whole_number_may_be_required() -> None:
    check_whole_number("train.max_restarts", 0, at_least=0, required=True)
    with pytest.raises(ConfigError, match=r"train\.max_restarts=None: must be a whole number, at least 0"):
        check_whole_number("train.max_restarts", None, at_least=0, required=True)


@pytest.mark.parametrize("wrong", [0, -1.0, math.inf, math.nan])
def test_what_must_be_more_than_zero_is_finite_too(wrong: float) -> None:
    check_more_than_zero("run.grace_secs", 0.5)
    with pytest.raises(ConfigError, match=r"run\.grace_secs=\S+: must be more than 0 and finite"):
        check_more_than_zero("run.grace_secs", wrong)


def test_a_word_is_one_of_those_that_are_allowed() -> None:
    check_one_of("sweep.mode", "min", ("min", "max"))
    with pytest.raises(ConfigError, match=r"sweep\.mode=best: choose one of min, max"):
        check_one_of("sweep.mode", "best", ("min", "max"))


@pytest.mark.parametrize("node", [None, "package.function", {}, {"_target_": 3}])
def test_a_target_is_named(node: Any) -> None:
    check_target("model", {"_target_": "package.function"})
    with pytest.raises(ConfigError, match=r"model: must name a function by _target_"):
        check_target("model", node)


def test_steps_per_call_are_a_number_or_auto() -> None:
    assert (number_or_auto("k", "auto", at_least=1), number_or_auto("k", 4, at_least=1)) == (None, 4)
    wrong: Any
    for wrong in (0, 1.5, True, "many"):
        with pytest.raises(ConfigError, match=rf"k={wrong}: must be at least 1, or auto"):
            number_or_auto("k", wrong, at_least=1)
