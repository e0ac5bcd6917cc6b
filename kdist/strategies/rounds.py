"""Rounds of all-reduce workers that others have started: the workers that train together until their number changes.

TensorFlow's collectives are of a fixed set of workers. When some join, leave or are lost, the round ends: every worker
reports to the board of the chief (`kdist.cluster.processes.chief_board`), as it does in the beginning, and gets the
next round, in which it joins the others anew, in the same process.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from kdist._compat.collectives import abort_collectives, join_collectives, serve_collectives
from kdist.cluster.description import TaskFingerprint
from kdist.cluster.external import ExternalCluster, chief_address_of
from kdist.cluster.network import sockets
from kdist.cluster.network.names import host_and_port, without_proxy
from kdist.cluster.network.port_probe import accepts_connections, wait_for_all
from kdist.cluster.network.tcp_timeouts import TcpTimeouts
from kdist.cluster.processes.chief_board import Chief
from kdist.cluster.spec import ClusterShape, Membership, Task
from kdist.config.schema import ClusterConfig
from kdist.data.epoch_lengths import EpochCount, EpochLengths
from kdist.data.shares import SharedData, SharesElsewhere
from kdist.dispatch.health import describe_lost
from kdist.errors import ClusterError, ConfigError, NoWorkersError
from kdist.log import warn
from kdist.strategies.base import PendingResize, TrainingSpec

_POLL_SECS = 0.05
_KNOWN_SECS = 1.5
#: The addresses at which this process serves collectives, by the task that it is: TensorFlow cannot stop a server.
_serving: dict[Task, str] = {}
_joined: dict[Membership, tf.distribute.Strategy] = {}
_numbers = itertools.count(1)


def serve(membership: Membership, config: ClusterConfig) -> None:
    """Starts the server of this worker, which TensorFlow can do only before its first op in a process.

    Raises:
        ConfigError: it has run one already.
        ClusterError: the address is in use.
    """
    task = membership.task
    if task in _serving:
        return
    address = membership.spec.address(task)
    if accepts_connections(address):
        raise ClusterError(f"{task} cannot serve at {address}: the address is in use")
    os.environ.update(without_proxy(membership.spec.addresses.values()))
    if membership.is_chief:
        # The board of the chief is at its address.
        with chief_address_of(address, config) as address:
            _serve(task, address)
    else:
        _serve(task, address)


def _serve(task: Task, address: str) -> None:
    try:
        serve_collectives(task.index, address)
    except RuntimeError as error:
        raise ConfigError(
            "multi_worker_mirrored: TensorFlow has run ops in this process already; make the Trainer before "
            f"anything else ({error})"
        ) from error
    except tf.errors.OpError as error:
        raise ClusterError(f"{task} cannot serve at {address}: {error.message}") from error
    sockets.bind_port(host_and_port(address)[1])
    _serving[task] = address


def join_all(membership: Membership, timeout: float) -> None:
    """Joins workers that kdist has started on this machine, for good; before TensorFlow's first op in a process.

    Raises `ClusterError` for workers that do not serve within `timeout` seconds.
    """
    workers, own = membership.spec.addresses, membership.task
    os.environ.update(without_proxy(workers.values()))
    distribution = join_collectives(_by_index(workers), own.index)
    sockets.bind_port(membership.spec.port(own))
    # A collective of one fails if another does not serve yet.
    wait_for_all({task: address for task, address in workers.items() if task != own}, timeout)
    _joined[membership] = distribution


def joined(membership: Membership) -> tuple[Mapping[int, str], tf.distribute.Strategy]:
    """The workers that `join_all` has joined, by their indices, and the strategy over them."""
    return _by_index(membership.spec.addresses), _joined[membership]


def _by_index(workers: Mapping[Task, str]) -> dict[int, str]:
    return {task.index: address for task, address in workers.items()}


@dataclass(frozen=True)
class Round:
    """A round, as the chief tells it to the other workers.

    Attributes:
        number: another one in each round.
        workers: the address of each worker, by its index.
        began_with: the number of workers with which the fit began: the data is made for it.
        num_shares: of the data, if the chief says who reads which; None otherwise.
        seed, count, lengths: of the training, see `TrainingSpec`.
    """

    number: int
    workers: Mapping[int, str]
    began_with: int
    num_shares: int | None
    seed: int
    count: EpochCount
    lengths: EpochLengths | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Round:
        known = dict(given)
        workers = {int(index): address for index, address in known.pop("workers").items()}
        count, lengths = EpochCount(**known.pop("count")), known.pop("lengths")
        return cls(workers=workers, count=count, lengths=lengths and EpochLengths(**lengths), **known)

    @property
    def shape(self) -> ClusterShape:
        """The shape of the cluster when the fit began."""
        return ClusterShape(0, self.began_with)

    def of(self, spec: TrainingSpec) -> TrainingSpec:
        """The same training, with the epochs and shares of the chief."""
        data = spec.data if self.num_shares is None else SharesElsewhere(spec.data, self.num_shares)
        return replace(spec, count=self.count, epoch_lengths=self.lengths, data=data)

    def join(self, index: int) -> tf.distribute.Strategy:
        """Joins the other workers."""
        os.environ.update(without_proxy(self.workers.values()))
        return join_collectives(self.workers, index, self.number)


class ChiefsRounds:
    """The chief's side: begins rounds, and knows who is there.

    Args:
        membership: of the chief, which serves.
        fingerprint: to compare with the other workers.
    """

    def __init__(self, membership: Membership, config: ClusterConfig, fingerprint: TaskFingerprint | None) -> None:
        self._membership, self._config, self._fingerprint = membership, config, fingerprint
        self._began_with = membership.spec.shape.num_workers
        self._number = 0

    def launch(self, log_dir: Path) -> ExternalCluster:
        """Starts the board, and returns at once."""
        address = _serving[self._membership.task]
        self.cluster = ExternalCluster(
            self._membership.spec, log_dir, self._config, self._fingerprint, chief_address=address
        )
        self.cluster.launch()
        return self.cluster

    def begin(self, spec: TrainingSpec) -> tuple[Mapping[int, str], tf.distribute.Strategy]:
        """Begins a round of all workers, which have reported; returns their addresses, and the strategy over them."""
        own = self._membership.task
        workers = {**_by_index(self.cluster.spec.addresses), own.index: self.cluster.chief_address}
        self.cluster.end_round(self._number)
        self._number = next(_numbers)
        num_shares = spec.data.num_shares if isinstance(spec.data, SharedData) else None
        begun = Round(self._number, workers, self._began_with, num_shares, spec.seed, spec.count, spec.epoch_lengths)
        # Before the others: their first collective asks this process who takes part.
        distribution = begun.join(own.index)
        for task in self.cluster.spec.tasks:
            self.cluster.answer(task, {"round": begun.to_dict()})
        return workers, distribution

    def break_off(self) -> None:
        """Ends the round for workers that wait in it, and for a call of this process that does."""
        abort_collectives("this round of all-reduce has ended")
        self.cluster.end_round(self._number)

    def missing(self, tasks: Collection[Task]) -> set[Task]:
        """The tasks that have not reported since the last round began."""
        return {*tasks} - self.cluster.waiting() - {self._membership.task}

    def wait_for(self, tasks: Collection[Task]) -> None:
        """Waits until these tasks have reported; raises `ClusterError` if one is lost, or does not in time."""
        timeout = self._config.step_timeout
        deadline = time.monotonic() + timeout
        while missing := self.missing(tasks):
            if lost := self.lost().keys() & missing:
                raise ClusterError(self._how_lost(lost))
            if time.monotonic() > deadline:
                names = ", ".join(sorted(map(str, missing)))
                raise ClusterError(f"{names} did not respond within {timeout:g} s (cluster.step_timeout)")
            time.sleep(_POLL_SECS)

    def regroup(self, interrupted: Callable[[], bool]) -> PendingResize:
        """Waits for the workers that are lost, and returns the change to those that are there by then.

        It waits for `cluster.patience` seconds, and for `cluster.patience_for_workers` if fewer than
        `cluster.min_workers` are left.

        Raises:
            NoWorkersError: too few are left.
            ClusterError: the run was interrupted meanwhile.
        """
        config, tasks, before = self._config, self.cluster.spec.tasks, self.cluster.spec.shape
        began = time.monotonic()
        while missing := self.missing(tasks):
            num_left, waited = len(tasks) - len(missing), time.monotonic() - began
            if num_left >= config.min_workers and waited > config.patience:
                warn(f"{self._how_lost(missing)}, and not back after {config.patience:g} s (cluster.patience)")
                break
            if num_left < config.min_workers and waited > config.patience_for_workers:
                raise NoWorkersError(
                    f"{num_left} of at least {config.min_workers} workers (cluster.min_workers) are left, and no other "
                    f"one has joined within {config.patience_for_workers:g} s (cluster.patience_for_workers)"
                )
            if interrupted():
                raise ClusterError(f"interrupted while {', '.join(sorted(map(str, missing)))} did not respond")
            time.sleep(_POLL_SECS)
        return PendingResize(before, ClusterShape(0, len(tasks) - len(missing)), leaving=sorted(missing, key=str))

    def lost(self) -> dict[Task, str]:
        """The lost workers, each with a predicate for messages."""
        return self.cluster.lost_tasks()

    def lost_soon(self) -> str:
        """Says who is lost, if anybody is: the connections of a task end a moment before a probe finds it gone."""
        deadline = time.monotonic() + _KNOWN_SECS
        while not (lost := self.lost()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECS)
        return describe_lost(lost)

    def _how_lost(self, tasks: Collection[Task]) -> str:
        known = self.lost()
        return describe_lost({task: known.get(task, "is lost") for task in sorted(tasks, key=str)})


class WorkersRounds:
    """The side of a worker that is not the chief.

    Args:
        fingerprint: of this worker.
        before_serving: called when the chief has come, and may need this worker; its argument asks the chief to do
            without it.
    """

    def __init__(
        self,
        membership: Membership,
        config: ClusterConfig,
        fingerprint: TaskFingerprint | None,
        before_serving: Callable[[Callable[[], None]], None],
    ) -> None:
        self._membership, self._config, self._fingerprint = membership, config, fingerprint
        self._before_serving = before_serving
        self.chief = Chief(membership.spec, membership.task, config.patience)
        self._tcp_timeouts: TcpTimeouts | None = None
        self._has_reported = False
        #: Of the present round, and for those who end it.
        self._number, self._lock = 0, threading.Lock()
        #: Whether the chief has ended the run, not interrupted it.
        self.is_at_end = False

    def next(self) -> Round | None:
        """Reports to the chief, and waits for the next round; None when this worker is done.

        Raises:
            ConfigError: this worker differs from the chief.
            ClusterError: the chief never came, or is lost.
        """
        start_timeout = self._config.start_timeout
        deadline = time.monotonic() + start_timeout
        if not self._has_reported:
            self.chief.wait_for_it(start_timeout)
        if self._fingerprint is not None:
            self.chief.compare(self._fingerprint, deadline - time.monotonic(), again=self._has_reported)
        if not self._has_reported:
            self._before_serving(self.chief.ask_to_leave)
        self._has_reported = True
        self.is_at_end = self.chief.wait_until_done()
        if self.chief.answer is None or self.chief.has_left:
            return None
        begun = Round.from_dict(self.chief.answer["round"])
        self._limit_silence(begun)
        self.chief.at_end_of_round(begun.number, partial(self._end, begun.number))
        return begun

    def join(self, begun: Round) -> tf.distribute.Strategy:
        """Joins the other workers of a round."""
        with self._lock:
            self._number = begun.number
            return begun.join(self._membership.task.index)

    def _end(self, number: int) -> None:
        with self._lock:
            # Not if this worker knew it by itself, and takes part in the next one.
            if number == self._number:
                abort_collectives("the chief has ended this round of all-reduce")

    def stop(self) -> None:
        if self._tcp_timeouts is not None:
            self._tcp_timeouts.stop()
        self.chief.stop()

    def _limit_silence(self, begun: Round) -> None:
        if self._tcp_timeouts is not None:
            self._tcp_timeouts.stop()
        own = host_and_port(_serving[self._membership.task])[1]
        self._tcp_timeouts = TcpTimeouts(begun.workers.values(), [own], self._config.patience)
        self._tcp_timeouts.start()
