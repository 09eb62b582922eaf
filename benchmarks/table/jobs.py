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
    """Return name -> result of the job, or {"error": ...}.

    Jobs share a process; a crash starts a new one for the jobs after it.
    """
    results: dict[str, dict[str, Any]] = {}
    while len(results) < len(jobs):
        waiting = {name: job for name, job in jobs.items() if name not in results}
        results |= results_of_process(waiting, folder)
    return results


def results_of_process(jobs: dict[str, Job], folder: Path) -> dict[str, dict[str, Any]]:
    """Run the jobs in one process; return the results of those before the first one that failed.

    If the first job fails, its result is the error.
    """
    job_file = folder / "jobs.json"
    out = folder / "jobs.jsonl"
    log = folder / "jobs.log"
    job_file.write_text(json.dumps(jobs), encoding="utf-8")
    out.write_bytes(b"")
    words = command("benchmarks.table.jobs", job_file, out)
    with log.open("wb") as stream:
        subprocess.run(words, stdout=stream, stderr=stream, env=environment())
    results = {}
    for line in out.read_text(encoding="utf-8").splitlines():
        result = json.loads(line)
        results[result.pop("job")] = result
    if not results:
        last_lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        reason = "".join(last_lines) or "the process died without output"
        results[next(iter(jobs))] = {"error": reason}
    return results


def main(words: Sequence[str]) -> int:
    """Run the jobs of a file in order.

    An error ends the process, since a GPU may still hold the failed model.
    """
    for name, job in json.loads(Path(words[0]).read_text(encoding="utf-8")).items():
        seconds = KINDS[job["kind"]](job)
        windows = windows_of(job)
        line = {"job": name, "windows": len(windows), **seconds}
        line["tokens_a_second"] = round(windows.size / line["seconds"])
        print(json.dumps(line), flush=True)
        with Path(words[1]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
