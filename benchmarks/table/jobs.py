"""Measurements in a separate process that imports nothing of compare_q.

    python -m benchmarks.table.jobs JOBS.json OUT.jsonl

A job is JSON: ``kind`` selects the measurement, ``model`` is the path of the model, ``windows``
names a .npy file of int32 [N, L].  The first ``count`` windows are used (default: all).  The job's
line in OUT has the seconds, without loading.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.table.peers import KINDS, Job, windows_of
from compare_q.eval.common.processes import command, environment


def measured(jobs: dict[str, Job], folder: Path) -> dict[str, dict[str, Any]]:
    """Return name -> result of the job, or {"error": ...}; jobs share a process, and a crash starts
    a new one.
    """
    found: dict[str, dict[str, Any]] = {}
    out, todo, log = folder / "jobs.jsonl", folder / "jobs.json", folder / "jobs.log"
    out.write_bytes(b"")
    while waiting := {name: job for name, job in jobs.items() if name not in found}:
        todo.write_text(json.dumps(waiting), encoding="utf-8")
        with log.open("wb") as stream:
            subprocess.run(
                command("benchmarks.table.jobs", todo, out),
                stdout=stream,
                stderr=stream,
                env=environment(),
            )
        lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        found |= {line.pop("job"): line for line in lines}
        if not set(waiting) & set(found):
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            found[next(iter(waiting))] = {
                "error": "".join(last) or "the process died without output"
            }
    return found


def main(words: Sequence[str]) -> int:
    """Run the jobs of a file in order; an error ends the process, since a GPU may still hold the
    failed model.
    """
    for name, job in json.loads(Path(words[0]).read_text(encoding="utf-8")).items():
        seconds, windows = KINDS[job["kind"]](job), windows_of(job)
        line = {"job": name, "windows": len(windows), **seconds}
        line["tokens_a_second"] = round(windows.size / line["seconds"])
        print(json.dumps(line), flush=True)
        with Path(words[1]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
