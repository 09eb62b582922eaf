"""Prefill and decode of the same models in vLLM, side by side: weights in four formats, KV caches in eight.

    python -m benchmarks.decode OUT.json [--windows 64] [--length 2048] [--batch 64] [--rows bf16 "kv fp8" ...]

The shape is one of about 1.5 billion random weights in real files (``benchmarks/shapes.py``), the text is the demo's.
One reference, bf16 in prefill, is that of all rows.  Each row is scored in prefill and in decode; "other steps" are
bf16 in smaller batches and in steps of four tokens.  Quantized weights are also scored in decode against their own
prefill.  A table with errors comes from compare_q itself; OUT.json has what its rows say, which attention, graphs and
steps ran too.  A cache that the machine's vLLM cannot keep is a row with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shapes import Shape, make
from compare_q.backends.common import machine
from compare_q.eval.api import compare
from compare_q.eval.results import results_json

TEXT = Path(__file__).resolve().parent.parent / "eval" / "spec" / "opticks.txt"
SHAPE = Shape(2048, 16, 16, 8, 8192, 128_256, 131_072)
TOY = Shape(256, 2, 4, 2, 512, 4096, 4096)
ROWS: dict[str, tuple[str, str]] = {
    "bf16": ("bf16", "auto"),
    "fp8": ("fp8", "auto"),
    "w4a16": ("w4a16", "auto"),
    "nvfp4": ("nvfp4a16", "auto"),
    "kv fp8": ("bf16", "fp8"),
    "kv int8": ("bf16", "int8_per_token_head"),
    "kv int4": ("bf16", "int4_per_token_head"),
    **{f"kv turboquant {bits}": ("bf16", f"turboquant_{bits}") for bits in ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")},
}
"""Row -> (format of the weights, ``kv_cache_dtype``)."""
OTHER_STEPS = "other steps"
KEPT = (
    "label", "phase", "kernel", "kv_cache", "deviations", "ppl", "ppl_stderr", "kld", "kld_stderr", "kld_p99.9",
    "same_top", "tokens", "tokens_per_second", "load_seconds", "score_seconds", "error",
)  # fmt: skip


def spec(row: str, folders: dict[str, Path], **keys: Any) -> dict[str, Any]:
    """The model spec of a row, in prefill unless ``keys`` say otherwise."""
    weights, cache = ROWS[row]
    engine = {} if cache == "auto" else {"kv_cache_dtype": cache}
    return {"load_fn": "vllm_score", "model_dir": str(folders[weights]), "label": row, "engine": engine, **keys}


def decode(row: str, folders: dict[str, Path], batch: int, step: int = 1) -> dict[str, Any]:
    """The model spec of a row in decode."""
    return spec(row, folders, label=f"{row} decode {step}x{batch}", phase="decode", step=step, batch=batch)


def measured(data: dict[str, Any], models: list[dict[str, Any]], cache: Path) -> list[dict[str, Any]]:
    """The rows of one table, with what ran."""
    comparison = compare(data, models, cache_dir=cache)
    found = []
    for row in results_json.text_json(comparison.results.texts[0])["models"]:
        ran = row.get("provenance") or {}
        scorer = ran.get("scorer") or {}
        found.append({
            **{key: row.get(key) for key in KEPT},
            "attention": sorted({each["attention"] for each in ran.get("kv_cache_layers", ())}),
            "enforce_eager": ran.get("enforce_eager"), "model_runner": scorer.get("model_runner"),
            "steps": scorer.get("steps"), "notes": row.get("notes"),
        })  # fmt: skip
        print(json.dumps(found[-1]), flush=True)
    return found


def main(words: Sequence[str]) -> int:
    """``python -m benchmarks.decode``; exit status 1 if a row failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="JSON file to write; what is finished is written at once")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--batch", type=int, default=64, help="windows that are decoded at a time")
    names = [*ROWS, OTHER_STEPS]
    parser.add_argument(
        "--rows", nargs="+", choices=names, default=names, help="default: all; bf16 in prefill is always there"
    )
    parser.add_argument("--toy", action="store_true", help="a small shape, for a CPU")
    arguments = parser.parse_args(words)
    rows = [row for row in dict.fromkeys(["bf16", *arguments.rows]) if row in ROWS]
    began = time.perf_counter()
    found: dict[str, Any] = {
        "commit": machine.commit(), "versions": machine.versions(), "hardware": machine.hardware(machine.gpus()),
        "windows": arguments.windows, "length": arguments.length, "tables": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        formats = tuple(dict.fromkeys(ROWS[row][0] for row in rows))
        folders = make(Path(scratch) / "models", TOY if arguments.toy else SHAPE, formats)
        data = {"tokenizer_dir": str(folders["bf16"]), "dataset": "text", "path": str(TEXT),
                "eval_len": arguments.length, "eval_stride": arguments.length,
                "max_rows": arguments.windows}  # fmt: skip
        reference = spec("bf16", folders, reference=True)
        phases = {row: [spec(row, folders), decode(row, folders, arguments.batch)] for row in rows}
        phases["bf16"] = [reference, *phases["bf16"][1:]] if "bf16" in arguments.rows else [reference]
        tables = {
            "against bf16 in prefill": [each for row in rows for each in phases[row]],
            **{
                f"{row} against its own prefill": [
                    spec(row, folders, reference=True), decode(row, folders, arguments.batch)
                ]
                for row in rows if ROWS[row][0] != "bf16"
            },
        }  # fmt: skip
        if OTHER_STEPS in arguments.rows:
            others = [(max(arguments.batch // 8, 1), 1), (arguments.batch, 4)]
            tables[OTHER_STEPS] = [reference, *(decode("bf16", folders, batch, step) for batch, step in others)]
        for name, models in tables.items():
            found["tables"][name] = measured(data, models, Path(scratch) / "cache")
            found["seconds"] = round(time.perf_counter() - began, 1)
            arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any(row["error"] for table in found["tables"].values() for row in table))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
