"""`load_runs`: one row for each run dir below a folder: its config, its end, its metrics and its speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from kdist.config.hparams import by_key, flat, value_of
from kdist.config.schema import RunConfig
from kdist.errors import ConfigError
from kdist.log import warn
from kdist.model.logs import scalars
from kdist.run.metrics_file import EPOCH, TRAIN, VALIDATION, metrics_of, rows_in
from kdist.run.metrics_file import NAME as METRICS
from kdist.run.result import content_of, record_in
from kdist.storage.folder import Folder
from kdist.storage.object_storage import folder_at, is_url

if TYPE_CHECKING:
    import pandas

Row = dict[str, Any]

SEED = "run.seed"
RESULT = "result.json"
#: A sweep writes it into the run dir of each trial.
TRIAL = "trial.json"
#: A folder with one of these is a run dir.
_RECORDS = (RESULT, TRIAL, METRICS)
#: The first columns.
_ABOUT = ("run", "status", "strategy", "cluster", "seed")
#: The last columns, after those of metrics.
SPEED = ("steps_per_second", "examples_per_second", "staleness", "seconds", "global_step", "workers")
#: The columns of metrics begin with one of these.
METRIC_SPLITS = ("train/", "validation/", "best/")
#: Of rows that are not yet returned to the user: the model and the loss of a run, as far as its record says them.
MODEL = "model and loss"
#: Keys that say where a run is, or that have another column.
_NOT_KEYS = ("run.dir", "run.name", "sweep.", "hydra.", "cluster.shape", "strategy.name")
_ENDED = ("done", "failed", "preempted")
#: Keys of the model and the loss in the config of a run; `fit.` of a run from Python.
_OF_MODEL = ("model.", "loss", "fit.model", "fit.loss")
#: The key of the hyperparameters in the config of a run from Python.
_HPARAMS = "hparams"


@dataclass
class Runs:
    """Rows of runs.

    Attributes:
        rows: the rows of runs, each with all columns and `MODEL`; None is a value that a run does not have.
        keys: columns of config keys that a run overrides, or in which runs from Python differ.
        metrics: columns of metrics: `train/loss`, `validation/loss`, `best/loss`.
        errors: the first lines of the errors of failed runs, by their names.
    """

    rows: list[Row]
    keys: list[str]
    metrics: list[str]
    errors: dict[str, str]

    @property
    def columns(self) -> list[str]:
        return [*_ABOUT, *self.keys, *self.metrics, *SPEED]

    def varied(self) -> list[str]:
        """The keys, strategy and cluster in which runs differ."""
        # A run that failed before it had a strategy differs from the others in nothing else.
        known = {key: {row[key] for row in self.rows} - {None} for key in ("cluster", "strategy")}
        values = known | {key: {repr(row[key]) for row in self.rows} for key in self.keys}
        return [key for key, found in values.items() if len(found) > 1]


def load_runs(folder: str | Path) -> pandas.DataFrame | list[Row]:
    """The runs below a folder, also the trials of sweeps, as a `pandas.DataFrame` with one row each.

    The columns are `run` (its path in the folder), `status` (`done`, `failed`, `preempted`, or `unfinished` without a
    result), `strategy`, `cluster` and `seed` as resolved, a column for each config key that a run overrides or in which
    runs from Python differ, the final metrics as `train/loss` and `validation/loss`, the best validations as
    `best/loss`, `steps_per_second`, `examples_per_second`, `staleness` (its mean), `seconds`, `global_step` and
    `workers`. Of an unfinished run the metrics are the newest ones.

    Args:
        folder: a path, or a URL on object storage.

    Returns:
        Without pandas, a list of dicts with these keys, in which a value that a run does not have is None.

    Raises:
        ConfigError: there is no such folder or no run in it, a record was written by a newer version, or a file is
            damaged.
    """
    runs = runs_below(folder)
    try:
        import pandas
    except ImportError:
        return [{name: row[name] for name in runs.columns} for row in runs.rows]
    return pandas.DataFrame(runs.rows, columns=runs.columns)


def runs_below(place: str | Path) -> Runs:
    """The runs below the folder at a path or URL; see `load_runs`.

    Raises:
        ConfigError: there is no such folder or no run in it, or a URL is not allowed, or its storage fails or refuses.
    """
    if not is_url(place) and not Path(place).is_dir():
        raise ConfigError(f"{place}: there is no such folder")
    folder = folder_at(place, RunConfig.storage_timeout, "folder")
    runs = runs_in(folder, _run_dirs(folder))
    if not runs.rows:
        raise ConfigError(f"{folder}: no run is there: neither it nor a folder in it has a {RESULT} of kdist")
    return runs


def _run_dirs(folder: Folder) -> list[str]:
    """The paths of all run dirs in a folder, with `/`, sorted as a person would; `.` is the folder itself."""
    parts = (name.rpartition("/") for name in folder.names(ends=_RECORDS))
    found = {PurePosixPath(within) for within, _, name in parts if name in _RECORDS}
    # Folders in a run dir belong to the run.
    return sorted((str(path) for path in found if found.isdisjoint(path.parents)), key=as_numbered)


def as_numbered(name: str) -> list[tuple[bool, int, str]]:
    """A sort key that puts the trials of a sweep in the order of their numbers."""
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split("/")]


def runs_in(folder: Folder, names: Iterable[str]) -> Runs:
    """The runs in the run dirs of these names in a folder."""
    found = [run for name in names if (run := _read(folder, name))]
    keys = _keys_of(found)
    metrics = list(dict.fromkeys(name for run in found for name in run.metrics))
    models = {run.model for run in found} - {repr({})}
    rows = [
        {
            **run.about,
            **{key: run.values.get(key) for key in keys},
            **{name: run.metrics.get(name) for name in metrics},
            **{name: run.speed.get(name) for name in SPEED},
            # A run without a record is one of the others, if these are alike.
            MODEL: next(iter(models)) if len(models) == 1 else run.model,
        }
        for run in found
    ]
    metrics.sort(key=lambda name: ("train", "validation", "best").index(name.partition("/")[0]))
    errors = {run.about["run"]: run.error for run in found if run.error is not None}
    return Runs(rows, keys, metrics, errors)


@dataclass
class _Run:
    """One run: parts of its row, and its record. `values` has config keys; for the choice of a group its name."""

    about: Row
    overrides: Mapping[str, str]
    config: Mapping[str, Any]
    values: Mapping[str, Any]
    metrics: Row
    speed: Row
    record: dict[str, Any]
    error: str | None

    @property
    def model(self) -> str:
        """The model and the loss, as far as they are known."""
        return repr({key: value for key, value in self.config.items() if key.startswith(_OF_MODEL)})


def _read(folder: Folder, name: str) -> _Run | None:
    """The run in a run dir; None, with a warning, if its `result.json` is something else."""
    place, within = (f"{folder}/{name}", f"{name}/") if name != "." else (str(folder), "")
    trial = content_of(folder.read(f"{within}{TRIAL}") or b"")
    content = folder.read(f"{within}{RESULT}")
    if content is not None and "status" not in content_of(content):
        if not trial:
            warn(f"{place}/{RESULT}: is not the record of a run; left out")
            return None
        content = None
    record = record_in(content, f"{place}/{RESULT}")
    status = trial.get("status", record.get("status"))
    error = str(trial.get("error") or record.get("error") or "unknown")
    overrides = by_key(record.get("overrides") or ()) or trial.get("overrides") or {}
    metrics, speed = _of_record(record) if record else _of_rows(folder.read(f"{within}{METRICS}") or b"", place)
    given = {key: value_of(text) for key, text in overrides.items()}
    # Hyperparameters of a run from Python have their own names, and lists are texts.
    config = {
        key.removeprefix(f"{_HPARAMS}."): str(value) if isinstance(value, list) else value
        for key, value in flat(record.get("config") or {}).items()
    }
    return _Run(
        about={
            "run": name if name != "." else Path(str(folder)).resolve().name,
            # A trial that is marked as running may have been killed.
            "status": status if status in _ENDED else "unfinished",
            "strategy": record.get("strategy") or overrides.get("strategy"),
            "cluster": record.get("cluster") or overrides.get("cluster"),
            "seed": record.get("seed", given.get(SEED)),
        },
        overrides=overrides,
        config=config,
        values={**given, **config},
        metrics=metrics,
        speed=speed,
        record=record,
        error=error.splitlines()[0] if status == "failed" else None,
    )


def _of_record(record: Mapping[str, Any]) -> tuple[Row, Row]:
    """Metrics and speed of a run that has ended."""
    logs = record.get("metrics") or {}
    metrics = {f"{split}/{n}": v for split in ("train", "validation") for n, v in scalars(logs.get(split) or {})}
    metrics |= {f"best/{name}": best.get("value") for name, best in (record.get("best") or {}).items()}
    speed = {name: record.get(name) for name in SPEED}
    return metrics, {**speed, "staleness": (record.get("gradients") or {}).get("staleness_mean")}


def _of_rows(content: bytes, place: str) -> tuple[Row, Row]:
    """Metrics and speed of a run that has not ended, from its last rows."""
    rows = rows_in(content, f"{place}/{METRICS}")
    metrics: Row = {}
    speed: Row = {}
    for row in rows:
        speed |= {name: row[name] for name in ("steps_per_second", "staleness", "seconds") if name in row}
        speed["global_step"] = row["step"]
    for split, kinds, prefix in (("train", (TRAIN, EPOCH), ""), ("validation", (VALIDATION,), "val_")):
        logs = metrics_of(next((row for row in reversed(rows) if row["kind"] in kinds), {}))
        found = {n.removeprefix(prefix): v for n, v in logs.items() if n.startswith("val_") == bool(prefix)}
        metrics |= {f"{split}/{n}": v for n, v in scalars(found)}
    return metrics, speed


def _keys_of(runs: Sequence[_Run]) -> list[str]:
    """The columns of keys, in the order in which they appear."""
    from_python = [run.config for run in runs if _HPARAMS in run.record.get("config", {})]
    keys = dict.fromkeys(key for run in runs for key in run.overrides)
    keys |= dict.fromkeys(key for config in from_python for key in config if _is_key(key, from_python))
    return [key for key in keys if key not in _ABOUT and not key.startswith(_NOT_KEYS)]


def _is_key(key: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    """True if runs from Python have a column for a key: a hyperparameter, or an argument in which they differ."""
    # A seed that nobody has chosen is another one in each run.
    return key != SEED and ("." not in key or len({repr(config.get(key)) for config in configs}) > 1)
