"""The config of a run as dataclasses: every key with its type, default, meaning and what is allowed.

Hydra checks keys and types against these while it composes a config; `__post_init__` checks the values. Nothing here
imports TensorFlow, so that a wrong config is refused at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Optional

from kdist.checks import (
    STOP_SIGNALS,
    check_more_than_zero,
    check_one_of,
    check_stop_signals,
    check_target,
    check_whole_number,
    checked_steps_per_call,
)
from kdist.cluster.isolate import MODES as ISOLATE_MODES
from kdist.errors import ConfigError
from kdist.parameters.placement import PARTITION_MIN_BYTES, POLICIES
from kdist.trusted import check_packages

RESUME_MODES = ("auto", "never", "must")
#: How much a run prints, as in Keras; 3 is kdist's own.
VERBOSE = ("auto", 0, 1, 2, 3)


@dataclass
class DevicesConfig:
    """GPUs that tasks may use: their numbers, for all tasks of a job, or a list of such lists, one per task."""

    ps: Any = None
    """Of parameter servers; null is none."""

    worker: Any = None
    """Of workers, for example [0], or [[0],[1]] for two of them; null is all."""

    chief: Any = None
    """Of a chief that is a task of its own; null is all."""

    def __post_init__(self) -> None:
        def are_numbers(value: Any) -> bool:
            return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)

        for job, devices in vars(self).items():
            one_per_task = isinstance(devices, list) and bool(devices) and all(map(are_numbers, devices))
            if devices is not None and not are_numbers(devices) and not one_per_task:
                raise ConfigError(
                    f"cluster.devices.{job}={devices}: must be a list of GPU numbers, as [0,1], or one such list a task"
                )


@dataclass
class ClusterConfig:
    """Where the tasks are."""

    shape: str = "local"
    """`NpsMw`, `Mw`, `local`, `hosts` or `tf_config`; `cluster=2ps2w` sets it."""

    start_timeout: float = 120.0
    """Seconds within which every task must serve; more than 0."""

    step_timeout: float = 300.0
    """Seconds without progress after which a silent task is replaced, or the run given up; more than 0."""

    max_worker_restarts: int = 3
    """How often each lost worker of a local cluster is started again; at least 0."""

    patience: float = 15.0
    """hosts, tf_config: seconds for which a task may not respond before it counts as lost; at least 1."""

    chief_port: Optional[int] = None
    """hosts, tf_config: port at which servers and workers reach the chief's process; null is any free one."""

    ps: list[str] = field(default_factory=list)
    """cluster=hosts: addresses (host:port) of the parameter servers."""

    worker: list[str] = field(default_factory=list)
    """cluster=hosts: addresses of the workers; worker 0 is the chief as well, unless there is a chief."""

    chief: Optional[str] = None
    """cluster=hosts: address of the chief, if it is a task of its own."""

    job: Optional[str] = None
    """cluster=hosts: what this process is: `ps`, `worker`, `chief` or `evaluator`."""

    task: Optional[int] = None
    """cluster=hosts: its index in its job, from 0; null is 0."""

    devices: DevicesConfig = field(default_factory=DevicesConfig)
    """GPUs that tasks may use, by job."""

    isolate: str = "never"
    """NpsMw, Mw: a network namespace of its own: `auto` if the system permits it, `must`, or `never`."""

    allow_unprotected_network: bool = False
    """cluster=hosts, tf_config: accepts public addresses, at which anybody can run code; see docs/security.md."""

    def __post_init__(self) -> None:
        check_one_of("cluster.isolate", self.isolate, ISOLATE_MODES)
        check_more_than_zero("cluster.start_timeout", self.start_timeout)
        check_more_than_zero("cluster.step_timeout", self.step_timeout)
        if self.patience < 1:
            raise ConfigError(f"cluster.patience={self.patience:g}: must be at least 1 second")
        if self.chief_port is not None and not 0 < self.chief_port < 2**16:
            raise ConfigError(f"cluster.chief_port={self.chief_port}: must be a port, from 1 to 65535")
        check_whole_number("cluster.max_worker_restarts", self.max_worker_restarts, at_least=0, required=True)


@dataclass
class StrategyConfig:
    """How training steps are spread over the tasks."""

    name: str = "auto"
    """`parameter_server`, `sync_replicas`, `mirrored`, `multi_worker_mirrored`, `single`, or `auto` by the cluster."""

    placement: str = "round_robin"
    """Which server holds which variable: `round_robin`, `greedy` (by bytes), or `partitioned` (cuts large ones)."""

    partition_min_bytes: int = PARTITION_MIN_BYTES
    """partitioned: cuts variables of more bytes than this by rows over the servers; at least 1."""

    replicas_to_aggregate: Optional[int] = None
    """sync_replicas: gradients of one update; null is all workers, less backup workers; more lets some bring two."""

    backup_workers: int = 0
    """sync_replicas: workers beyond those that an update waits for; less than there are workers."""

    token_mode: str = "strict"
    """sync_replicas: `strict`, each worker has its share of every step; `tf1`, whoever is fast takes more of it."""

    on_lost_worker: str = "lower"
    """sync_replicas: with too few workers, `lower` takes fewer gradients until they are back, `fail` ends the run."""

    worker_timeout: float = 60.0
    """sync_replicas: seconds to wait for a lost worker before that; more than 0."""

    local_steps: int = 1
    """parameter_server: batches that a worker trains on between a pull and a push, which is one step; at least 1."""

    wire_dtype: Optional[str] = None
    """On servers: `bfloat16` halves the bytes of values and gradients while they travel; null leaves them as is."""

    _target_: Optional[str] = None
    """A class of yours, derived from that of the strategy; see docs/extending.md. null is kdist's own."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of that class, beside those of the strategy."""

    devices: Optional[int] = None
    """mirrored: GPUs to use (null: all), or on a machine without any, logical CPU devices to make; at least 2."""

    def __post_init__(self) -> None:
        check_one_of("strategy.placement", self.placement, POLICIES)
        check_one_of("strategy.token_mode", self.token_mode, ("strict", "tf1"))
        check_whole_number("strategy.partition_min_bytes", self.partition_min_bytes)
        check_whole_number("strategy.replicas_to_aggregate", self.replicas_to_aggregate)
        check_whole_number("strategy.backup_workers", self.backup_workers, at_least=0, required=True)
        check_one_of("strategy.on_lost_worker", self.on_lost_worker, ("lower", "fail"))
        check_more_than_zero("strategy.worker_timeout", self.worker_timeout)
        check_whole_number("strategy.local_steps", self.local_steps, required=True)
        if self.wire_dtype is not None:
            check_one_of("strategy.wire_dtype", self.wire_dtype, ("bfloat16",))
        check_whole_number("strategy.devices", self.devices)


@dataclass
class OptimizerConfig:
    """Overrides the optimizer that the model was compiled with, or compiles it; null keeps what the model has."""

    name: Optional[str] = None
    """A Keras optimizer, for example `adam` or `sgd`."""

    learning_rate: Any = None
    """A number, or a schedule by its `_target_`."""

    momentum: Optional[float] = None
    """SGD, RMSprop: momentum."""

    nesterov: Optional[bool] = None
    """SGD: Nesterov momentum."""

    beta_1: Optional[float] = None
    """Adam family: decay of the first moment."""

    beta_2: Optional[float] = None
    """Adam family: decay of the second moment."""

    rho: Optional[float] = None
    """RMSprop, Adadelta: decay of the squared gradient."""

    epsilon: Optional[float] = None
    """Added to the denominator."""

    weight_decay: Optional[float] = None
    """Decoupled weight decay."""

    use_ema: Optional[bool] = None
    """Keeps a moving average beside each variable; the model gets the averages at the end."""

    ema_momentum: Optional[float] = None
    """Share of the old average in the new one."""

    clipnorm: Optional[float] = None
    """Clips the norm of each gradient."""

    global_clipnorm: Optional[float] = None
    """Clips the norm of all gradients together."""

    clipvalue: Optional[float] = None
    """Clips each value of each gradient."""

    def __post_init__(self) -> None:
        if isinstance(self.learning_rate, (int, float)):
            check_more_than_zero("optimizer.learning_rate", float(self.learning_rate))
        elif isinstance(self.learning_rate, str):
            raise ConfigError(
                f"optimizer.learning_rate={self.learning_rate}: must be a number or a schedule (_target_)"
            )


@dataclass
class TrainConfig:
    """How long and in what portions."""

    steps: Optional[int] = None
    """The global step to stop at; at least 1. Either this or `epochs`."""

    epochs: Optional[int] = None
    """Passes over the data; at least 1."""

    batch_size: int = 32
    """Examples per replica and step; at least 1."""

    steps_per_call: Any = "auto"
    """Steps that a worker runs for one call of the chief: at least 1, or `auto`. With backup workers it is 1."""

    steps_per_epoch: Optional[int] = None
    """Steps of an epoch; null follows from the data."""

    validation_every_steps: Optional[int] = None
    """Validate at multiples of this step, beside the ends of epochs; null does not."""

    max_restarts: int = 3
    """How often training goes back to the newest checkpoint after a failure; at least 0."""

    validate_with_ema: bool = False
    """Validate the moving averages of an optimizer with `use_ema`, and not the parameters, during training."""

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "batch_size", "steps_per_epoch", "validation_every_steps"):
            check_whole_number(f"train.{name}", getattr(self, name))
        check_whole_number("train.max_restarts", self.max_restarts, at_least=0, required=True)
        checked_steps_per_call("train.steps_per_call", self.steps_per_call)


@dataclass
class SweepConfig:
    """What the jobs of a sweep (-m) are compared by."""

    metric: Optional[str] = None
    """Validation metric, whose best value a job returns, or `steps_per_second`, `examples_per_second`; null: loss."""

    mode: Optional[str] = None
    """Which of its values are better, `min` or `max`; null asks the metric."""

    def __post_init__(self) -> None:
        if self.mode is not None:
            check_one_of("sweep.mode", self.mode, ("min", "max"))


@dataclass
class RunConfig:
    """One run."""

    name: str = "${kdist.run_name:}"
    """What the run is called: the recipe's name, or `train`."""

    dir: str = "runs/${run.name}/${now:%Y-%m-%d_%H-%M-%S}"
    """Folder of everything that the run leaves behind; the same one again resumes."""

    seed: Optional[int] = None
    """Makes initial weights, shuffling and Dropout repeatable; at least 0. null is random."""

    plan_only: bool = False
    """Prints which server would hold which variable, writes `placement.txt` and `.png`, and starts nothing."""

    log_device_placement: bool = False
    """Has TensorFlow say which device each op runs on, on the console and in `logs/chief-0.log`."""

    soft_device_placement: bool = True
    """Lets an op run elsewhere when its device has no kernel for it."""

    grace_secs: float = 30.0
    """After a stop signal or Ctrl-C: seconds to save and end in good order; more than 0."""

    stop_signals: list[str] = field(default_factory=lambda: list(STOP_SIGNALS))
    """Signals at which a run saves and exits with code 143, also when sent to all of its tasks."""

    resume: str = "auto"
    """`auto` resumes if there is a checkpoint, `must` fails if there is none, `never` starts anew."""

    verbose: Any = "auto"
    """0: warnings and errors only; 1, auto: lines, a live one on a terminal; 2: lines; 3: tasks and placement too."""

    hparams: list[str] = field(default_factory=list)
    """Keys to show in TensorBoard's HParams tab, beside those that the command line gives and a few that all have."""

    trust: list[str] = field(default_factory=list)
    """Packages that `_target_` may name beside Keras and kdist, for example [my_code]; on the command line only."""

    def __post_init__(self) -> None:
        check_one_of("run.resume", self.resume, RESUME_MODES)
        if self.verbose not in VERBOSE or isinstance(self.verbose, bool):
            raise ConfigError(f"run.verbose={self.verbose}: choose one of {', '.join(map(str, VERBOSE))}")
        check_more_than_zero("run.grace_secs", self.grace_secs)
        check_stop_signals("run.stop_signals", self.stop_signals)
        check_packages("run.trust", self.trust)
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ConfigError(f"run.seed={self.seed}: must be at least 0 and less than 2**32")


@dataclass
class Config:
    """The whole config. Groups: cluster, strategy, model, data, optimizer, hooks; recipes change any of them."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Where the tasks are (`cluster=2ps2w`)."""

    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    """How training steps are spread (`strategy=parameter_server`)."""

    model: Any = None
    """A function that returns a Keras model, by `_target_`, with its arguments."""

    data: Any = None
    """A function that returns the data arguments of `fit`, by `_target_`, with its arguments."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Overrides the model's optimizer (`optimizer.learning_rate=0.01`)."""

    loss: Any = None
    """Overrides the model's loss: a Keras name, or a `_target_`."""

    metrics: Optional[list[Any]] = None
    """Overrides the model's metrics: Keras names, or `_target_`s."""

    hooks: dict[str, Any] = field(default_factory=dict)
    """What happens around training steps, by name; null removes one (`hooks.summary=null`)."""

    callbacks: dict[str, Any] = field(default_factory=dict)
    """Keras callbacks, by names of your own (`+callbacks.stop._target_=keras.callbacks.EarlyStopping`)."""

    drill: Any = None
    """A fault to inject, to see what becomes of a run (`+drill=kill_worker drill.at_step=200`)."""

    train: TrainConfig = field(default_factory=TrainConfig)
    """How long and in what portions."""

    sweep: SweepConfig = field(default_factory=SweepConfig)
    """What the jobs of a sweep are compared by."""

    run: RunConfig = field(default_factory=RunConfig)
    """Where, and how to begin."""

    def __post_init__(self) -> None:
        if self.train.steps is not None and self.train.epochs is not None:
            raise ConfigError(
                f"train.steps={self.train.steps} and train.epochs={self.train.epochs}: give one, set the other to null"
            )
        for name in ("model", "data"):
            check_target(name, getattr(self, name))
        for group in ("hooks", "callbacks"):
            for name, node in getattr(self, group).items():
                if node is not None:
                    check_target(f"{group}.{name}", node)
        if self.drill is not None:
            check_target("drill", self.drill)


def strategy_config(name: str, options: dict[str, Any], custom: type | None = None) -> StrategyConfig:
    """The config of strategy `name` with `options` by their names.

    Args:
        custom: the class of the strategy, if it is not kdist's own.

    Raises:
        ConfigError: there is no such option, or a value is not allowed.
    """
    known = {item.name for item in fields(StrategyConfig)} - {"name", "_target_"}
    for option in options:
        if option not in known:
            raise ConfigError(f"Trainer({option}=...): there is no such argument; strategies take {', '.join(known)}")
    target = None if custom is None else f"{custom.__module__}.{custom.__qualname__}"
    return StrategyConfig(name, **options, _target_=target)
