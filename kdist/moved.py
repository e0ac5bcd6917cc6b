"""Earlier names of modules, and the commands `python -m kdist.evaluate` and so on.

Programs, configs and the records of runs may name a module by an earlier path.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

#: The present name of each module that was moved.
MODULES = {
    "kdist.console.log": "kdist.log",
    "kdist.console.warn": "kdist.log",
    "kdist.data.arriving_files": "kdist.extras.arriving_files",
    "kdist.data.kafka": "kdist.extras.kafka",
    "kdist.data.npz": "kdist.data.table_files",
    "kdist.hooks.arrivals": "kdist.hooks.data_position",
    "kdist.hooks.best_checkpoint": "kdist.hooks.best_values",
    "kdist.hooks.early_stopping": "kdist.hooks.best_values",
    "kdist.hooks.faults": "kdist.extras.faults",
    "kdist.hooks.feed_fn": "kdist.hooks.functions",
    "kdist.hooks.final_ops": "kdist.hooks.functions",
    "kdist.hooks.health": "kdist.extras.monitoring",
    "kdist.hooks.logging_tensor": "kdist.hooks.reports",
    "kdist.hooks.metrics_server": "kdist.extras.monitoring",
    "kdist.hooks.mlflow_tracker": "kdist.extras.trackers",
    "kdist.hooks.monitor": "kdist.hooks.best_values",
    "kdist.hooks.nan_tensor": "kdist.hooks.ends",
    "kdist.hooks.progress": "kdist.hooks.reports",
    "kdist.hooks.step_counter": "kdist.hooks.reports",
    "kdist.hooks.stop_at_step": "kdist.hooks.ends",
    "kdist.hooks.summary_saver": "kdist.hooks.reports",
    "kdist.hooks.tracker": "kdist.extras.trackers",
    "kdist.hooks.wandb_tracker": "kdist.extras.trackers",
    "kdist.run.origin": "kdist.run.result",
}
#: The command that `python -m` runs by each name: `python -m kdist.evaluate` is `kdist evaluate`.
COMMANDS = {f"kdist.{name}": name for name in ("evaluate", "predict", "export", "runs", "launch")}
_PROGRAM = "if __name__ == '__main__':\n    from kdist.cli.main import main\n    main({!r})\n"


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules by their earlier names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MODULES:
            return importlib.util.spec_from_loader(fullname, _Moved())
        if fullname in COMMANDS:
            # The origin becomes `sys.argv[0]`, which others read.
            return importlib.util.spec_from_loader(fullname, _Command(), origin=__file__)
        return None


class _Moved(importlib.abc.Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(MODULES[spec.name])
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # It has been executed under its own name.
        module.__spec__ = self._spec


class _Command(importlib.abc.InspectLoader):
    def get_source(self, fullname: str) -> str:
        return _PROGRAM.format(COMMANDS[fullname])


def install() -> None:
    """Lets Python find modules by their earlier names."""
    # First, as a folder that was left without its files would count as a package.
    sys.meta_path.insert(0, Finder())
