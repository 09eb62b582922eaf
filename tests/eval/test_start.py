"""How it starts: in a checkout, as ``compare-q`` from an installation, and under a Python that lacks what it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from eval import __version__, compare_q
from tests.support import ROOT


def run(*words: object, cwd: Path = ROOT, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A Python of its own."""
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    environment.pop("COMPARE_Q_COMMIT", None)
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a checkout runs, without an environment."""
    for name in ("eval", "backends"):
        shutil.copytree(ROOT / name, tmp_path / "copy" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "Makefile", "compare_q_vllm.py"):
        shutil.copy(ROOT / name, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_python_without_the_packages_says_what_to_do(checkout: Path) -> None:
    """-S: without site-packages, as the system's Python is beside an environment that make has left."""

    def refused(cwd: Path) -> str:
        ran = run("-S", "-E", os.path.relpath(checkout / "eval" / "compare_q.py", cwd), "-d", "x", cwd=cwd)
        assert (ran.returncode, ran.stdout, len(ran.stderr.splitlines())) == (2, "", 1), ran.stderr
        return ran.stderr

    assert refused(checkout).startswith("error: rich is not installed for ")
    assert "'make -C copy demo' makes an environment" in refused(checkout.parent)
    (checkout / ".venv-cpu" / "bin").mkdir(parents=True)
    (checkout / ".venv-cpu" / "bin" / "python").touch()
    assert refused(checkout).endswith(": run it with .venv-cpu/bin/python, or first 'source .venv-cpu/bin/activate'\n")
    assert "run it with copy/.venv-cpu/bin/python, or" in refused(checkout.parent)


def test_an_old_python_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    assert compare_q.main() == 2
    assert "and compare_q needs 3.11 or newer: " in capsys.readouterr().err


def test_the_version_is_the_checkouts() -> None:
    ran = run("eval/compare_q.py", "--version")
    assert (ran.returncode, ran.stdout) == (0, f"compare_q {__version__}\n")


def test_help_waits_for_no_engine_and_no_picture() -> None:
    """Seconds on a cold disk: what --help does not need is not imported."""
    code = "import sys, eval.cli.main; print(*{'torch', 'transformers', 'datasets', 'matplotlib', 'scipy', 'pandas'}"
    ran = run("-c", f"{code} & set(sys.modules))", path=ROOT)
    assert (ran.returncode, ran.stdout) == (0, "\n"), ran.stderr


def test_an_installation_is_whole(checkout: Path, tmp_path: Path) -> None:
    """The wheel that pip installs: the page of the report, the examples, and a script that runs outside a checkout."""
    build = "from setuptools import build_meta; print(build_meta.build_wheel('../wheels'))"
    (tmp_path / "wheels").mkdir()
    built = run("-c", build, cwd=checkout)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(next((tmp_path / "wheels").glob(f"compare_q-{__version__}-*.whl"))) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(tmp_path / "installed")
    expected = [file for kind in ("eval", "backends") for file in (ROOT / kind).rglob("*") if file.is_file()]
    assert {str(file.relative_to(ROOT)) for file in expected if "__pycache__" not in file.parts} <= names
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["compare-q"]
    module, _, name = script.partition(":")
    start = f"import sys; sys.argv[0] = 'compare-q'; from {module} import {name}; sys.exit({name}())"
    ran = run("-c", start, "--help", cwd=tmp_path, path=tmp_path / "installed")
    assert (ran.returncode, ran.stdout.partition(" [")[0]) == (0, "usage: compare-q"), ran.stderr
    # An environment in the checkout of something else: that one's commit is not compare_q's.
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "other"]):
        subprocess.run([*git, *words], check=True)
    asked = f"import {module}; from eval.common import machine; print({module}.__file__, machine.commit())"
    ran = run("-c", asked, cwd=tmp_path, path=tmp_path / "installed")
    assert ran.stdout == f"{tmp_path / 'installed' / 'eval' / 'compare_q.py'} None\n"
