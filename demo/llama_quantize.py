"""GGUF -> GGUF of another type, by llama.cpp itself (``llama_model_quantize`` through llama-cpp-python's ctypes).

    python -m demo.llama_quantize IN.gguf OUT.gguf --type Q4_K_M

The result is what ``llama-quantize`` makes without an importance matrix.  K-quants take rows of a multiple of 256
weights; for other rows llama.cpp falls back to another type by itself, tensor by tensor.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

import llama_cpp

PREFIX = "LLAMA_FTYPE_MOSTLY_"
TYPES = tuple(sorted(name.removeprefix(PREFIX) for name in dir(llama_cpp) if name.startswith(PREFIX)))

errors: list[str] = []


def keep_errors(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    """llama.cpp's log, of which only its errors (level 4) are kept; it is two lines a tensor otherwise."""
    if level == 4:
        errors.append(text.decode(errors="replace").strip())


KEEP_ERRORS = llama_cpp.llama_log_callback(keep_errors)  # llama.cpp keeps the pointer: it must never be collected


def llama_quantize(source: Path, out: Path, weight_type: str, *, threads: int = 0) -> None:
    """Write ``source`` (F32, F16 or BF16) to ``out`` as ``weight_type`` ("Q4_K_M", ...); ``threads`` 0: all cores.

    RuntimeError with llama.cpp's reason.
    """
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, PREFIX + weight_type)
    parameters.nthread = threads
    errors.clear()
    llama_cpp.llama_log_set(KEEP_ERRORS, ctypes.c_void_p())
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(parameters))
    if status:
        raise RuntimeError(
            f"llama.cpp could not quantize {source} to {weight_type}: {' '.join(errors) or f'status {status}'}"
        )


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
