"""Making one model: what fails is one line, and leaves no file that looks like a model."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from demo.recipes import ROOT, make_once


def make_or_report(out: Path, maker: Callable[[Path], None]) -> None:
    """Make one model; a failure is one line, and no file that looks like a model."""
    begin = time.perf_counter()
    try:
        make_once(out, maker)
        print(f"{out.name}: {time.perf_counter() - begin:.1f} s", flush=True)
    except Exception as error:  # whatever a quantizer raises must not stop the others
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"{out.name}: failed: {reason}", flush=True)
        if out.exists():
            out.rename(out.with_name(f"failed-{out.name}-{time.time_ns()}"))


def log_of(out: Path) -> Path:
    """Where what a model's converter prints is kept."""
    folder = out.parent.parent / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{out.name}.log"


def run_python(words: list[object], log: Path) -> None:
    """Run Python with its output in a log; RuntimeError with the log's last line."""
    command = [sys.executable, *(str(word) for word in words)]
    with log.open("wb") as stream:
        status = subprocess.run(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, check=False).returncode
    if status:
        raise RuntimeError(f"{last_line(log)} (log: {log})")


def last_line(log: Path) -> str:
    """The last line of a log that is not blank."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
