"""Check that the cache serves only scores that a fresh run would give, by changing every input and
running again.

    python -m benchmarks.stale_hits OUT.json --engines Transformers vLLM llama.cpp

A reference and a model that is compared with it are scored once; the inputs are a toy Llama's
files, the specs, the text, templates, splits, packages and variables.  Then one input after the
other is changed, and the same command line runs again on the same cache, which may serve all, some
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
    """Result of a run: its exit status, and label -> True if the row came from the cache, and token
    scores as bytes.
    """

    status: int
    served: dict[str, bool]
    scores: dict[str, bytes]
    said: str


def scored(place: Place, cache: Path) -> Outcome:
    """Run the command line on a cache: in this process, or in a new one if a variable or package is
    changed.
    """
    out, log = place.folder / "results.json", place.folder / "log.txt"
    shutil.rmtree(place.folder / "tokens", ignore_errors=True)
    out.unlink(missing_ok=True)
    for name, spec in (("data.json", place.data), ("models.json", place.models)):
        (place.folder / name).write_text(json.dumps(spec), encoding="utf-8")
    words = [
        "-d",
        place.folder / "data.json",
        "-m",
        place.folder / "models.json",
        "--cache-dir",
        cache,
        "-o",
        out,
    ]
    words += ["--tokens-out", place.folder / "tokens"]
    if place.apart:
        command = [
            *place.prefix,
            sys.executable,
            str(ROOT / "eval" / "compare_q.py"),
            *map(str, words),
        ]
        with log.open("wb") as said:
            environment = {**os.environ, "COMPARE_Q_IN_PROCESS": "0", **place.environment}
            status = subprocess.run(
                command, stdout=said, stderr=said, env=environment, check=False
            ).returncode
    else:
        with captured(log):
            status = in_process([str(word) for word in words])
    found = json.loads(out.read_text(encoding="utf-8"))["models"] if out.exists() else []
    served = {
        model["label"]: bool(model["from_cache"]) for model in found if model["ppl"] is not None
    }
    files = {label: place.folder / "tokens" / f"{label}.parquet" for label in served}
    return Outcome(
        status, served, {label: bits(file) for label, file in files.items()}, log.read_text()
    )


def in_process(words: list[str]) -> int:
    """The command line in this process; its exit status."""
    from compare_q.eval.cli import main

    try:
        return main.main(words)
    except SystemExit as stop:
        return int(stop.code or 0)


def bits(file: Path) -> bytes:
    """All columns of a file of token scores."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(file)
    return b"".join(
        name.encode() + table.column(name).to_numpy().tobytes() for name in table.column_names
    )


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
    place.apart = case.apart
    base = scored(place, cache)
    if base.status or len(base.served) != len(place.models) or any(base.served.values()):
        raise RuntimeError(f"{case.name}: {base.said}")
    case.change(place)
    again = scored(place, cache)
    seen = Counter({"inputs changed": 1})
    seen["refused"] = int(again.status == 2)
    if again.status != 2:
        seen["rows that failed"] = len(place.models) - len(again.served)
    served = [label for label, is_served in again.served.items() if is_served]
    seen["rows served"] = len(served)
    seen["rows scored again"] = len(again.served) - len(served)
    seen["rows with other numbers"] = sum(
        again.scores[each] != base.scores.get(each) for each in again.served
    )
    fresh = scored(place, scratch / "empty") if again.served else again
    wrong = [label for label in again.served if again.scores[label] != fresh.scores.get(label)]
    seen["rows wrongly served"] = len(wrong)
    last = again.said.strip().splitlines()[-1:] if again.status else []
    return case.kind, seen, "; ".join([*(f"wrongly served: {each}" for each in wrong), *last])


def campaign(engine: str, scratch: Path, kinds: list[str]) -> dict[str, Any]:
    """Change every input of one engine."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    cases: dict[str, Any] = {}
    for case in ENGINES[engine]():
        if kinds and case.kind not in kinds:
            continue
        kind, seen, said = changed(case, scratch)
        said = said.replace(f"{scratch / 'place'}/", "")
        found[kind].update(seen)
        cases[f"{kind}: {case.name}"] = {
            **{name: count for name, count in seen.items() if count},
            "said": said,
        }
        print(f"{engine}: {kind}: {case.name}: {dict(+seen)} {said}", flush=True)
    totals: Counter[str] = sum(found.values(), Counter())
    print(f"{engine}: {dict(totals)}", flush=True)
    return {
        "total": dict(totals),
        "kinds": {kind: dict(+each) for kind, each in found.items()},
        "cases": cases,
    }


def main() -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    p.add_argument("out", type=Path)
    p.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    p.add_argument("--kinds", nargs="+", default=[], help="of inputs; all of them by default")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ |= {"COMPARE_Q_IN_PROCESS": "1", "HF_HOME": scratch, "HF_HUB_OFFLINE": "1"}
        found = {engine: campaign(engine, Path(scratch), args.kinds) for engine in args.engines}
    from compare_q.backends.common import machine

    origin = {
        "commit": machine.commit(),
        "versions": machine.versions(),
        "processor": machine.processor(),
    }
    args.out.write_text(json.dumps({**origin, **found}, indent=1) + "\n", encoding="utf-8")
    return int(any(each["total"].get("rows wrongly served") for each in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
