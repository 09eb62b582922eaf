"""``make demo``: make the models once, then run compare_q on them exactly as a user would."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MODELS = HERE / "models"
RESULTS = HERE / "results"
BASE = MODELS / "smollm2-135m"
SPECS = "eval/spec"


def command() -> list[str]:
    """The command line of the demo."""
    return [
        "eval/compare_q.py",
        *("-d", f"{SPECS}/demo_text.json"),
        *("-m", f"{SPECS}/demo_transformers.json", f"{SPECS}/demo_vllm.json"),
        *("-p", "-pf", "demo/results/plot.png", "-o", "demo/results/results.json"),
        *("-t", "SmolLM2-135M, round-to-nearest"),
    ]


def make(out: Path, maker: Callable[[Path], None]) -> None:
    """Make a model folder unless it is there, whole, and made by the present code."""
    made_by = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(HERE.glob("*.py")))).hexdigest()
    stamp = out / ".made-by"
    if stamp.is_file() and stamp.read_text() == made_by:
        return
    print(f"making {out.relative_to(ROOT)}", flush=True)
    shutil.rmtree(out, ignore_errors=True)
    maker(out)
    stamp.write_text(made_by)


def make_models() -> None:
    """The bf16 base, W4A16 in groups of 32, and W8A8."""
    os.environ["TQDM_DISABLE"] = "1"  # before tqdm is imported: seconds of work need no bars of three libraries
    from demo.quantize import quantize
    from demo.smollm2 import make_base

    make(BASE, make_base)
    make(MODELS / "smollm2-135m-w8a8", lambda out: quantize(BASE, "W8A8", out))
    make(MODELS / "smollm2-135m-w4a16-g32", lambda out: quantize(BASE, "W4A16", out, group_size=32))


def main() -> int:
    """Make what is missing and run the command; its exit status."""
    make_models()
    RESULTS.mkdir(exist_ok=True)
    print("\n$ python " + " ".join(f'"{word}"' if " " in word else word for word in command()), flush=True)
    return subprocess.run([sys.executable, *command()], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
