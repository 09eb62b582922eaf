"""Functions that tests run in a separate process, which imports this module."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections import deque
from pathlib import Path
from typing import Any

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.process import time_limit
from compare_q.eval.common.processes import run_in_subprocess
from compare_q.eval.common.progress import Progress


def busy(words: list[Any], rows: int, progress: Progress) -> dict[str, Any]:
    """Print, report progress, and call another such function, which runs in the same process."""
    print("noise")
    os.write(2, b"noise past Python\n")
    with progress.phase("counting", unit="rows") as phase:
        phase.expect(rows)
        for number in range(rows):
            phase.advance()
            if number == rows // 2:
                phase.say("half way")
    with progress.phase("waiting"):
        pass
    progress.say("done")
    nested = run_in_subprocess(number_of_process, "asking")
    return {"words": words, "process": os.getpid(), "nested": nested}


def number_of_process() -> int:
    return os.getpid()


def refuse(reason: str) -> None:
    raise InputError(reason)


def read(file: str) -> str:
    return Path(file).read_text()


def divide() -> float:
    return 1 / 0


def hang() -> None:
    """Never end one step in C, within a limit of 0.1 s."""
    with time_limit("it", 0.1):
        # Python handles signals between two steps of its own code, so never inside this call.
        deque(itertools.repeat(None), maxlen=0)


def die(number: int) -> None:
    """Print, and end by signal ``number``; 0: end without a message."""
    print("the last words\n", file=sys.stderr, flush=True)
    if number:
        os.kill(os.getpid(), signal.Signals(number))
    os._exit(7)
