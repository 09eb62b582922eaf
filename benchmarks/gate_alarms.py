"""Count false alarms of the gate: a model in vLLM compared with itself, with other batch shapes, threads and texts.

    python -m benchmarks.gate_alarms OUT.json MODEL [--gates 20]

Each gate uses the next part of the text and other roundings in its noise floor.  It has three variants: other numbers
of tokens per step, other numbers of windows per step (both drawn by a seed), and one thread instead of all.  All three
variants are right.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LENGTH, WINDOWS = 320, 4


def gate(number: int, model: str, text: str, folder: Path) -> dict[str, str]:
    """Return the verdicts of one gate, by label."""
    draw, size = random.Random(number), 8 * LENGTH * WINDOWS
    (folder / "text.txt").write_text(text[number * size : (number + 1) * size], encoding="utf-8")
    spec = {"dataset": "text", "path": "text.txt", "tokenizer_dir": model, "eval_len": LENGTH, "eval_stride": LENGTH}
    (folder / "data.json").write_text(json.dumps(spec), encoding="utf-8")
    alone = folder / "python"
    alone.write_text(f'#!/bin/sh\nexec taskset -c 0 {sys.executable} "$@"\n', encoding="utf-8")
    alone.chmod(0o755)
    variants = ("as_is:", f"tokens:engine.max_num_batched_tokens={draw.randint(LENGTH + 1, 4 * LENGTH)}",
                f"windows:engine.max_num_seqs={draw.randint(1, 3)}", f"thread:python={alone}")  # fmt: skip
    words = [word for variant in variants for word in ("--variant", variant)]
    words += [
        "-d",
        str(folder / "data.json"),
        "-r",
        str(WINDOWS),
        "-o",
        str(folder / "gate.json"),
        "--phase",
        "prefill",
    ]
    subprocess.run([sys.executable, ROOT / "eval" / "compare_q.py", "gate", f"{model}@vllm", *words], check=False)
    found = json.loads((folder / "gate.json").read_text(encoding="utf-8"))
    return {each["label"]: each["words"] for each in found["variants"]}


def main() -> None:
    """Write the verdicts of all gates, and the number of variants that are not as before."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gate_alarms", description="Count the gate's false alarms."
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("model")
    parser.add_argument("--gates", type=int, default=20)
    args = parser.parse_args()
    text = (ROOT / "eval" / "spec" / "opticks.txt").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        gates = [gate(number, args.model, text, Path(folder)) for number in range(args.gates)]
    alarms = sum(not words.startswith("as before") for each in gates for words in each.values())
    args.out.write_text(json.dumps({"model": Path(args.model).name, "alarms": alarms, "gates": gates}, indent=1) + "\n")


if __name__ == "__main__":
    main()
