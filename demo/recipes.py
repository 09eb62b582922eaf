"""The demo's models: names, folders, and functions that make each of them once.

The modules that make models are imported where they are needed: a run on existing models does not
wait for them.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MODELS = HERE / "models"
BASE = MODELS / "smollm2-135m"
GGUF_Q4_1 = MODELS / "smollm2-135m-q4_1.gguf"
GGUF_Q8_0 = MODELS / "smollm2-135m-q8_0.gguf"
COMMAND = "__main__.py"
"""The file that only runs models; the other files make them."""


def code_hash() -> str:
    """Return the SHA-256 of the code that makes models."""
    code = b""
    for file in sorted(HERE.rglob("*.py")):
        if file.name != COMMAND:
            code += file.read_bytes()
    return hashlib.sha256(code).hexdigest()


def make_once(out: Path, maker: Callable[[Path], None]) -> None:
    """Make a model (a folder or a file), unless this code has already made a complete one."""
    stamp = out.with_name(f".{out.name}.made-by")
    code = code_hash()
    if out.exists() and stamp.is_file() and stamp.read_text() == code:
        return
    name = out
    if out.is_relative_to(ROOT):
        name = out.relative_to(ROOT)
    print(f"making {name}", flush=True)
    if out.is_dir() and not out.is_symlink():
        shutil.rmtree(out)
    out.unlink(missing_ok=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    maker(out)
    # Written last: without it, a model is not complete.
    stamp.write_text(code)


def make_models() -> None:
    """Make the bf16 base, W8A8, W4A16 in groups of 32, NVFP4 weight-only and NVFP4."""
    make_once(BASE, make_bf16_base)
    make_once(MODELS / "smollm2-135m-w8a8", partial(make_checkpoint, preset="W8A8"))
    make_once(
        MODELS / "smollm2-135m-w4a16-g32", partial(make_checkpoint, preset="W4A16", group_size=32)
    )
    make_once(MODELS / "smollm2-135m-nvfp4a16", partial(make_checkpoint, preset="NVFP4A16"))
    make_once(MODELS / "smollm2-135m-nvfp4", partial(make_checkpoint, preset="NVFP4"))


def make_gguf() -> None:
    """Make the base as Q4_1 and as Q8_0."""
    make_once(GGUF_Q4_1, partial(make_gguf_file, weight_type="Q4_1"))
    make_once(GGUF_Q8_0, partial(make_gguf_file, weight_type="Q8_0"))


def make_bf16_base(out: Path) -> None:
    """Make the bf16 model."""
    from demo.smollm2 import make_base

    make_base(out)


def make_checkpoint(
    out: Path, preset: str, group_size: int | None = None, source: Path = BASE
) -> None:
    """Make one quantized checkpoint of ``source``."""
    from demo.quantize import quantize

    quantize(source, preset, out, group_size=group_size)


def make_gguf_file(out: Path, weight_type: str, source: Path = BASE) -> None:
    """Make ``source`` as GGUF with matrices of type ``weight_type``."""
    from demo.gguf_writer import write_gguf

    write_gguf(source, out, weight_type)
