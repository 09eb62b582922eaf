"""Measure the GPU table's rows with compare_q, in one run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from demo.h200.rows import GPTQ, HIDDEN, STRIDE, WINDOW, Row
from demo.recipes import ROOT


def usable_rows(out: Path, rows: list[Row]) -> list[dict[str, Any]]:
    """Model specs of the rows whose models were made and whose engines can run here, the first as the reference."""
    from compare_q.backends.common.errors import InputError
    from compare_q.eval.run import plan
    from compare_q.eval.run.config import local_config
    from compare_q.eval.specs import reading

    entries: list[dict[str, Any]] = []
    for row in rows:
        model = str(out / "models" / row.model)
        entry: dict[str, Any] = {
            "load_fn": row.load_fn, "label": row.label, "model_dir": model, "engine": row.engine,
            "group": row.group,
        }  # fmt: skip
        entry |= {"noise_floor": True} if row.noise_floor else {}
        problems = []
        try:
            plan.plan_models(local_config(), [reading.parse_model_spec(entry, out / "models.json")], WINDOW)
        except InputError as error:
            problems = str(error).splitlines()
        if row.model == GPTQ and not problems and not has_one_embedding(out / "models" / GPTQ, out / "models" / "bf16"):
            problems = [f"{row.label}: {model}: was made of another base; make it again (demo/h200/gptq.py)"]
        for problem in problems:
            print(f"left out: {problem}", flush=True)
        if not problems:
            entries.append(entry)
    return [{**entry, "reference": True} if i == 0 else entry for i, entry in enumerate(entries)]


def has_one_embedding(one: Path, other: Path) -> bool:
    """Return True if the embeddings of two folders are equal. GPTQ does not change the embedding of its base."""
    import torch
    from safetensors import safe_open

    parts = []
    for folder in (one, other):
        with safe_open(folder / "model.safetensors", framework="pt") as tensors:
            parts.append(tensors.get_slice("model.embed_tokens.weight")[:64])
    return torch.equal(*parts)


def measure_table(out: Path, rows: list[Row], text: Path, limit: str, seconds: float | None = None) -> int:
    """Measure every row that can run here: table, JSON, CSV, plots and report; return the exit status of compare_q.

    After ``seconds`` compare_q is stopped, as by Ctrl-C: it writes finished results, and the next run continues there.
    """
    data = {"tokenizer_dir": str(out / "models" / "bf16"), "dataset": "text", "path": str(text.resolve())}
    windows = {"eval_len": WINDOW, "eval_stride": STRIDE, "max_rows": 0}
    entries, results = usable_rows(out, rows), out / "results"
    if not entries:
        return 2
    results.mkdir(exist_ok=True)
    for name, content in {"data": {**data, **windows}, "models": entries}.items():
        (out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    words: list[object] = [
        *("eval/compare_q.py", "-d", out / "data.json", "-m", out / "models.json", "--cache-dir", out / "cache"),
        *("-r", limit, "-t", f"SmolLM2-135M, padded to {HIDDEN}", "--pairs"),
        *("-o", results / "results.json", "--csv", results / "results.csv", "--markdown", results / "table.md"),
        *("--html", results / "report.html", "--plots", results / "plots", "--card", results / "card.png"),
    ]
    with (results / "table.txt").open("w", encoding="utf-8") as table:
        command, environment = [sys.executable, *map(str, words)], {**os.environ, "COLUMNS": "160"}
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=table)
        try:
            status = run.wait(seconds)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGINT)
            status = run.wait()
    print((results / "table.txt").read_text(encoding="utf-8"), flush=True)
    return status
