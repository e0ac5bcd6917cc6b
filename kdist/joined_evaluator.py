"""The evaluator of a cluster whose tasks others start: evaluates each new checkpoint in the chief's run dir.

After Estimator's evaluator, and as there it is no part of the cluster: what it shares with the chief is the run dir.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kdist import console
from kdist.checkpoint_evaluator import CheckpointEvaluator
from kdist.cluster.notice import chief_server
from kdist.errors import ClusterError, ConfigError
from kdist.run_lock import RunLock
from kdist.version import __version__

if TYPE_CHECKING:
    from kdist.cluster.spec import Membership
    from kdist.fit_arguments import FitArguments
    from kdist.run_dir import RunDir
    from kdist.schema import ClusterConfig
    from kdist.trainer import Trainer

_POLL_SECS = 0.5
_LATE_SECS = 10.0


def evaluate_until_done(trainer: Trainer, membership: Membership, arguments: FitArguments) -> None:
    """Prints what each new checkpoint comes to and writes it to `tb/evaluator`, until the chief is done.

    Raises:
        ConfigError: no validation data, or no run dir.
        ClusterError: there was no chief in the run dir within `cluster.start_timeout` seconds, it failed or is gone.
    """
    if arguments.validation_data is None:
        raise ConfigError(f"{membership.task}: an evaluator needs validation data; give validation_data")
    if not trainer.files.is_given:
        raise ConfigError(f"{membership.task}: an evaluator reads what the chief saves; give the chief's run_dir")
    files = trainer.files
    chief = ObservedChief(files, membership, trainer.cluster_config)
    print_line = console.print_nothing if arguments.is_quiet else console.print_line
    print_line(f"kdist {__version__} | {membership.task} of {trainer.shape} | evaluates {files}/checkpoints")
    summaries = files.summaries()
    try:
        evaluator = CheckpointEvaluator(trainer.model, arguments, files.checkpoints().folder)
        while True:
            # Asked first: what the chief saved before it ended is evaluated as well.
            is_done = chief.is_done()
            found = evaluator.evaluate_newest()
            if found is not None:
                chief.was_heard()
                print_line(console.evaluation_line(found.step, None, found.logs))
                summaries.evaluation(found.logs, found.step)
            elif is_done:
                break
            else:
                time.sleep(_POLL_SECS)
    finally:
        summaries.close()
    print_line(f"done  | {membership.task} | the chief is done")


class ObservedChief:
    """The chief, as far as it can be seen from here: by the run dir, where its lock has a heartbeat.

    Args:
        files: its run dir.
        membership: what this process is.
        config: says how long to wait for it.
    """

    def __init__(self, files: RunDir, membership: Membership, config: ClusterConfig) -> None:
        self._files = files
        self._lock = RunLock(files.path)
        self._address, self._task = chief_server(membership.spec)
        self._who = membership.task
        self._config = config
        # That of an earlier run, if there is one.
        self._earlier_result = files.result_written_at()
        self._has_come = False
        self._heard_at = time.monotonic()
        self._missing_since: float | None = None

    def was_heard(self) -> None:
        """Whatever is new in the run dir is a sign of life."""
        self._heard_at = time.monotonic()

    def is_done(self) -> bool:
        """Whether it came and is done, or was done before and did not come again.

        Raises:
            ClusterError: it did not come, it failed, or it is gone.
        """
        if self._lock.living_holder() is not None:
            self._has_come = True
            self._missing_since = None
            self.was_heard()
            return False
        if not self._lock.exists and self._files.result_written_at() != self._earlier_result:
            if self._files.read_result().get("status") == "failed":
                raise ClusterError(f"{self._who}: {self._chief} has failed; see {self._files}/result.json")
            return True
        return not self._will_come()

    def _will_come(self) -> bool:
        """Whether a chief that is not there may still come; False if it was done before and does not come again."""
        if self._has_come:
            self._raise_if_it_stays_away()
            return True
        if self._silent_secs <= self._config.start_timeout:
            return True
        if self._files.read_result().get("status") == "done":
            return False
        raise ClusterError(
            f"{self._who}: no chief trains in {self._files} for {self._silent_secs:.0f} s (cluster.start_timeout); "
            "run.dir has to be that of the chief, on a file system that both see"
        )

    def _raise_if_it_stays_away(self) -> None:
        # Between two looks at a file system of another machine, what was written there may come late.
        now = time.monotonic()
        self._missing_since = self._missing_since or now
        if now - self._missing_since > _LATE_SECS:
            raise ClusterError(f"{self._who}: {self._chief} exited without reporting completion")

    @property
    def _silent_secs(self) -> float:
        return time.monotonic() - self._heard_at

    @property
    def _chief(self) -> str:
        return f"the chief ({self._task} at {self._address})"
