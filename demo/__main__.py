"""``make demo``: make the models once, then run compare_q on them exactly as a user would."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
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
    make(BASE, base)
    make(MODELS / "smollm2-135m-w8a8", partial(quantized, preset="W8A8"))
    make(MODELS / "smollm2-135m-w4a16-g32", partial(quantized, preset="W4A16", group_size=32))


def base(out: Path) -> None:
    """The bf16 model.  What makes models is imported here, so that a second run does not wait for it."""
    from demo.smollm2 import make_base

    make_base(out)


def quantized(out: Path, preset: str, group_size: int | None = None) -> None:
    """One quantized checkpoint of the base."""
    from demo.quantize import quantize

    quantize(BASE, preset, out, group_size=group_size)


def main() -> int:
    """Make what is missing and run the command; its exit status.  Arguments: only make these presets as well."""
    make_models()
    for preset in sys.argv[1:]:
        make(MODELS / f"smollm2-135m-{preset.lower()}", partial(quantized, preset=preset))
    if sys.argv[1:]:
        return 0
    # On CPUs with AMX vLLM would run W4A16 checkpoints with int8 activations, and the row would not be what it says.
    os.environ.setdefault("VLLM_CPU_INT4_W4A8", "0")
    RESULTS.mkdir(exist_ok=True)
    print("\n$ python " + " ".join(f'"{word}"' if " " in word else word for word in command()), flush=True)
    return subprocess.run([sys.executable, *command()], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
