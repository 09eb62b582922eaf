"""Count the functions and files of compare_q between the command line and one token's KL divergence, and back.

    python -m benchmarks.frames CHECKOUT -d data.json -m models.json

Runs the command line with the code of CHECKOUT and an empty cache.  ``sys.setprofile`` in the driver, the engine
process and the worker notes the call stack at the points of ``POINTS``.  Counted are the functions and the files of
``eval/``, ``backends/`` and ``compare_q/`` that are in any of these stacks, each once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

POINTS = {
    "the KL divergence is computed": ("backends/scoring/statistics.py", "partial"),
    "scores are written": ("backends/scoring/segments.py", "commit"),
    "scores are read": ("backends/scoring/segments.py", "load"),
    "scores become means": ("eval/stats/estimates.py", "summarize"),
    "a cell is formatted": ("eval/table/", ""),
}
"""What happens -> the file (or folder) and function in which it happens; the last call counts for an empty name."""
FOLDER = "COMPARE_Q_FRAMES"
HOOK = "import runpy; runpy.run_path({file!r})['watch']()"


def stack_of(frame: FrameType | None, root: str) -> list[tuple[str, str]]:
    """(file, function) of every frame below ``frame`` that belongs to the checkout at ``root``, outermost first."""
    found = []
    while frame is not None:
        file = os.path.realpath(frame.f_code.co_filename)
        if file.startswith((f"{root}/eval/", f"{root}/backends/", f"{root}/compare_q/")):
            found.append((os.path.relpath(file, root), frame.f_code.co_qualname))
        frame = frame.f_back
    return found[::-1]


def watch() -> None:
    """Note the stacks of this process and of its forks at each point, in the folder of ``COMPARE_Q_FRAMES``."""
    root, folder = os.environ[FOLDER].split(os.pathsep)
    deepest: dict[tuple[int, str], int] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        for point, (place, name) in POINTS.items():
            if place not in file or (name and not function.startswith(name)):
                continue
            stacks = [stack_of(each, root) for each in [frame, *others()]]
            depth = len(stacks[0])
            if stacks[0] and depth > deepest.get((os.getpid(), point), 0):
                deepest[os.getpid(), point] = depth
                Path(folder, f"{os.getpid()}.{list(POINTS).index(point)}.json").write_text(json.dumps(stacks))

    def others() -> list[FrameType]:
        """The frames in which the other threads of this process are: those that wait for this one."""
        return [frame for thread, frame in sys._current_frames().items() if thread != threading.get_ident()]

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
    """Print what was noted; exit status 1 if a point was never reached."""
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
