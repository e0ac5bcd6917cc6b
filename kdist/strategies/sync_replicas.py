"""`sync_replicas`: synchronous training on parameter servers that need not wait for the slowest workers.

After Chen et al., "Revisiting Distributed Synchronous SGD" (2016, arXiv:1604.00981), and TF1's `SyncReplicasOptimizer`:
an update is the mean of `replicas_to_aggregate` gradients, all computed from the present parameters; the gradients of
workers beyond that number (backup workers) come too late and are dropped.

Where every worker has its share of every step, the steps are calls over all tasks (`kdist.strategies.lockstep`). Where
it matters who comes first, all waiting is done here, on the chief, so a worker that is lost or has no more data can
stop nobody.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from kdist.cluster.coordinator import iterator_spec, lost_soon
from kdist.cluster.spec import Task
from kdist.data import worker_arguments
from kdist.errors import ClusterError, TaskError
from kdist.parameters.contributions import Contribution, Contributions
from kdist.replica import batch_size_of
from kdist.result import Contributions as Counts
from kdist.strategies.base import Program
from kdist.strategies.calls import CallLogs, StepLogs
from kdist.strategies.lockstep import LockstepCalls
from kdist.strategies.on_servers import OnServers


@dataclass(frozen=True)
class Quorum:
    """How many gradients make an update, and who may compute them.

    Attributes:
        replicas_to_aggregate: gradients of an update.
        num_workers: workers there are.
        shared_tokens: TF1's tokens: each step has as many as there are workers, or gradients if those are more, and
            whoever is fast takes several. Otherwise every worker has its own share.
    """

    replicas_to_aggregate: int
    num_workers: int
    shared_tokens: bool = False

    def share(self, worker: int) -> int:
        """How many gradients of one step a worker may compute, if shares are its own."""
        if self.replicas_to_aggregate <= self.num_workers:
            return 1
        return (self.replicas_to_aggregate + self.num_workers - 1 - worker) // self.num_workers

    @property
    def needs_everyone(self) -> bool:
        """Whether each step takes all that all workers may compute, so that it does not matter who is first."""
        return not self.shared_tokens and self.replicas_to_aggregate >= self.num_workers

    @property
    def tokens(self) -> int:
        """How many gradients of one step all workers together may compute."""
        return max(self.replicas_to_aggregate, self.num_workers)


@dataclass(frozen=True)
class _Gradient:
    """What a call of a worker brought: tensors on the servers, and what it logged."""

    contribution: Contribution
    packed: np.ndarray


class SyncReplicas(OnServers):
    """Synchronous parameter servers with backup workers. Args: those of `OnServers`.

    Args:
        replicas_to_aggregate: gradients of one update; more than there are workers lets each compute several.
        backup_workers: workers beyond that number, if it is not given.
        token_mode: `strict`: every worker may contribute to every step, by its own share; `tf1`: whoever is fast.
    """

    name: ClassVar[str] = "sync_replicas"

    def __init__(
        self,
        *args: Any,
        replicas_to_aggregate: int | None = None,
        backup_workers: int = 0,
        token_mode: str = "strict",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        num_workers = self._shape.num_workers
        self._quorum = Quorum(replicas_to_aggregate or num_workers - backup_workers, num_workers, token_mode == "tf1")
        self.batches_per_step = self._quorum.replicas_to_aggregate
        self._iterators: dict[int, Any] = {}
        #: Workers with a call in flight, and the step it was begun at.
        self._busy: dict[int, int] = {}
        #: Workers that are lost or have no more data.
        self._absent: set[int] = set()
        self._applies: dict[int, Callable[..., tf.Tensor]] = {}
        #: The call of one worker, made when it is first needed.
        self._gradient: tf.types.experimental.ConcreteFunction | None = None
        self._tracing = threading.Lock()
        #: None where it matters who comes first.
        self._lockstep: LockstepCalls | None = None
        self._in_lockstep = False
        #: The global step; None until it has been read from the servers.
        self._step: int | None = None

    def start(self, program: Program) -> None:
        super().start(program)
        # All workers take all steps.
        self._sizer = self._program.sizer(num_workers=1)
        self._logs = CallLogs(self._program.replica_step)
        self._contributions = Contributions(self._store, program.model.optimizer)
        if self._quorum.needs_everyone:
            shares = [self._quorum.share(worker) for worker in range(self._shape.num_workers)]
            self._lockstep = LockstepCalls(
                self._program.replica_step,
                self._store,
                self._contributions,
                self._logs,
                iterator_spec(self._make_dataset),
                shares,
            )

    def _next_logs(self, may_begin: int, interrupted: Callable[[], bool]) -> StepLogs | None:
        if not self._iterators:
            self._make_iterators()
            self._warming_up = True
        if interrupted():
            return None
        if self._lockstep is not None:
            logs = self._lockstep_call(self._lockstep, may_begin)
            if logs is not None:
                return logs
            # The call that failed cancelled the reads of the workers that have data; their iterators end with that.
            self._make_iterators()
        return self._one_update()

    def _lockstep_call(self, calls: LockstepCalls, remaining: int) -> StepLogs | None:
        """Runs a call over all tasks; None if a worker has no data, so that the others have to go on without it."""
        size = self._sizer.next_size(remaining)
        self._warming_up |= not calls.traced(size)
        iterators = list(self._iterators.values())
        step = self._present_step()
        self._in_lockstep = True
        try:
            packed = self._watched(lambda: [logs.numpy() for logs in calls.function(size)(iterators)])
        except TaskError as error:
            self._in_lockstep = False
            if not isinstance(error.__cause__, tf.errors.OutOfRangeError) or self.global_step() != step:
                raise
            self._lockstep = None
            return None
        self._in_lockstep = False
        self._step = step + size
        logs = reduce(StepLogs.beside, [self._logs.unpack(row) for row in packed])
        shares = {worker: Counts(accepted=self._quorum.share(worker)) for worker in self._iterators}
        return replace(logs, contributions=(shares,) * size)

    def _one_update(self) -> StepLogs:
        """Collects the gradients of one step and applies their mean."""
        step = self._present_step()
        accepted: list[tuple[int, _Gradient]] = []
        given = dict.fromkeys(range(self._shape.num_workers), 0)
        counts: dict[int, Counts] = {}
        self._hand_out(step, given)
        while len(accepted) < self._needed():
            worker, outcome = self._running().next_finished()
            is_stale = self._busy.pop(worker) < step
            gradient = self._gradient_of(worker, outcome)
            if gradient is not None and is_stale:
                counts[worker] = counts.get(worker, Counts()) + Counts(dropped=1, stale=1)
            elif gradient is not None:
                counts[worker] = counts.get(worker, Counts()) + Counts(accepted=1)
                accepted.append((worker, gradient))
            del outcome, gradient
            self._hand_out(step, given)
        # In the order of workers, so that sums do not depend on who was first.
        accepted.sort(key=lambda pair: pair[0])
        self._step = self._apply([gradient.contribution for _, gradient in accepted])
        logs = [self._logs.unpack(gradient.packed) for _, gradient in accepted]
        staleness = step - min(int(log.staleness[0]) for log in logs)
        return replace(reduce(StepLogs.beside, logs), staleness=np.array([staleness]), contributions=(counts,))

    def _hand_out(self, step: int, given: dict[int, int]) -> None:
        """Begins a call at every idle worker that may still compute a gradient of this step."""
        for worker in self._active():
            if worker in self._busy:
                continue
            if self._quorum.shared_tokens:
                may = sum(given.values()) < self._quorum.tokens
            else:
                # The share of absent workers is left to nobody: the quorum is lowered by it.
                may = given[worker] < self._quorum.share(worker)
            if may:
                given[worker] += 1
                self._busy[worker] = step
                self._running().start_on(worker, self._call, self._iterators[worker])

    def _active(self) -> list[int]:
        return [w for w in range(self._shape.num_workers) if w not in self._absent]

    def _needed(self) -> int:
        """Gradients of an update: what was asked for, or what the workers that have data can bring."""
        active = self._active()
        if not active:
            raise ClusterError("no worker is left that has data")
        if self._quorum.shared_tokens:
            return self._quorum.replicas_to_aggregate
        return min(self._quorum.replicas_to_aggregate, sum(self._quorum.share(worker) for worker in active))

    def _gradient_of(self, worker: int, outcome: Future[_Gradient]) -> _Gradient | None:
        """What a call brought; None if its worker has no more data."""
        try:
            return outcome.result()
        except tf.errors.OutOfRangeError:
            self._absent.add(worker)
            if not self._active():
                raise
            warnings.warn(
                f"kdist: {Task('worker', worker)} has no more data; {self._needed()} gradients make an update from now "
                "on",
                stacklevel=2,
            )
            return None
        except tf.errors.UnavailableError:
            self._absent.add(worker)
            # Backup workers may take the place of one that is lost.
            if self._needed() < self._quorum.replicas_to_aggregate or not self._is_lost(worker):
                raise
            self._running().check_tasks()
            return None

    def _is_lost(self, worker: int) -> bool:
        lost = lost_soon(self._cluster.lost_tasks) if self._cluster is not None else {}
        return Task("worker", worker) in lost

    def _call(self, iterator: Any) -> _Gradient:
        *contribution, packed = self._compute()(iterator)
        return _Gradient(contribution, packed.numpy())

    def _compute(self) -> tf.types.experimental.ConcreteFunction:
        """The call of one worker that brings one gradient."""
        with self._tracing:
            if self._gradient is None:
                self._warming_up = True
                self._gradient = tf.function(self._one_gradient, autograph=False).get_concrete_function(
                    iterator_spec(self._make_dataset)
                )
            return self._gradient

    def _one_gradient(self, iterator: Any) -> list[tf.Tensor]:
        batch, seeds = next(iterator)
        pulled = self._store.pull()
        metrics = self._logs.initial_metrics()
        output = self._program.replica_step(pulled.trainable, pulled.state, metrics, seeds, batch)
        contribution = self._contributions.bring(output.gradients, output.state, pulled)
        # In the place of the staleness stands the step it was computed at: how stale that is the chief knows.
        return [*contribution, self._logs.pack(pulled.global_step[None], [[batch_size_of(batch), *output.metrics]])]

    def _apply(self, contributions: list[Contribution]) -> int:
        """Applies the mean; returns the global step that this makes."""
        size = len(contributions)
        if size not in self._applies:
            self._warming_up = True
            specs = [tf.TensorSpec(s.shape, s.dtype) for s in self._compute().structured_outputs[:-1]]
            apply = tf.function(self._contributions.apply_mean, autograph=False)
            self._applies[size] = apply.get_concrete_function([specs] * size)
        return int(self._watched(lambda: self._applies[size](contributions).numpy()))

    def _make_iterators(self) -> None:
        data, num_workers, first_step = self._program.program.data, self._shape.num_workers, self.global_step()

        def make() -> None:
            for worker in range(num_workers):
                arguments = worker_arguments(data, worker, num_workers, first_step)
                self._iterators[worker] = self._running().iterator_on(worker, self._make_dataset, arguments)

        self._watched(make)

    def _present_step(self) -> int:
        """The global step. Every update is this process's own, so it is read once."""
        if self._step is None:
            self._step = self.global_step()
        return self._step

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        super().write(values)
        self._step = None

    @property
    def _in_call(self) -> bool:
        return bool(self._busy) or self._in_lockstep

    def _held_on_tasks(self) -> tuple[str, ...]:
        return ("_lockstep", "_gradient", "_applies", "_iterators", "_contributions")
