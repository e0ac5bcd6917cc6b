"""The fingerprint of a task: versions, addresses and config, which all tasks of a cluster need alike."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kdist._compat import op_libraries
from kdist.cluster.spec import Membership
from kdist.config.hparams import SEED, flat
from kdist.errors import ConfigError
from kdist.version import __version__

#: Parts of the config that describe the training. The others are of one task: its folders and its messages.
_GROUPS = ("model", "data", "optimizer", "loss", "metrics", "strategy", "train", "fit")
#: Of the chief alone: when it stops, restarts and validates. The next chief of servers that stay may have others.
_OF_CHIEF = (
    "train.steps",
    "train.epochs",
    "train.max_restarts",
    "train.validation_every_steps",
    "train.validate_with_ema",
)
_MAX_NAMED = 10


@dataclass(frozen=True)
class TaskFingerprint:
    """The properties of a task that the others compare with their own.

    Attributes:
        versions: of Python and of the packages that must be the same on all tasks.
        addresses: of all tasks, by job, as this task knows them; empty of a task that has joined.
        config: plain values by key, without values that may differ; references to the environment as they were written.
        op_libraries: modules that load ops beside TensorFlow's own, see `kdist._compat.op_libraries`; not compared.
    """

    versions: Mapping[str, str]
    addresses: Mapping[str, Sequence[str]]
    config: Mapping[str, Any]
    op_libraries: Sequence[str] = ()

    @classmethod
    def of(cls, membership: Membership, config: Mapping[str, Any]) -> TaskFingerprint:
        """The fingerprint of this process; `config` is as in `result.json`."""
        versions = {"python": f"{sys.version_info.major}.{sys.version_info.minor}", "kdist": __version__}
        versions |= {name: _version(name) for name in ("tensorflow", "keras")}
        addresses, spec = dict[str, Sequence[str]](), membership.spec
        if not membership.has_joined:
            addresses = {"ps": spec.ps, "worker": spec.worker, "chief": (spec.chief,) if spec.chief else ()}
        given = flat({name: config[name] for name in _GROUPS if name in config}, with_empty=True)
        if "fit" not in config:
            # That of a program is random if it is not given.
            given[SEED] = (config.get("run") or {}).get("seed")
        compared = {key: value for key, value in given.items() if key not in _OF_CHIEF}
        # As it arrives: JSON has no tuples.
        return cls.from_json(cls(versions, addresses, compared, op_libraries.loaded_by()).to_json())

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> TaskFingerprint:
        return cls(**json.loads(text))

    @property
    def is_of_program(self) -> bool:
        """True if a `Trainer` of a program made it, whose arguments differ from the command line's."""
        return any(key.startswith("fit.") for key in self.config)


def differences(chief: TaskFingerprint, other: TaskFingerprint) -> list[str]:
    """Names each difference of a task from the chief: `keras 3.14.0, chief 3.15.1`, `train.batch_size=64, chief 32`."""
    versions = [(name, version, other.versions.get(name)) for name, version in chief.versions.items()]
    found = [f"{name} {of_other}, chief {of_chief}" for name, of_chief, of_other in versions if of_chief != of_other]
    # A task that has joined a cluster which is training was told by the chief where the others are.
    addresses = chief.addresses.items() if other.addresses else ()
    pairs: list[tuple[str, Any, Any]] = [(f"addresses of {job}", at, other.addresses.get(job)) for job, at in addresses]
    if chief.is_of_program == other.is_of_program:
        keys = {**chief.config, **other.config}
        pairs += [(key, chief.config.get(key), other.config.get(key)) for key in keys]
    return found + [
        f"{key}={_shown(of_other)}, chief {_shown(of_chief)}"
        for key, of_chief, of_other in pairs
        if of_chief != of_other
    ]


def mismatch_error(found: Mapping[str, Sequence[str]]) -> ConfigError:
    """The error for tasks that differ from the chief, with the `differences` of each, by its name."""
    verb = "differs" if len(found) == 1 else "differ"
    lines = [f"{', '.join(found)}: {verb} from the chief; all tasks need the same versions and config"]
    for task, of_task in found.items():
        lines += [f"  {task}: {difference}" for difference in of_task[:_MAX_NAMED]]
        if len(of_task) > _MAX_NAMED:
            lines.append(f"  {task}: and {len(of_task) - _MAX_NAMED} more")
    return ConfigError("\n".join(lines))


def _version(package: str) -> str:
    module = sys.modules.get(package)
    # TensorFlow is installed under several names.
    return getattr(module, "__version__", None) or importlib.metadata.version(package)


def _shown(value: Any) -> str:
    text = "null" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
