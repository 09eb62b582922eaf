"""Progress on a terminal and elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from rich.progress import Progress as RichProgress

from compare_q.eval.common.progress import EtaColumn
from tests.support import ROOT

NOISY = """
import logging, sys
from pathlib import Path
from compare_q.backends.common.process import captured
from compare_q.eval.common.progress import Progress
from tqdm import tqdm

progress = Progress()
with progress.phase("loading x"), captured(Path(sys.argv[1])):
    logging.basicConfig(stream=sys.stdout)
    logging.warning("from a logger")
    list(tqdm(range(3), desc="Loading weights"))
    print("printed", flush=True)
logging.warning("after it")
"""


def test_what_an_engine_says_never_stands_between_bars(tmp_path: Path) -> None:
    """On a real terminal: rich would catch sys.stdout and print all of it above the bar, past the log file."""
    log, (ours, theirs) = tmp_path / "log", pty.openpty()
    command = [sys.executable, "-c", NOISY, str(log)]
    bars = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}  # the demo's tests set it
    subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, cwd=ROOT, env=bars, check=True, timeout=60
    )
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # the end of a terminal whose other side is closed
        while chunk := os.read(ours, 65536):
            shown += chunk
    os.close(ours)
    said = log.read_text()
    for words in ("from a logger", "Loading weights", "printed"):
        assert words in said
        assert words.encode() not in shown
    assert b"loading x: " in shown
    assert b"after it" in shown


def test_an_eta_follows_from_the_speed() -> None:
    """Two of ten windows within four seconds after the first: seven more take 14."""
    now = [0.0]
    progress = RichProgress(get_time=lambda: now[0], auto_refresh=False)
    task = progress.add_task("scoring", total=10)
    for at in (1.0, 3.0, 5.0):
        now[0] = at
        progress.advance(task)
    assert EtaColumn().render(progress.tasks[0]).plain == "ETA 0:00:14"
