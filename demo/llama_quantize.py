"""GGUF -> GGUF of another type, by llama.cpp itself (``llama_model_quantize`` through llama-cpp-python's ctypes).

    python -m demo.llama_quantize IN.gguf OUT.gguf --type Q4_K_M

The result is what ``llama-quantize`` makes; an importance matrix may come from ``demo/h200/imatrix.py``.  K-quants take
rows of a multiple of 256 weights; for other rows llama.cpp falls back to another type by itself, tensor by tensor.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

PREFIX = "LLAMA_FTYPE_MOSTLY_"
TYPES = tuple(sorted(name.removeprefix(PREFIX) for name in dir(llama_cpp) if name.startswith(PREFIX)))

errors: list[str] = []


def keep_errors(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    """Keep only the errors (level 4) of llama.cpp's log; the whole log has two lines per tensor."""
    if level == 4:
        errors.append(text.decode(errors="replace").strip())


KEEP_ERRORS = llama_cpp.llama_log_callback(keep_errors)  # llama.cpp keeps the pointer: it must never be collected


def llama_quantize(
    source: Path,
    out: Path,
    weight_type: str,
    *,
    threads: int = 0,
    imatrix: Mapping[str, NDArray[np.float32]] | None = None,
) -> None:
    """Write ``source`` (F32, F16 or BF16) to ``out`` as ``weight_type`` ("Q4_K_M", ...); ``threads`` 0: all cores.

    ``imatrix``: GGUF name of a matrix -> mean square of each of its inputs, float32 [in].  RuntimeError with the reason
    that llama.cpp gives.
    """
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, PREFIX + weight_type)
    parameters.nthread = threads
    held = {name: np.ascontiguousarray(values, np.float32) for name, values in (imatrix or {}).items()}
    if held:
        parameters.imatrix = importance_entries(held)
    errors.clear()
    llama_cpp.llama_log_set(KEEP_ERRORS, ctypes.c_void_p())
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(parameters))
    if status:
        raise RuntimeError(
            f"llama.cpp could not quantize {source} to {weight_type}: {' '.join(errors) or f'status {status}'}"
        )


def importance_entries(imatrix: Mapping[str, NDArray[np.float32]]) -> Any:
    """An array of ``llama_model_imatrix_data``, whose end is an entry without a name; the values must outlive it."""
    entries = (llama_cpp.llama_model_imatrix_data * (len(imatrix) + 1))()
    for entry, (name, values) in zip(entries, imatrix.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    return entries


def main() -> None:
    """``python -m demo.llama_quantize IN OUT --type TYPE``."""
    parser = argparse.ArgumentParser(description="Quantize a GGUF file with llama.cpp.")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=TYPES, required=True, help="llama.cpp's name of the type")
    arguments = parser.parse_args()
    llama_quantize(arguments.source, arguments.out, arguments.type)


if __name__ == "__main__":
    main()
