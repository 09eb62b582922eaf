"""Progress on a terminal and elsewhere."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress as RichProgress

from compare_q.eval.common.progress import EtaColumn, Progress
from tests.support import ROOT


def test_models_are_numbered_where_there_are_several() -> None:
    progress = Progress()
    assert progress.numbered("loading x", 0) == "loading x"
    progress.models = 2
    assert progress.numbered("loading x", 0) == "loading x (model 1 of 2)"


def test_one_line_a_phase_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    with progress.phase("scoring x", unit="windows", total=3) as phase:
        for _ in range(3):
            phase.advance()
    assert phase.seconds > 0
    assert capfd.readouterr().err == f"scoring x: 3 windows in {phase.seconds:.1f} s\n"


def test_bytes_are_shown_in_their_unit(capfd: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    progress = Progress()
    with progress.phase("fetching x", unit="bytes") as phase:
        phase.advance(999)
        phase.advance(1)
    with progress.phase("fetching y", unit="bytes"):
        pass  # nothing was left to fetch
    assert capfd.readouterr().err == f"fetching x: 1.0 kB in {phase.seconds:.1f} s\n"
    progress.console = Console(file=screen, force_terminal=True, width=100)
    with progress.phase("fetching z", unit="bytes") as phase:
        phase.expect(16_060_000_000)
        phase.say("org/z: 16.1 GB to download")
        phase.advance(4_000_000)
    assert "4.0 MB/16.1 GB" in screen.getvalue()
    assert "org/z: 16.1 GB to download" in screen.getvalue()


def test_a_line_for_each_phase_that_goes_on() -> None:
    """As two models on two GPUs have; the display ends with the last of them, and another one can begin."""
    screen = io.StringIO()
    progress = Progress()
    progress.console = Console(file=screen, force_terminal=True, width=100)
    with progress.phase("scoring x", unit="windows", total=4) as first:
        first.advance(1)
        with progress.phase("scoring y", unit="windows", total=5) as second:
            second.advance(2)
            screen.truncate(0)
            assert progress.bars is not None
            progress.bars.refresh()
            shown = screen.getvalue()
            assert "1/4 windows" in shown
            assert "2/5 windows" in shown
    assert progress.bars is None
    shown = screen.getvalue()
    assert "ETA" not in shown  # a speed takes more than one window
    assert "scoring x: 1 windows in" in shown
    with progress.phase("scoring z", unit="windows", total=6):
        assert progress.bars is not None


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


def test_no_eta_is_said_where_the_duration_is_not_known() -> None:
    times = iter([0.0])
    progress = RichProgress(get_time=lambda: next(times, 30.0), auto_refresh=False)
    progress.add_task("loading", total=None)
    assert EtaColumn().render(progress.tasks[0]).plain == ""
