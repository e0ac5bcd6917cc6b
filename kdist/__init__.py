"""Distributed training of Keras 3 models on TensorFlow, behind one Keras-style `Trainer`.

Importing kdist does not import TensorFlow; the first use of a name that needs it does.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from kdist import moved
from kdist._compat.imports import make_quiet, quick_import, register_on_demand
from kdist.config.checks import require_tensorflow
from kdist.config.targets import trust
from kdist.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DataSourceError,
    KdistError,
    NonFiniteError,
    TaskError,
)
from kdist.version import __version__

if TYPE_CHECKING:
    from kdist import hooks, layers
    from kdist.config.schema import ClusterConfig
    from kdist.data.base import DataContext
    from kdist.data.file_formats import FileFormat
    from kdist.data.files import files
    from kdist.data.table_files import load_npz
    from kdist.extras.arriving_files import arriving_files
    from kdist.extras.kafka import kafka_topic
    from kdist.extras.tf1_checkpoint import load_tf1_checkpoint
    from kdist.session import TrainSession
    from kdist.sweeps.load import load_runs
    from kdist.trainer import Trainer

# Several tasks of a machine may share a GPU. TensorFlow gives all of its memory to the first process otherwise.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
# Before anything imports TensorFlow and Keras.
require_tensorflow()
make_quiet()
moved.install()
# A saved model may have layers of them.
register_on_demand("kdist>", "kdist.layers")

_MODULES = ("hooks", "layers")
_LAZY = {
    "ClusterConfig": "kdist.config.schema",
    "DataContext": "kdist.data.base",
    "TrainSession": "kdist.session",
    "FileFormat": "kdist.data.file_formats",
    "Trainer": "kdist.trainer",
    "arriving_files": "kdist.extras.arriving_files",
    "files": "kdist.data.files",
    "kafka_topic": "kdist.extras.kafka",
    "load_npz": "kdist.data.table_files",
    "load_runs": "kdist.sweeps.load",
    "load_tf1_checkpoint": "kdist.extras.tf1_checkpoint",
}

__all__ = [
    "CheckpointError",
    "ClusterConfig",
    "ClusterError",
    "ConfigError",
    "DataContext",
    "DataSourceError",
    "FileFormat",
    "KdistError",
    "NonFiniteError",
    "TaskError",
    "TrainSession",
    "Trainer",
    "__version__",
    "arriving_files",
    "files",
    "hooks",
    "kafka_topic",
    "layers",
    "load_npz",
    "load_runs",
    "load_tf1_checkpoint",
    "trust",
]


def __getattr__(name: str) -> Any:
    with quick_import():
        if name in _MODULES:
            return importlib.import_module(f"kdist.{name}")
        if name in _LAZY:
            return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'kdist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
