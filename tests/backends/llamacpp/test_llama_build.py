"""What `make` builds of llama.cpp: for any x86-64 CPU with AVX2, AVX-512 where the CPU has it, AMX tiles nowhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compare_q.backends.base import LoadRequest
from compare_q.backends.common.packages import package_folder
from compare_q.backends.llamacpp import ggml
from compare_q.backends.llamacpp.engine import NO_TILES, LlamacppEngine
from tests.support.llama_cpp import needs_llama_cpp

pytestmark = pytest.mark.engine

TILES = re.compile(r"\t(ldtilecfg|sttilecfg|tile\w+|tdp\w+)\b")
V4 = Path("glibc-hwcaps", "x86-64-v4", "libggml-cpu.so.0")
SUPPORTED = "x86-64-v4 (supported, searched)"
LOADED = """
import llama_cpp
print(llama_cpp.llama_print_system_info().decode())
print(*(line for line in open("/proc/self/maps") if "libggml-cpu" in line))
"""


def library_folder() -> Path:
    package = package_folder("llama_cpp")
    return package / "lib"


@needs_llama_cpp
@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
def test_no_library_holds_amx_tile_code() -> None:
    """GCC 12.2 miscompiles ggml's; a build for sapphirerapids with it had 373 such instructions."""
    libraries = {file.resolve() for file in library_folder().rglob("*.so*")}
    assert len(libraries) >= 4
    for library in libraries:
        command = ["objdump", "-d", "--no-show-raw-insn", str(library)]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert len(code) > 10_000, library
        assert TILES.findall(code) == [], library


def ask(**environment: str) -> str:
    command, changed = [sys.executable, "-c", LOADED], {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=changed).stdout


@needs_llama_cpp
def test_the_library_fits_the_cpu_that_it_runs_on() -> None:
    """glibc takes the one with AVX-512 where the CPU has that; told that it has not, the other."""
    if not (library_folder() / V4).is_file():
        pytest.skip("this llama.cpp was not built by make with AVX2, so there is one library")
    loader = subprocess.run(["/lib64/ld-linux-x86-64.so.2", "--help"], capture_output=True, text=True, check=False)
    if SUPPORTED not in loader.stdout:
        pytest.skip("this CPU has no AVX-512, or glibc is older than 2.33")
    assert "AVX512 = 1" in (wide := ask())
    assert str(V4) in wide
    narrow = ask(GLIBC_TUNABLES="glibc.cpu.hwcaps=-AVX512F")
    assert "AVX2 = 1" in narrow
    assert "AVX512" not in narrow
    assert str(V4) not in narrow


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ("CPU : AVX2 = 1 | AVX512 = 1 | AVX512_BF16 = 1 | REPACK = 1", False),
        ("CPU : AVX512_VNNI = 1 | AMX_INT8 = 1 | REPACK = 1", True),
        ("CPU : AVX512 = 1 | AMX_INT8 = 0", False),
    ],
)
def test_whether_a_build_has_tile_code(info: str, expected: bool) -> None:
    assert ggml.has_tile_code(info) is expected


@pytest.mark.parametrize(
    ("tiles", "option", "repacks", "notes"),
    [(True, None, False, [NO_TILES]), (True, True, True, []), (True, False, False, []), (False, None, True, [])],
)
def test_tile_code_runs_only_on_demand(
    monkeypatch: pytest.MonkeyPatch, tiles: bool, option: bool | None, repacks: bool, notes: list[str]
) -> None:
    """It may crash the process, and with it the results of every model."""
    options = {} if option is None else {"use_extra_bufts": option}
    engine = LlamacppEngine(LoadRequest("m", "llamacpp", "m.gguf", 100, options))
    monkeypatch.setattr(engine, "_system_info", lambda: "AMX_INT8 = 1" if tiles else "AVX2 = 1")
    engine.repacks = engine._may_repack()
    assert engine.repacks is repacks
    assert engine._notes() == notes
