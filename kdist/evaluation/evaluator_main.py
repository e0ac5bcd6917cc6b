"""The evaluator's process: reads each new checkpoint, evaluates it, and reports the result.

`python -m kdist.evaluation.evaluator_main '<options as JSON>'`; the option `request` is the descriptor of an open file
packed by `kdist.data.pickling.pack_program`. It writes a line of JSON, `[step, logs]`, for each checkpoint to
standard output, and exits when its standard input closes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from kdist import forks
from kdist._compat.imports import quick_import
from kdist.cluster.processes.child import end_with_parent
from kdist.cluster.spec import EVALUATOR
from kdist.data.pickling import unpack_program
from kdist.errors import traceback_of

_POLL_SECS = 0.5


def main(options: Mapping[str, Any]) -> NoReturn:
    """Evaluates until the chief exits; ends the process."""
    end_with_parent(str(EVALUATOR))
    with os.fdopen(options["request"], "rb") as file:
        packed = file.read()
    sys.path[:] = options["path"]
    # Output of the code that builds the model is not a result.
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    code = 0
    try:
        _evaluate(packed, Path(options["checkpoints"]), options["after"], said)
    except BaseException as error:  # noqa: BLE001 - the chief says where the log is
        print(traceback_of(error), end="", file=sys.stderr)
        code = 1
    sys.stderr.flush()
    forks.end_daemons()
    os._exit(code)


def _evaluate(packed: bytes, folder: Path, after: int, said: Any) -> None:
    with quick_import():
        import tensorflow as tf

        from kdist.evaluation.evaluate import evaluations
        from kdist.run.checkpoint import Checkpoints

    # The cores belong to the workers.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    for found in evaluations(**unpack_program(packed), checkpoints=Checkpoints(folder), after=after):
        if found is None:
            time.sleep(_POLL_SECS)
        else:
            print(json.dumps(found), file=said, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
