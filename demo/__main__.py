"""``make demo``: make the models once, then run compare_q on them exactly as a user would.

``python -m demo --all``: GGUF in llama.cpp as well.  ``python -m demo PRESET ...``: only make these checkpoints.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from functools import partial

from demo.recipes import BASE, HERE, MODELS, ROOT, make_checkpoint, make_gguf, make_models, make_once

__all__ = ["BASE", "MODELS", "ROOT", "make_models"]

RESULTS = HERE / "results"
SPECS = "eval/spec"


def command(*, everything: bool) -> list[str]:
    """The command line of the demo; ``everything``: with GGUF."""
    models = ["demo_transformers.json", "demo_vllm.json", *(["demo_gguf.json"] if everything else [])]
    return [
        "eval/compare_q.py",
        *("-d", f"{SPECS}/demo_text.json"),
        *("-m", *(f"{SPECS}/{name}" for name in models)),
        *("-p", "-pf", "demo/results/plot.png", "--html", "demo/results/report.html"),
        *("-o", "demo/results/results.json"),
        *("-t", "SmolLM2-135M, round-to-nearest"),
    ]


def main() -> int:
    """Make what is missing and run the command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo", description="Make the demo's models and compare them.")
    parser.add_argument("presets", nargs="*", help="schemes of compressed-tensors: make only these checkpoints")
    parser.add_argument("--all", action="store_true", help="GGUF in llama.cpp as well")
    arguments = parser.parse_args()
    os.environ["TQDM_DISABLE"] = "1"  # before tqdm is imported: seconds of work need no bars of three libraries
    make_models()
    for preset in arguments.presets:
        make_once(MODELS / f"smollm2-135m-{preset.lower()}", partial(make_checkpoint, preset=preset))
    if arguments.presets:
        return 0
    if arguments.all:
        make_gguf()
    # On CPUs with AMX vLLM would run W4A16 checkpoints with int8 activations, and the row's label would be wrong.
    os.environ.setdefault("VLLM_CPU_INT4_W4A8", "0")
    RESULTS.mkdir(exist_ok=True)
    words = command(everything=arguments.all)
    print("\n$ python " + " ".join(f'"{word}"' if " " in word else word for word in words), flush=True)
    return subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
