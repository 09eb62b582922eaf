"""A fake engine that misbehaves, for real processes: ``python -m tests.support.made_engine`` is its engine process.

What its import does, ``$MADE_IMPORT`` says, and what loading a model does, the model's label.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from compare_q import backends
from compare_q.backends.fake import FakeEngine
from compare_q.backends.worker import engine_process

IMPORT = "MADE_IMPORT"
LONG_S = 600


class MadeEngine(FakeEngine):
    """See the module's docstring."""

    @classmethod
    def import_engine(cls, *, verbose: bool) -> None:
        super().import_engine(verbose=verbose)
        match os.environ.get(IMPORT):
            case "thread":
                threading.Thread(target=time.sleep, args=(LONG_S,), daemon=True).start()
            case "long":
                made("importing")
                time.sleep(LONG_S)
            case "death":
                os.kill(os.getpid(), signal.SIGSEGV)

    def load(self) -> None:
        match self.request.label:
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "killed":  # as the system does when memory is full
                os.kill(os.getpid(), signal.SIGKILL)
            case "huge":
                import torch

                torch.empty(1 << 50)
            case "thread":
                threading.Thread(target=time.sleep, args=(LONG_S,)).start()
            case "child":
                child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LONG_S})"])
                made("child").write_text(str(child.pid))


def made(name: str) -> Path:
    """A file of this name in the cache, which is there now."""
    file = Path(os.environ["COMPARE_Q_CACHE"]) / name
    file.touch()
    return file


if __name__ == "__main__":
    backends.ENGINES["fake"] = "tests.support.made_engine:MadeEngine"
    engine_process.main(*sys.argv[1:])
