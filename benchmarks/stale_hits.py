"""Check that the cache serves only scores that a fresh run would give.

    python -m benchmarks.stale_hits OUT.json --engines Transformers vLLM llama.cpp

A reference and a model that is compared with it are scored once; the inputs are a toy Llama's
files, the specs, the text, templates, splits, packages and variables.  Then one input after another
is changed, and the same command line runs again on the same cache, which may serve all, some
or none of its windows.  Then it runs in an empty cache: every row must be bit-identical, token by
token.  Exit status 1 if a row differs.  The cases of each engine are in
``benchmarks/stale_inputs.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.stale_inputs import ENGINES, Case, Place
from compare_q.backends.common.process import captured

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
        status: its exit status.
        served: label -> True if the row came from the cache, without failed rows.
        scores: label -> all token scores as bytes.
        log: what the run printed.
    """

    status: int
    served: dict[str, bool]
    scores: dict[str, bytes]
    log: str


def scored(place: Place, cache: Path) -> Outcome:
    """Run the command line on a cache.

    It runs in a new process if a variable or package is changed, or else in this one.
    """
    out = place.folder / "results.json"
    log = place.folder / "log.txt"
    tokens = place.folder / "tokens"
    # A run that fails writes neither: those of the run before must not be read.
    shutil.rmtree(tokens, ignore_errors=True)
    out.unlink(missing_ok=True)
    for name, spec in (("data.json", place.data), ("models.json", place.models)):
        (place.folder / name).write_text(json.dumps(spec), encoding="utf-8")
    words = ["-d", str(place.folder / "data.json"), "-m", str(place.folder / "models.json")]
    words += ["--cache-dir", str(cache), "-o", str(out), "--tokens-out", str(tokens)]
    if place.in_new_process:
        status = in_new_process(place, words, log)
    else:
        with captured(log):
            status = in_this_process(words)
    models: list[dict[str, Any]] = []
    if out.exists():
        models = json.loads(out.read_text(encoding="utf-8"))["models"]
    served = {}
    scores = {}
    for model in models:
        if model["ppl"] is not None:
            label = model["label"]
            served[label] = bool(model["from_cache"])
            scores[label] = bytes_of_scores(tokens / f"{label}.parquet")
    return Outcome(status, served, scores, log.read_text())


def in_new_process(place: Place, words: list[str], log: Path) -> int:
    """Run the command line in a new process; return its exit status."""
    program = str(ROOT / "eval" / "compare_q.py")
    command = [*place.prefix, sys.executable, program, *words]
    environment = {**os.environ, "COMPARE_Q_IN_PROCESS": "0", **place.environment}
    with log.open("wb") as file:
        process = subprocess.run(command, stdout=file, stderr=file, env=environment, check=False)
    return process.returncode


def in_this_process(words: list[str]) -> int:
    """Run the command line in this process; return its exit status."""
    from compare_q.eval.cli import main

    try:
        return main.main(words)
    except SystemExit as stop:
        return int(stop.code or 0)


def bytes_of_scores(file: Path) -> bytes:
    """Return all columns of a file of token scores."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(file)
    content = b""
    for name in table.column_names:
        content += name.encode() + table.column(name).to_numpy().tobytes()
    return content


def changed(case: Case, scratch: Path) -> tuple[str, Counter[str], str]:
    """Return (kind, outcome of the rows, errors) for one changed input.

    The input is changed where the first run has read it: a copied file has another time of status
    change, so that copies of the inputs would be scored again in any case.
    """
    folder = scratch / "place"
    cache = scratch / "cache"
    for old in (folder, cache, scratch / "empty"):
        shutil.rmtree(old, ignore_errors=True)
    place = case.base(folder)
    place.in_new_process = case.in_new_process
    base = scored(place, cache)
    if base.status or len(base.served) != len(place.models) or any(base.served.values()):
        raise RuntimeError(f"{case.name}: {base.log}")
    case.change(place)
    again = scored(place, cache)
    counts = Counter({"inputs changed": 1})
    counts["refused"] = int(again.status == 2)
    if again.status != 2:
        counts["rows that failed"] = len(place.models) - len(again.served)
    counts["rows served"] = sum(again.served.values())
    counts["rows scored again"] = len(again.served) - counts["rows served"]
    counts["rows with other numbers"] = len(labels_that_differ(again, base))
    # Without any row there is nothing to compare, so that the fresh run is not needed.
    fresh = again
    if again.served:
        fresh = scored(place, scratch / "empty")
    wrong = labels_that_differ(again, fresh)
    counts["rows wrongly served"] = len(wrong)
    errors = [f"wrongly served: {label}" for label in wrong]
    if again.status:
        errors += again.log.strip().splitlines()[-1:]
    return case.kind, counts, "; ".join(errors)


def labels_that_differ(outcome: Outcome, other: Outcome) -> list[str]:
    """Return the rows of ``outcome`` whose scores differ from the other's, or that it lacks."""
    labels = []
    for label, scores in outcome.scores.items():
        if scores != other.scores.get(label):
            labels.append(label)
    return labels


def campaign(engine: str, scratch: Path, kinds: list[str]) -> dict[str, Any]:
    """Change every input of one engine."""
    counts_of_kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)
    cases: dict[str, Any] = {}
    for case in ENGINES[engine]():
        if kinds and case.kind not in kinds:
            continue
        kind, counts, errors = changed(case, scratch)
        errors = errors.replace(f"{scratch / 'place'}/", "")
        counts_of_kinds[kind].update(counts)
        # Without the counts that are 0.
        positive = dict(+counts)
        cases[f"{kind}: {case.name}"] = {**positive, "said": errors}
        print(f"{engine}: {kind}: {case.name}: {positive} {errors}", flush=True)
    totals: Counter[str] = sum(counts_of_kinds.values(), Counter())
    print(f"{engine}: {dict(totals)}", flush=True)
    return {
        "total": dict(totals),
        "kinds": {kind: dict(+counts) for kind, counts in counts_of_kinds.items()},
        "cases": cases,
    }


def main() -> int:
    """Change every input of the engines, and write the counts; return the exit status."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    p.add_argument("out", type=Path)
    p.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    p.add_argument("--kinds", nargs="+", default=[], help="of inputs; all of them by default")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ |= {"COMPARE_Q_IN_PROCESS": "1", "HF_HOME": scratch, "HF_HUB_OFFLINE": "1"}
        campaigns = {}
        for engine in args.engines:
            campaigns[engine] = campaign(engine, Path(scratch), args.kinds)
    from compare_q.backends.common import machine

    origin = {
        "commit": machine.commit(),
        "versions": machine.versions(),
        "processor": machine.processor(),
    }
    args.out.write_text(json.dumps({**origin, **campaigns}, indent=1) + "\n", encoding="utf-8")
    for result in campaigns.values():
        if result["total"].get("rows wrongly served"):
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
