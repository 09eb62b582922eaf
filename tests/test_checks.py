"""``make check`` finds what its tools are there for: faults are planted in a copy of the code."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

WRONG_TYPE = """
from ..backends.window import Window


def text_of(window: Window) -> str:
    return window.digest + len(window.token_ids)
"""
"""A module of eval/ that uses a type of backends/ wrongly: without its types, mypy sees ``Any``."""
UPWARD_IMPORT = "from ..eval.common import cache\n\n__all__ = ['cache']\n"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the code, and of the settings of the tools."""
    for folder in ("eval", "backends", "compare_q"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path)
    return tmp_path


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)


def imports_of(copy: Path) -> subprocess.CompletedProcess[str]:
    """Check the imports of a copy as the Makefile does: in a tree in which the package is whole."""
    built = copy / ".types" / "built"
    shutil.rmtree(built, ignore_errors=True)
    run("setup.py", "-q", "build_py", "--build-lib", built, folder=copy).check_returncode()
    lint = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return run("-c", lint, "--no-cache", "--config", copy / "pyproject.toml", folder=built)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("mypy"), reason="mypy is not installed")
def test_mypy_finds_a_wrong_type_across_the_halves(copy: Path) -> None:
    package = copy / ".types" / "compare_q"
    package.mkdir(parents=True)
    (package / "__init__.py").symlink_to(copy / "compare_q" / "__init__.py")
    for half in ("eval", "backends"):
        (package / half).symlink_to(copy / half)
    planted = copy / "eval" / "planted.py"
    planted.write_text(WRONG_TYPE)
    if (ROOT / ".mypy_cache").is_dir():
        # What ``make check`` has found out about other packages.
        shutil.copytree(ROOT / ".mypy_cache", copy / "cache")
    file = ".types/compare_q/eval/planted.py"
    # One file, with what it imports: all files take mypy a minute.
    checked = run("-m", "mypy", "--cache-dir", copy / "cache", file, folder=copy)
    assert checked.returncode == 1, checked.stderr
    assert "[operator]" in checked.stdout
    planted.write_text(WRONG_TYPE.replace(" + len(window.token_ids)", ""))
    checked = run("-m", "mypy", "--cache-dir", copy / "cache", file, folder=copy)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec("importlinter"), reason="import-linter is not installed"
)
def test_lint_imports_finds_an_upward_import(copy: Path) -> None:
    clean = imports_of(copy)
    assert clean.returncode == 0, clean.stdout
    file = copy / "backends" / "window.py"
    file.write_text(f"{file.read_text()}\n{UPWARD_IMPORT}")
    checked = imports_of(copy)
    assert checked.returncode == 1, checked.stderr
    assert "compare_q.backends.window -> compare_q.eval.common.cache" in checked.stdout
