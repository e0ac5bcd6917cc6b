"""`python -m kdist.launch`; see `kdist.ssh.command`."""

import os
import sys
from contextlib import suppress

from kdist.ssh.command import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    with suppress(OSError):
        sys.stdout.flush()
    # Threads may still wait for an ssh that does not end.
    os._exit(code)
