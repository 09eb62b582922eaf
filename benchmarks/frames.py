"""Count the functions and files of compare_q between the command line and one token's KL divergence, and back.

    python -m benchmarks.frames CHECKOUT -d data.json -m models.json

Runs the command line with the code of CHECKOUT and an empty cache.  ``sys.setprofile`` in the driver, the engine
process and the worker records the call stack at the points of ``POINTS``.  Functions and files of ``eval/``,
``backends/`` and ``compare_q/`` in any of these stacks count once; comprehensions do not count.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

POINTS = {
    "a worker is given a command": ("call", "eval/common/processes.py", "WorkerProcess.perform"),
    "the KL divergence is computed": ("call", "backends/scoring/statistics.py", "partial"),
    "scores are written": ("call", "backends/scoring/segments.py", "commit"),
    "scores are read": ("call", "backends/scoring/segments.py", "load"),
    "scores become means": ("call", "eval/stats/estimates.py", "summarize"),
    "a cell is formatted": ("return", "eval/table/", ""),
}
"""Description -> the event of ``sys.setprofile``, the file (or folder) and the function of the event.

The last matching event of a process counts.  A function without a name is any that returns text like a KLD, 0.01234.
"""
KLD = re.compile(r"0\.\d{5}\b")
FOLDER = "COMPARE_Q_FRAMES"
HOOK = "import runpy; runpy.run_path({file!r})['watch']()"


def stack_of(frame: FrameType | None, root: str) -> list[tuple[str, str]]:
    """(file, function) of every frame from ``frame`` outwards that belongs to the checkout at ``root``."""
    found = []
    while frame is not None:
        file, name = os.path.realpath(frame.f_code.co_filename), frame.f_code.co_qualname
        ours = file.startswith((f"{root}/eval/", f"{root}/backends/", f"{root}/compare_q/"))
        if ours and not name.endswith(("comp>", "<genexpr>", "<lambda>")):
            found.append((os.path.relpath(file, root), name))
        frame = frame.f_back
    return found[::-1]


def watch() -> None:
    """Note the stacks of this process and of its forks at each point, in the folder of ``COMPARE_Q_FRAMES``."""
    root, folder = os.environ[FOLDER].split(os.pathsep)

    def note(frame: FrameType, event: str, value: Any) -> None:
        for number, (when, place, name) in enumerate(POINTS.values()):
            if event != when or place not in frame.f_code.co_filename:
                continue
            if frame.f_code.co_qualname == name or (not name and isinstance(value, str) and KLD.search(value)):
                others = [each for thread, each in sys._current_frames().items() if thread != threading.get_ident()]
                stacks = [stack_of(each, root) for each in [frame, *others]]  # others: the threads that wait for this
                if stacks[0]:
                    Path(folder, f"{os.getpid()}.{number}.json").write_text(json.dumps(stacks))

    sys.setprofile(note)
    threading.setprofile(note)


def main(words: list[str]) -> int:
    """Run the command line in the checkout and print the functions at each point, and the sums."""
    root = os.path.realpath(words[0])
    with tempfile.TemporaryDirectory() as folder:
        hook, notes = Path(folder, "hook"), Path(folder, "notes")
        hook.mkdir()
        notes.mkdir()
        (hook / "sitecustomize.py").write_text(HOOK.format(file=__file__))
        path = os.pathsep.join([str(hook), root])
        environment = {**os.environ, "PYTHONPATH": path, FOLDER: f"{root}{os.pathsep}{notes}"}
        environment["COMPARE_Q_CACHE"] = str(Path(folder, "cache"))
        subprocess.run([sys.executable, f"{root}/eval/compare_q.py", *words[1:]], env=environment, check=True)
        return show(notes)


def show(notes: Path, say: Callable[[str], object] = print) -> int:
    """Print the recorded stacks; exit status 1 if a point was never reached."""
    all_frames: set[tuple[str, str]] = set()
    missing = 0
    for number, point in enumerate(POINTS):
        files = sorted(notes.glob(f"*.{number}.json"))
        stacks = [stack for file in files for stack in json.loads(file.read_text())]
        frames = dict.fromkeys((file, name) for stack in stacks for file, name in stack)
        missing += not frames
        say(f"{point}: {len(frames)} functions in {len({file for file, _ in frames})} files, {len(files)} processes")
        for file, name in frames:
            say(f"    {file}: {name}")
        all_frames |= frames.keys()
    say(f"in all {len(all_frames)} functions in {len({file for file, _ in all_frames})} files")
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
