"""`kdist resize RUN_DIR workers=4`: changes the cluster of a run that is training."""

from __future__ import annotations

import getpass
import os
from argparse import RawDescriptionHelpFormatter
from pathlib import Path

from kdist import log
from kdist.cli.trained import Parser
from kdist.cluster.spec import ClusterChange
from kdist.config.schema import ClusterConfig
from kdist.console import lines
from kdist.errors import ConfigError
from kdist.run.resizes import ask, of_another_user
from kdist.storage.folder import Folder
from kdist.storage.lock import RunLock
from kdist.storage.object_storage import is_url

_DESCRIPTION = """\
Changes the cluster of a run that is training, which goes on at the same step: workers and parameter servers join or
leave, and values move from server to server.

  kdist resize runs/mine workers=4        two more workers for 2ps2w
  kdist resize runs/mine 3ps4w            a shape
  kdist resize runs/mine move=ps:0        another process takes the values of this server, and its place
"""
_EPILOG = """\
The chief starts the tasks that join, and answers when the change is made. Where others start the tasks, more of them
are refused: they join when they are started (cluster.chief=HOST:PORT). Those that leave end, with code 0.
Exit codes: 0 resized, 2 refused, 75 not resized, and the run goes on as before.
"""


def run(arguments: list[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = Parser(
        "kdist resize",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run dir of a run that is training")
    parser.add_argument("change", metavar="CHANGE", nargs="+", help=ClusterChange.FORMS)
    parser.add_argument(
        "--timeout",
        type=float,
        default=ClusterConfig.start_timeout + ClusterConfig.step_timeout,
        metavar="SECONDS",
        help="how long to wait for the chief (%(default)g)",
    )
    given = parser.parse_args(arguments)
    ClusterChange.parse(given.change)
    if is_url(given.run_dir):
        raise ConfigError(f"{given.run_dir}: is a URL; give the folder where the chief mirrors it, on its machine")
    run_dir = Path(given.run_dir)
    # Of a folder of somebody else it is not known what it has.
    if not os.access(run_dir, os.F_OK) or not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: is no run dir")
    if not os.access(run_dir, os.X_OK):
        raise of_another_user(run_dir)
    lock = RunLock(Folder(run_dir))
    if lock.living() is None:
        raise ConfigError(f"{run_dir}: no run is training there")
    why = f"kdist resize, by {getpass.getuser()}"
    done = ask(run_dir, given.change, why, lambda: lock.living() is not None, given.timeout)
    log.say(lines.resize_line(done.step, None, done.to_dict()))
    return 0
