"""Errors of the user's own code, which end the run, once, and are no fault of the cluster."""

import pytest
from drilling import MINE, Drill

pytestmark = pytest.mark.cluster

_LONG = pytest.mark.long
CLUSTER = ("run.trust=[user_code]", "cluster=1ps2w", "train.steps=100000", "train.steps_per_call=4")


@pytest.mark.parametrize(
    ("fault", "overrides", "said"),
    [
        pytest.param("NaN", ["+data.scale=1e30"], "NanTensor: the loss became", marks=_LONG),
        pytest.param(
            "exception in the loss", ["model._target_=user_code.build_raising_loss"], "my loss failed", marks=_LONG
        ),
        pytest.param(
            "exception in the data function", ["data._target_=user_code.raising_dataset"], "no such column", marks=_LONG
        ),
        pytest.param(
            "exception in a hook", ["+hooks.mine._target_=user_code.RaisingHook"], "my hook failed", marks=_LONG
        ),
        pytest.param(
            "UnavailableError in a hook",
            ["+hooks.mine._target_=user_code.RaisingHook", "+hooks.mine.unavailable=true"],
            "my hook failed",
            marks=_LONG,
        ),
    ],
)
def test_an_error_of_the_users_ends_the_run_once(drill: Drill, fault: str, overrides: list[str], said: str) -> None:
    given = {override.partition("=")[0] for override in overrides}
    kept = [argument for argument in MINE if argument.partition("=")[0] not in given]
    run = drill.start(*kept, *CLUSTER, *overrides)
    ended = run.end(60)
    assert ended.code == 1
    assert ended.console.count("kdist: error: ") == 1
    assert said in ended.console
    assert "restarting" not in ended.console
    assert (ended.result["status"], ended.result["restarts"]) == ("failed", {"worker": 0, "cluster": 0})
    if "hook" in fault:
        # The lines of the user's code that led to it.
        assert "in after_run" in ended.console
    drill.report(18, fault, "exited once, with the error that was raised", ended)
