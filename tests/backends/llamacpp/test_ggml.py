"""Builds of ggml, the parameters that llama.cpp gets, and the caches in its log.

The llama.cpp that `make` builds is for any x86-64 CPU with AVX2, uses AVX-512 if the CPU has it,
and has no AMX tiles.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from compare_q.backends import llamacpp
from compare_q.backends.common.packages import package_folder
from compare_q.backends.layers.groups import KVCache
from compare_q.backends.llamacpp import (
    LlamacppOptions,
    context_parameters,
    kv_caches,
    model_parameters,
)
from tests.support.llama_cpp import runs_llama_cpp


def test_build_is_what_the_folder_of_libraries_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The identity also follows a build copied over an installed one, and another folder."""
    for folder in ("lib", "mine"):
        (tmp_path / folder).mkdir()
        for name in ("libggml-cpu.so", "libggml-base.so", "libllama.so"):
            (tmp_path / folder / name).write_bytes(b"1")
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    )
    builds = [llamacpp.build()]
    (tmp_path / "lib" / "libllama.so").write_bytes(b"22")
    builds.append(llamacpp.build())
    os.utime(tmp_path / "lib" / "libllama.so", (0, 0))
    builds.append(llamacpp.build())
    (tmp_path / "lib" / "libggml-cuda.so").touch()
    assert llamacpp.build().startswith("cpu cuda ")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path / "mine"))
    builds.append(llamacpp.build())
    assert re.fullmatch("cpu [0-9a-f]{12}", builds[-1])
    assert len(set(builds)) == 4
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path / "nowhere"))
    assert llamacpp.libraries() == {}
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)  # nothing is installed
    assert llamacpp.libraries() == {}


TILES = re.compile(r"\t(ldtilecfg|sttilecfg|tile\w+|tdp\w+)\b")
V4 = Path("glibc-hwcaps", "x86-64-v4", "libggml-cpu.so.0")
SUPPORTED = "x86-64-v4 (supported, searched)"
LOADED = """
import llama_cpp
print(llama_cpp.llama_print_system_info().decode())
print(*(line for line in open("/proc/self/maps") if "libggml-cpu" in line))
"""


LIBRARIES = (package_folder("llama_cpp") or Path()) / "lib"


@runs_llama_cpp
@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
def test_no_library_holds_amx_tile_code() -> None:
    """GCC 12.2 miscompiles ggml's AMX tile code.

    A build for sapphirerapids with it had 373 tile instructions.
    """
    libraries = {file.resolve() for file in LIBRARIES.rglob("*.so*")}
    assert len(libraries) >= 4
    for library in libraries:
        command = ["objdump", "-d", "--no-show-raw-insn", str(library)]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert len(code) > 10_000, library
        assert TILES.findall(code) == [], library


def ask(**changes: str) -> str:
    """Return what a process reports that loads llama.cpp in a changed environment."""
    command = [sys.executable, "-c", LOADED]
    environment = {**os.environ, **changes}
    process = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return process.stdout


@runs_llama_cpp
def test_the_library_fits_the_cpu_that_it_runs_on() -> None:
    """glibc loads the library with AVX-512 if the CPU has AVX-512 and it is not masked."""
    if not (LIBRARIES / V4).is_file():
        pytest.skip("this llama.cpp was not built by make with AVX2, so there is one library")
    loader = subprocess.run(
        ["/lib64/ld-linux-x86-64.so.2", "--help"], capture_output=True, text=True, check=False
    )
    if SUPPORTED not in loader.stdout:
        pytest.skip("this CPU has no AVX-512, or glibc is older than 2.33")
    wide = ask()
    assert "AVX512 = 1" in wide
    assert str(V4) in wide
    narrow = ask(GLIBC_TUNABLES="glibc.cpu.hwcaps=-AVX512F")
    assert "AVX2 = 1" in narrow
    assert "AVX512" not in narrow
    assert str(V4) not in narrow


def test_the_caches_that_llama_cpp_has_made() -> None:
    """Lines of 0.3.36's log for 1,024 tokens.

    They are about SmolLM2's keys and values (30 layers of 3 heads of 64 numbers) in f16 and in
    q4_0, whose blocks of 32 numbers take 18 bytes, and about Gemma 3's two caches, the second one
    quantized.
    """
    line = (
        "llama_kv_cache: size = {} MiB (  1024 cells,  {} layers,  1/1 seqs), "
        "K ({}): {} MiB, V ({}): {} MiB\n"
    )
    (plain,) = kv_caches(
        "llama_kv_cache: CPU KV buffer size = 22.50 MiB\n"
        + line.format("  22.50", "30", "f16", "  11.25", "f16", "  11.25"),
        1024,
    )
    assert plain == KVCache("blk.*", 30, "f16", "", "", "llama.cpp", "", 2 * 3 * 64 * 2.0)
    (small,) = kv_caches(line.format("   6.33", "30", "q4_0", "   3.16", "q4_0", "   3.16"), 1024)
    assert (small.stored, small.scales, small.prefill) == ("q4_0", "dynamic", "")
    assert small.token_bytes == pytest.approx(2 * 3 * 64 * 18 / 32, rel=0.005 / 6.33)
    lines = line.format(" 4.00", " 4", "f16", " 2.00", "f16", "2.00")
    lines += line.format("16.84", "22", "q8_0", "5.84", "f16", "11.00")
    counts_and_formats = [(cache.count, cache.stored) for cache in kv_caches(lines, 1024)]
    assert counts_and_formats == [(4, "f16"), (22, "q8_0 (values f16)")]


def test_what_llama_cpp_is_told() -> None:
    """Every option reaches its parameter; the others stay llama.cpp's defaults."""
    library = SimpleNamespace(
        llama_model_default_params=SimpleNamespace,
        llama_context_default_params=SimpleNamespace,
        llama_max_devices=lambda: 2,
        LLAMA_SPLIT_MODE_ROW=2,
    )
    options = LlamacppOptions(
        n_gpu_layers=3, split_mode="row", tensor_split=[1, 3], n_batch=64, type_k="bf16"
    )
    model = model_parameters(library, options, repacks=False)
    assert list(model.tensor_split) == [1, 3, *[0] * 14]
    del model.tensor_split
    assert vars(model) == {
        "n_gpu_layers": 3,
        "main_gpu": 0,
        "split_mode": 2,
        "use_extra_bufts": False,
    }
    context = context_parameters(library, options, max_tokens=100, threads=5)
    assert vars(context) == {
        "n_ctx": 100,
        "n_batch": 64,
        "n_ubatch": 512,
        "n_threads": 5,
        "n_threads_batch": 5,
        "type_k": 30,
        "type_v": 1,
    }
