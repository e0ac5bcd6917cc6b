"""The config of a run as dataclasses: every key with its type, which Hydra checks, its default and its meaning."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Optional

from kdist.config import checks, targets
from kdist.config.suggestions import did_you_mean
from kdist.errors import ConfigError

RESUME_MODES = ("auto", "never", "must")
PLACEMENT_POLICIES = ("auto", "round_robin", "greedy", "partitioned")


@dataclass
class DevicesConfig:
    """GPUs that tasks may use: a list of numbers for all tasks of a job, or a list of such lists, one per task."""

    ps: Any = None
    """For parameter servers; null: none."""

    worker: Any = None
    """For workers, for example [0], or [[0],[1]] for two workers; null: all."""

    chief: Any = None
    """For a chief that is a task of its own; null: all."""

    def __post_init__(self) -> None:
        for job, devices in vars(self).items():
            checks.check_devices(f"cluster.devices.{job}", devices)


@dataclass
class ClusterConfig:
    """The place of the tasks."""

    shape: str = "local"
    """`NpsMw`, `Mw`, `local`, `hosts` or `tf_config`; `cluster=2ps2w` sets it."""

    started_by: str = "auto"
    """NpsMw, Mw: who starts the tasks: `kdist`, `slurm`, `tf_config`; `auto`: others, if they started all of them."""

    start_timeout: float = 120.0
    """Seconds within which every task must serve; more than 0."""

    step_timeout: float = 300.0
    """Seconds without progress after which an unresponsive task is replaced, or the run fails; more than 0."""

    max_worker_restarts: int = 3
    """The number of times that each lost worker of a local cluster is restarted; at least 0."""

    min_workers: int = 1
    """The fewest workers that train after a resize; with fewer, training waits for others to join. At least 1."""

    scaler: str = "auto"
    """+hooks=autoscale: `local` processes, `none` (says what is better), `auto`, or a command with {workers}, {ps}."""

    patience_for_workers: float = 600.0
    """Seconds to wait for workers if fewer than `min_workers` are left; then the run saves and ends. More than 0."""

    patience: float = 15.0
    """Tasks that others start: seconds without a response after which a task counts as lost; at least 1."""

    wait_for_next_chief: bool = False
    """Tasks that others start: when the chief stops early or is lost, servers and workers wait for the next one."""

    chief_port: Optional[int] = None
    """Tasks that others start: port at which servers and workers reach the chief's process; null: any free port."""

    ps: list[str] = field(default_factory=list)
    """cluster=hosts: addresses (host:port) of the parameter servers."""

    worker: list[str] = field(default_factory=list)
    """cluster=hosts: addresses of the workers; worker 0 is also the chief, unless `cluster.chief` is set."""

    chief: Optional[str] = None
    """cluster=hosts: address of the chief, if it is a task of its own."""

    join: Optional[str] = None
    """cluster=hosts: the run dir of a run that this process joins as a `worker` or `ps`; or give `chief` alone."""

    job: Optional[str] = None
    """cluster=hosts: the job of this process: `ps`, `worker`, `chief` or `evaluator`."""

    task: Optional[int] = None
    """cluster=hosts: the index of this process in its job; null: 0."""

    devices: DevicesConfig = field(default_factory=DevicesConfig)
    """GPUs that tasks may use, by job."""

    bind: Optional[str] = "auto"
    """The network interface (eth1) of the tasks, besides lo; null: all; auto: lo alone if all tasks are here."""

    isolate: str = "never"
    """Tasks that kdist starts: a private network namespace: `auto` if the system permits it, `must`, or `never`."""

    allow_unprotected_network: bool = False
    """Tasks that others start: accepts public addresses, where anyone who reaches a task can run code."""

    stay: bool = False
    """The earlier name of `cluster.wait_for_next_chief`."""

    def __post_init__(self) -> None:
        self.wait_for_next_chief |= self.stay
        checks.check_one_of("cluster.started_by", self.started_by, ("auto", "kdist", "slurm", "tf_config"))
        checks.check_one_of("cluster.isolate", self.isolate, ("never", "auto", "must"))
        checks.check_more_than_zero("cluster.start_timeout", self.start_timeout)
        checks.check_more_than_zero("cluster.step_timeout", self.step_timeout)
        checks.check_more_than_zero("cluster.patience_for_workers", self.patience_for_workers)
        checks.check_whole_number("cluster.min_workers", self.min_workers, at_least=1, required=True)
        if self.patience < 1:
            raise ConfigError(f"cluster.patience={self.patience:g}: must be at least 1")
        checks.check_port("cluster.chief_port", self.chief_port)
        checks.check_whole_number("cluster.max_worker_restarts", self.max_worker_restarts, at_least=0, required=True)


@dataclass
class _StrategyName:
    """The name of a strategy, in its own class so that it comes first wherever the options are listed."""

    name: str = "auto"
    """`parameter_server`, `sync_replicas`, `mirrored`, `multi_worker_mirrored`, `single`, or `auto` by the cluster."""


@dataclass
class ServerOptions:
    """Options of every strategy with parameter servers."""

    placement: str = "auto"
    """Placement of variables on servers: `round_robin`, `greedy`, `partitioned` (splits), `auto` (splits, on few)."""

    # TensorFlow's `MinSizePartitioner` has the same threshold.
    partition_min_bytes: int = 256 << 10
    """partitioned, auto: splits larger variables by rows over the servers; at least 1."""

    wire_dtype: Optional[str] = None
    """With servers: `bfloat16` halves the bytes of values and gradients in transit; null sends them unchanged."""

    def __post_init__(self) -> None:
        checks.check_one_of("strategy.placement", self.placement, PLACEMENT_POLICIES)
        checks.check_whole_number("strategy.partition_min_bytes", self.partition_min_bytes)
        if self.wire_dtype is not None:
            checks.check_one_of("strategy.wire_dtype", self.wire_dtype, ("bfloat16",))


@dataclass
class ParameterServerOptions(ServerOptions):
    """Options of `parameter_server`."""

    local_steps: int = 1
    """parameter_server: batches that a worker trains on between a pull and a push, which is one step; at least 1."""

    prefetch: Any = "auto"
    """parameter_server: steps begun before the push of one is applied; `auto` finds the number, over several hosts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.check_whole_number("strategy.local_steps", self.local_steps, required=True)
        checks.number_or_auto("strategy.prefetch", self.prefetch, at_least=0)


@dataclass
class SyncReplicasOptions(ServerOptions):
    """Options of `sync_replicas`."""

    replicas_to_aggregate: Optional[int] = None
    """sync_replicas: gradients per update; null: one per worker, backup workers excluded; more: some send two."""

    backup_workers: int = 0
    """sync_replicas: workers beyond those that an update waits for; fewer than the number of workers."""

    token_mode: str = "strict"
    """sync_replicas: `strict`: each worker has a share of every step; `tf1`: fast workers may take more."""

    on_lost_worker: str = "lower"
    """sync_replicas: with too few workers, `lower` averages fewer gradients until they return; `fail` ends the run."""

    worker_timeout: float = 60.0
    """sync_replicas: seconds to wait for a lost worker before that; more than 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.check_whole_number("strategy.replicas_to_aggregate", self.replicas_to_aggregate)
        checks.check_whole_number("strategy.backup_workers", self.backup_workers, at_least=0, required=True)
        checks.check_one_of("strategy.token_mode", self.token_mode, ("strict", "tf1"))
        checks.check_one_of("strategy.on_lost_worker", self.on_lost_worker, ("lower", "fail"))
        checks.check_more_than_zero("strategy.worker_timeout", self.worker_timeout)


@dataclass
class MirroredOptions:
    """Options of `mirrored`."""

    devices: Optional[int] = None
    """mirrored: GPUs to use (null: all), or without GPUs, logical CPU devices to create; at least 2."""

    def __post_init__(self) -> None:
        checks.check_whole_number("strategy.devices", self.devices)


@dataclass
class StrategyConfig(MirroredOptions, SyncReplicasOptions, ParameterServerOptions, _StrategyName):
    """The name of a strategy, which spreads training steps over the tasks, and the options of all strategies."""

    _target_: Optional[str] = None
    """A class of your own, derived from that of the strategy. null: kdist's class."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of your class, in addition to those of the strategy."""

    def __post_init__(self) -> None:
        MirroredOptions.__post_init__(self)
        SyncReplicasOptions.__post_init__(self)


@dataclass
class OptimizerConfig:
    """Overrides the model's optimizer, or compiles the model; null keeps the model's setting."""

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
    """Keeps a moving average of each variable; the model gets the averages at the end."""

    ema_momentum: Optional[float] = None
    """Weight of the old average in the new one."""

    clipnorm: Optional[float] = None
    """Clips the norm of each gradient."""

    global_clipnorm: Optional[float] = None
    """Clips the norm of all gradients together."""

    clipvalue: Optional[float] = None
    """Clips each value of each gradient."""

    def __post_init__(self) -> None:
        rate = self.learning_rate
        if isinstance(rate, (int, float)):
            checks.check_more_than_zero("optimizer.learning_rate", float(rate))
        elif isinstance(rate, str):
            raise ConfigError(f"optimizer.learning_rate={rate}: must be a number or a schedule (_target_)")


@dataclass
class TrainConfig:
    """The length of a training, and its portions."""

    steps: Optional[int] = None
    """The global step to stop at; at least 1. Either this or `epochs`; null with endless data: no end."""

    epochs: Optional[int] = None
    """Passes over the data; 0 trains nothing. null, without `steps`: 1."""

    more_steps: Optional[int] = None
    """Steps to train from where the run dir is, whatever `steps` and `epochs`; at least 1."""

    more_epochs: Optional[int] = None
    """Passes over the data, which begins anew, from where the run dir is, whatever `steps` and `epochs`; at least 1."""

    batch_size: Optional[int] = 32
    """Examples per replica and step; at least 1. null: 32, or what reads arrays in `steps_per_epoch` steps."""

    steps_per_call: Any = "auto"
    """Steps that a worker runs per call of the chief: at least 1, or `auto`. With backup workers it is 1."""

    steps_per_epoch: Optional[int] = None
    """Steps per epoch; null: derived from the data."""

    validation_every_steps: Optional[int] = None
    """Also validate at multiples of this step; null: only at the ends of epochs."""

    max_restarts: int = 3
    """The number of times that training resumes from the newest checkpoint after a failure; at least 0."""

    validate_with_ema: bool = False
    """During training, validate the moving averages of an optimizer with `use_ema` instead of the parameters."""

    def __post_init__(self) -> None:
        for name in ("steps", "more_steps", "more_epochs", "batch_size", "steps_per_epoch", "validation_every_steps"):
            checks.check_whole_number(f"train.{name}", getattr(self, name))
        checks.check_whole_number("train.epochs", self.epochs, at_least=0)
        if self.more_steps and self.more_epochs:
            raise ConfigError(f"train.more_steps={self.more_steps}: give either this or train.more_epochs")
        checks.check_whole_number("train.max_restarts", self.max_restarts, at_least=0, required=True)
        checks.number_or_auto("train.steps_per_call", self.steps_per_call, at_least=1)


@dataclass
class SweepConfig:
    """The comparison of the trials of a sweep (-m)."""

    metric: Optional[str] = None
    """Validation metric whose best value counts; `steps_per_second`, `examples_per_second`, `seconds`; null: loss."""

    mode: Optional[str] = None
    """`min` if lower values are better, `max` if higher ones are; null: the metric decides."""

    def __post_init__(self) -> None:
        if self.mode is not None:
            checks.check_one_of("sweep.mode", self.mode, ("min", "max"))


@dataclass
class RunConfig:
    """One run."""

    name: str = "${kdist.run_name:}"
    """Name of the run: the recipe's name, or `train`."""

    dir: str = "runs/${run.name}/${kdist.run_folder:${now:%Y-%m-%d_%H-%M-%S}}"
    """Folder or URL (`s3://bucket/x`); the same again resumes."""

    seed: Optional[int] = None
    """Makes initial weights, shuffling and Dropout repeatable; at least 0. null: random."""

    plan_only: bool = False
    """Prints the server of each variable and their load, writes `placement.txt` and `.png`, and starts nothing."""

    log_device_placement: bool = False
    """Logs the device of each op, on the console and in `logs/chief-0.log`."""

    soft_device_placement: bool = True
    """Runs an op on another device if its own has no kernel for it."""

    export_max_bytes: int = 2 << 30
    """A larger model stays on its servers and in checkpoints, without a `model.keras`; at least 0."""

    grace_secs: Optional[float] = None
    """Seconds to save and exit after a stop signal or Ctrl-C; null: 20 in a Slurm job or a pod, 30 elsewhere."""

    stop_signals: list[str] = field(default_factory=lambda: list(checks.STOP_SIGNALS))
    """Signals at which a run saves and exits with code 143, also when sent to all of its tasks."""

    storage_timeout: float = 60.0
    """Seconds for which object storage may fail before a save counts as failed; more than 0."""

    start_from: Optional[str] = None
    """A run dir, or a file `x.keras`, whose values a run without a checkpoint begins with, as far as they fit."""

    resume: str = "auto"
    """`auto` resumes if there is a checkpoint, `must` fails if there is none, `never` starts over."""

    verbose: Any = "auto"
    """0: warnings and errors only; 1, auto: lines, a live one on a terminal; 2: lines; 3: tasks and placement too."""

    log_format: str = "text"
    """Lines on the console and in `logs/chief-0.log`: `text` for people, or `json`, one object a line, for programs."""

    metrics_port: Optional[int] = None
    """Port at which Prometheus finds the state of the run, at http://127.0.0.1:PORT/metrics; null: none."""

    metrics_host: str = "127.0.0.1"
    """The address of that port; another than the loopback address opens it to the network."""

    health_port: Optional[int] = None
    """Port of /healthz and /readyz on the chief and on tasks that others started, at `cluster.bind`; null: none."""

    hparams: list[str] = field(default_factory=list)
    """Additional keys for TensorBoard's HParams tab, which shows overridden keys and a few others."""

    trust: list[str] = field(default_factory=list)
    """Packages that `_target_` may name besides Keras and kdist, for example [my_code]; on the command line only."""

    def __post_init__(self) -> None:
        checks.check_one_of("run.resume", self.resume, RESUME_MODES)
        checks.check_one_of("run.log_format", self.log_format, ("text", "json"))
        checks.check_port("run.metrics_port", self.metrics_port)
        checks.check_port("run.health_port", self.health_port)
        checks.check_verbose("run.verbose", self.verbose)
        checks.check_whole_number("run.export_max_bytes", self.export_max_bytes, at_least=0)
        if self.grace_secs is not None:
            checks.check_more_than_zero("run.grace_secs", self.grace_secs)
        checks.check_more_than_zero("run.storage_timeout", self.storage_timeout)
        checks.check_stop_signals("run.stop_signals", self.stop_signals)
        targets.check_packages("run.trust", self.trust)
        checks.check_seed("run.seed", self.seed)


@dataclass
class Config:
    """The whole config; recipes change any part of it."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """The place of the tasks (`cluster=2ps2w`)."""

    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    """The strategy, which spreads training steps (`strategy=parameter_server`)."""

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
    """Hooks around training steps, by name; null removes one (`hooks.summary=null`)."""

    callbacks: dict[str, Any] = field(default_factory=dict)
    """Keras callbacks, by names of your own (`+callbacks.stop._target_=keras.callbacks.EarlyStopping`)."""

    drill: Any = None
    """A fault to inject, to see how a run handles it (`+drill=kill_worker drill.at_step=200`)."""

    train: TrainConfig = field(default_factory=TrainConfig)
    """The length of the training, and its portions."""

    sweep: SweepConfig = field(default_factory=SweepConfig)
    """The comparison of the trials of a sweep."""

    run: RunConfig = field(default_factory=RunConfig)
    """The place of the output, and the way to start."""

    def with_values(self, **groups: dict[str, Any]) -> Config:
        """The same config with other values, by group and key: `with_values(run={"seed": 3})`."""
        return replace(self, **{name: replace(getattr(self, name), **values) for name, values in groups.items()})

    def check(self) -> None:
        """Refuses two ends, and nodes that name nothing to call; a program has arguments in their place."""
        steps, epochs = self.train.steps, self.train.epochs
        if steps is not None and epochs is not None:
            raise ConfigError(f"train.steps={steps} and train.epochs={epochs}: give one, set the other to null")
        for key, node in targets.nodes_to_call(vars(self)).items():
            checks.check_target(key, node)


#: The options that each strategy takes; one that is not listed takes none.
OPTIONS_OF: dict[str, type[ServerOptions] | type[MirroredOptions]] = {
    "parameter_server": ParameterServerOptions,
    "sync_replicas": SyncReplicasOptions,
    "mirrored": MirroredOptions,
}


def options_of(config: StrategyConfig, name: str) -> Any:
    """The options of strategy `name`, as its own dataclass; None if it has none."""
    kind = OPTIONS_OF.get(name)
    return None if kind is None else kind(**{item.name: getattr(config, item.name) for item in fields(kind)})


def foreign_options(config: StrategyConfig, name: str) -> dict[str, Any]:
    """The options that differ from their defaults and that strategy `name` does not take.

    Where variables are placed has no effect without servers, and is not refused there.
    """
    kind = OPTIONS_OF.get(name)
    own = {"placement", "partition_min_bytes", *(() if kind is None else (item.name for item in fields(kind)))}
    return {
        item.name: getattr(config, item.name)
        for options in OPTIONS_OF.values()
        for item in fields(options)
        if item.name not in own and getattr(config, item.name) != item.default
    }


def strategy_config(
    name: str, options: dict[str, Any], custom: type | None = None, others: Iterable[str] = ()
) -> StrategyConfig:
    """The config of strategy `name` with `options` by their names; `custom` is its class, if it is not kdist's own.

    `others` are the other arguments of the caller, which a misspelled option may have meant.
    """
    known = [item.name for item in fields(StrategyConfig) if item.name not in ("name", "_target_")]
    for option in options:
        if option in known:
            continue
        hint = did_you_mean(option, [*others, *known]) or f"strategies take {', '.join(known)}"
        if option in {item.name for item in fields(ClusterConfig)} - {*others}:
            hint = f"it belongs to the cluster: cluster=kdist.ClusterConfig(..., {option}=...)"
        raise ConfigError(f"Trainer({option}=...): there is no such argument; {hint}")
    target = None if custom is None else f"{custom.__module__}.{custom.__qualname__}"
    return StrategyConfig(name, **options, _target_=target)
