"""``python -m backends.worker SOCKET LIFELINE ENGINE VERBOSE``: an engine process, which the driver starts."""

import sys

from backends.worker.engine_process import main

if __name__ == "__main__":
    main(*sys.argv[1:])
