"""Builds of ggml, and what `make` builds of llama.cpp: for any x86-64 CPU with AVX2, AVX-512 where the CPU has it, AMX
tiles nowhere."""

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
from tests.support.llama_cpp import needs_llama_cpp


def test_build_is_what_the_folder_of_libraries_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also of a build copied over an installed one, and of the folder that llama-cpp-python is told to load from."""
    for folder in ("lib", "mine"):
        (tmp_path / folder).mkdir()
        for name in ("libggml-cpu.so", "libggml-base.so", "libllama.so"):
            (tmp_path / folder / name).write_bytes(b"1")
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
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


@pytest.mark.engine
@needs_llama_cpp
@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
def test_no_library_holds_amx_tile_code() -> None:
    """GCC 12.2 miscompiles ggml's; a build for sapphirerapids with it had 373 such instructions."""
    libraries = {file.resolve() for file in LIBRARIES.rglob("*.so*")}
    assert len(libraries) >= 4
    for library in libraries:
        command = ["objdump", "-d", "--no-show-raw-insn", str(library)]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert len(code) > 10_000, library
        assert TILES.findall(code) == [], library


def ask(**environment: str) -> str:
    command, changed = [sys.executable, "-c", LOADED], {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=changed).stdout


@pytest.mark.engine
@needs_llama_cpp
def test_the_library_fits_the_cpu_that_it_runs_on() -> None:
    """glibc takes the one with AVX-512 where the CPU has that; told that it has not, the other."""
    if not (LIBRARIES / V4).is_file():
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
