"""A fake engine that misbehaves, for real processes, where ``$COMPARE_Q_ENGINES`` is ``LOCATION``.

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

from tests.support.fake_engine import FakeEngine

LOCATION = f"{__name__}:MadeEngine"
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
        match self.planned.label:
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
