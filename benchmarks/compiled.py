"""What compilation changes: each model in vLLM eager, which is compare_q's default, and compiled (with CUDA graphs).

    python -m benchmarks.compiled OUT.json MODEL... [--text FILE] [--windows 64] [--length 2048] [--rows again compiled]

A table for each MODEL, a folder of a checkpoint and its tokenizer.  Its reference is the model in an eager engine.  The
other rows: ``again``, the same with another seed, which changes no score; ``compiled``; and ``noise``, the noise floor.
The reference also records what the others are compared with, so the ratio of speeds is ``compiled`` over ``again``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import timings
from compare_q.backends.common import machine
from compare_q.eval.api import compare
from compare_q.eval.results import results_json

TEXT = Path(__file__).resolve().parent.parent / "eval" / "spec" / "opticks.txt"
EAGER = {"enforce_eager": True}
ROWS: dict[str, dict[str, Any]] = {
    "again": {**EAGER, "seed": 1},
    "compiled": {"enforce_eager": False},
    "noise": {**EAGER, "noise": "bf16"},
}
"""Row -> its ``engine`` object."""
KEPT = (
    "label", "kernel", "ppl", "ppl_stderr", "kld", "kld_stderr", "same_top", "tokens", "tokens_per_second", "beside",
    "error",
)  # fmt: skip


def specs(model: Path, rows: Sequence[str], common: dict[str, Any]) -> list[dict[str, Any]]:
    """The model specs of one table."""
    spec = {"load_fn": "vllm_score", "model_dir": str(model.resolve())}
    return [
        {**spec, "label": "eager", "engine": {**common, **EAGER}, "reference": True},
        *({**spec, "label": name, "engine": {**common, **ROWS[name]}, "noise_floor": name == "noise"} for name in rows),
    ]


def measured(data: dict[str, Any], models: list[dict[str, Any]], cache: Path) -> dict[str, Any]:
    """One table: its rows, where their seconds went, and the speed of ``compiled`` over the speed of ``again``."""
    comparison = compare(data, models, cache_dir=cache)
    rows = results_json.text_json(comparison.results.texts[0])["models"]
    found = [{key: row.get(key) for key in KEPT} | {"seconds": timings.timing_of(row)} for row in rows]
    speed = {row["label"]: row["tokens_per_second"] for row in found}
    known = speed.get("again") and speed.get("compiled")
    return {"rows": found, "compiled_over_again": speed["compiled"] / speed["again"] if known else None}


def main(words: Sequence[str]) -> int:
    """``python -m benchmarks.compiled``; exit status 1 if a row failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiled", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("out", type=Path, help="JSON file to write; what is finished is written at once")
    parser.add_argument("models", type=Path, nargs="+", help="folders of checkpoints")
    parser.add_argument("--text", type=Path, default=TEXT, help="default: the demo's text")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="default: all")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="options of all rows")
    arguments = parser.parse_args(words)
    if len({model.name for model in arguments.models}) < len(arguments.models):
        parser.error("two MODELs have one name; tables are kept by name")
    found: dict[str, Any] = {
        "commit": machine.commit(), "versions": machine.versions(), "hardware": machine.hardware(machine.gpus()),
        "windows": arguments.windows, "length": arguments.length, "engine": arguments.engine, "tables": {},
    }  # fmt: skip
    for model in arguments.models:
        data = {"tokenizer_dir": str(model.resolve()), "dataset": "text", "path": str(arguments.text.resolve()),
                "eval_len": arguments.length, "eval_stride": arguments.length,
                "max_rows": arguments.windows}  # fmt: skip
        with tempfile.TemporaryDirectory() as cache:
            table = measured(data, specs(model, arguments.rows, arguments.engine), Path(cache))
        found["tables"][model.name] = table
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        for row in table["rows"]:
            print(json.dumps({"model": model.name, **row}), flush=True)
    return int(any(row["error"] for table in found["tables"].values() for row in table["rows"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
