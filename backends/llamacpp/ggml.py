"""The ggml that is installed with llama-cpp-python: its builds, its log, and the types in which ggml multiplies.

What this file does not know: models and logits (``backends/llamacpp/engine.py``).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from compare_q.backends.common import machine
from compare_q.backends.common.packages import package_folder
from compare_q.backends.layers.schemes import UNKNOWN

DEBUG, WARNING, ERROR = 1, 3, 4
ASSIGNED = re.compile(r"layer +(\d+) assigned to device (\w+)")
LIBRARY = re.compile(r"(?:lib)?ggml-([a-z]+)")
FLOATS = ("f32", "f16", "bf16")


class Log:
    """What llama.cpp has said since a model's load began; all but debugging is also written to the standard error."""

    def __init__(self) -> None:
        self.text = ""
        self.devices: dict[int, str] = {}
        self.warnings: list[str] = []
        self.errors: list[str] = []

    def hear(self, level: int, text: bytes, _: Any) -> None:
        """llama.cpp's callback."""
        line = text.decode(errors="replace")
        if assigned := ASSIGNED.search(line):
            self.devices[int(assigned[1])] = assigned[2]
        if level == DEBUG:
            return
        os.write(2, text)
        self.text += line
        said = " ".join(line.partition(": ")[2].split())  # without the function's name
        if level in (WARNING, ERROR) and said:
            (self.warnings if level == WARNING else self.errors).append(said)

    def reason(self) -> str:
        """Its errors in one line."""
        return "; ".join(dict.fromkeys(self.errors)) or "no reason given"


@cache
def callback() -> tuple[Any, list[Log]]:
    """The one callback of this process, which llama.cpp may call at any time, and the log that it fills."""
    import llama_cpp

    current = [Log()]
    hear = llama_cpp.llama_log_callback(lambda level, text, data: current[0].hear(level, text, data))
    return hear, current


def listening() -> Log:
    """A new log that llama.cpp fills from now on."""
    import llama_cpp

    hear, current = callback()
    current[0] = Log()
    llama_cpp.llama_log_set(hear, ctypes.c_void_p())
    return current[0]


def libraries() -> dict[str, str]:
    """Name -> size and time of the libraries that llama-cpp-python loads, from its own folder or from another one.

    The files are looked at, since the hashes that pip noted stay when another build is copied over the installed one.
    """
    package = package_folder("llama_cpp")
    if package is None:
        return {}
    folder = Path(os.environ.get("LLAMA_CPP_LIB_PATH", package / "lib"))
    # glibc-hwcaps/x86-64-v4 holds the library for CPUs with AVX-512, if `make` built llama.cpp.
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    found = {str(file.relative_to(folder)): file.stat() for file in files}
    return {name: f"{stat.st_size} {stat.st_mtime_ns}" for name, stat in found.items()}


def build() -> str:
    """What tells builds of one version apart, whose scores differ: "cpu cuda 1f0c..."."""
    found = libraries()
    digest = hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()
    return " ".join([*sorted(installed_backends()), digest[:12]])


def installed_backends() -> set[str]:
    """ggml's backends that are installed: cpu, cuda, blas, ..."""
    return {match[1] for name in libraries() if (match := LIBRARY.match(name))} - {"base"}


def has_tile_code(system_info: str) -> bool:
    """Whether a build multiplies in AMX tiles, by its ``llama_print_system_info``.

    ``_tile_loadconfig`` of GCC 12.2, and up to 13.2, declares 8 of the 64 bytes that it reads: the stores of ggml's
    tile configuration are dropped, and its products of Q4_0 and Q4_1 crash (12.2, on a Xeon with AMX: SIGILL).
    """
    return re.search(r"\bAMX_\w+ = 1", system_info) is not None


def environment() -> dict[str, str]:
    """The variables that choose ggml's kernels or llama.cpp's library."""
    return machine.variables(("GGML_", "LLAMA_"), re.compile("DEBUG|LOG|CACHE|BACKTRACE|LLAMA_ARG"))


def activations(weights: str, backend: str) -> str:
    """The type in which ggml multiplies float32 activations with weights of a type, by the sources of ggml 0.25.

    The CPU backend converts the activations to the type that its dot product takes.  With a second backend at hand it
    may hand over the products of 32 tokens and more, and nothing says so.  CUDA (compute capability 8.0 and more)
    quantizes activations to q8_1, except for formats that it dequantizes to float16, and for FP4 formats on Blackwell,
    depending on the build.
    """
    if weights.startswith("ggml"):
        return UNKNOWN
    if backend == "cpu" and installed_backends() == {"cpu"}:
        return cpu_activations(weights)
    return cuda_activations(weights) if backend == "cuda" and installed_backends() == {"cpu", "cuda"} else UNKNOWN


def cpu_activations(weights: str) -> str:
    """``vec_dot_type`` of ggml-cpu's type traits."""
    if weights in FLOATS:
        return weights
    if weights.endswith("_K") or (weights.startswith(("iq", "tq")) and weights != "iq4_nl"):
        return "q8_K"
    return "q8_1" if weights.endswith("_1") else "q8_0"


def cuda_activations(weights: str) -> str:
    """``ggml_cuda_mul_mat`` for more than a few tokens."""
    import torch

    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if capability < (8, 0) or (weights in ("mxfp4", "nvfp4") and capability >= (10, 0)):
        return UNKNOWN
    if weights in FLOATS:
        return weights
    return "f16" if weights == "iq1_m" or weights.startswith("tq") else "q8_1"
