"""The start of compare_q: in a checkout, as ``compare-q`` of an installation, and in a Python that
lacks packages.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from compare_q import __version__
from tests.support import ROOT

pytestmark = pytest.mark.engine


def run(
    *words: object, cwd: Path = ROOT, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    environment.pop("COMPARE_Q_COMMIT", None)
    environment.pop("PYTHONPATH", None)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env=environment
    )


def copy_checkout(folder: Path) -> Path:
    """Copy the code of a checkout, without an environment."""
    for name in ("compare_q", "eval", "backends"):
        shutil.copytree(
            ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in (
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        "Makefile",
        "compare_q_vllm.py",
    ):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_checkout(tmp_path / "copy")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders like the site-packages of ``pip install .`` ("wheel") and of ``pip install -e
    .`` ("editable").
    """
    folder = tmp_path_factory.mktemp("installed")
    checkout = copy_checkout(folder / "copy")
    sites = {}
    for kind in ("wheel", "editable"):
        (folder / kind).mkdir()
        build = (
            f"from setuptools import build_meta; build_meta.build_{kind}({str(folder / kind)!r})"
        )
        built = run("-c", build, cwd=checkout)
        assert built.returncode == 0, built.stderr
        with zipfile.ZipFile(next((folder / kind).glob(f"compare_q-{__version__}-*.whl"))) as wheel:
            wheel.extractall(folder / f"{kind}-site")
        sites[kind] = folder / f"{kind}-site"
    return sites


def test_a_python_without_the_packages_says_what_to_do(checkout: Path) -> None:
    """-S: without site-packages, like the system's Python next to an environment that make has
    created.
    """

    def refused(cwd: Path) -> str:
        ran = run(
            "-S", "-E", os.path.relpath(checkout / "eval" / "compare_q.py", cwd), "-d", "x", cwd=cwd
        )
        assert (ran.returncode, ran.stdout, len(ran.stderr.splitlines())) == (2, "", 1), ran.stderr
        return ran.stderr

    assert re.match(r"error: \w+ is not installed for ", refused(checkout))
    assert "'make -C copy demo' makes an environment" in refused(checkout.parent)
    (checkout / ".venv-cpu" / "bin").mkdir(parents=True)
    (checkout / ".venv-cpu" / "bin" / "python").touch()
    assert refused(checkout).endswith(
        ": run it with .venv-cpu/bin/python, or first 'source .venv-cpu/bin/activate'\n"
    )
    assert "run it with copy/.venv-cpu/bin/python, or" in refused(checkout.parent)


def test_the_version_is_the_checkouts() -> None:
    ran = run("eval/compare_q.py", "--version")
    assert (ran.returncode, ran.stdout) == (0, f"compare_q {__version__}\n")


def test_the_wheel_holds_everything_that_runs(installed: dict[str, Path]) -> None:
    """The wheel has every folder of eval and backends, the report's page, the examples and schemas,
    and no test.
    """
    expected = {"compare_q/__init__.py", "compare_q_vllm.py"}
    for file in (*(ROOT / "eval").rglob("*"), *(ROOT / "backends").rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            expected.add(str("compare_q" / file.relative_to(ROOT)))
    assert "compare_q/eval/report/page/report.html" in expected
    assert "compare_q/eval/spec/schema/data.schema.json" in expected
    assert "compare_q/backends/vllm/extension.py" in expected
    names = set()
    for file in installed["wheel"].rglob("*"):
        name = file.relative_to(installed["wheel"])
        if file.is_file() and not name.parts[0].endswith(".dist-info"):
            names.add(str(name))
    assert names == expected


def test_an_installation_runs_outside_a_checkout(
    installed: dict[str, Path], tmp_path: Path
) -> None:
    """The script starts, and the commit of a repository around the environment does not count as
    compare_q's.
    """
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["compare-q"]
    module, _, name = script.partition(":")
    start = (
        f"import sys; sys.argv[0] = 'compare-q'; from {module} import {name}; sys.exit({name}())"
    )
    site = tmp_path / "site"
    shutil.copytree(installed["wheel"], site)
    ran = run("-c", start, "--help", cwd=tmp_path, path=site)
    assert (ran.returncode, ran.stdout.partition(" what")[0]) == (0, "compare-q measures"), (
        ran.stderr
    )
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "other"]):
        subprocess.run([*git, *words], check=True)
    code = (
        f"import {module} as x; from compare_q.backends.common import machine; "
        "print(x.__file__, machine.commit())"
    )
    ran = run("-c", code, cwd=tmp_path, path=site)
    assert ran.stdout == f"{site / 'compare_q' / 'eval' / 'compare_q.py'} None\n"


WHAT_VLLM_IMPORTS = """
import importlib, site, sys, types

sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]
for name in [name for name in sys.modules if "editable" in name]:
    del sys.modules[name]
sys.path[:] = [sys.argv[1], *(entry for entry in sys.path if entry)]
site.addsitedir(sys.argv[1])
sys.modules["vllm"] = types.ModuleType("vllm")
sys.modules["vllm.platforms"] = platforms = types.ModuleType("vllm.platforms")
platforms.current_platform = types.SimpleNamespace(is_cpu=lambda: False)
platforms.PlatformEnum = None

from compare_q.backends.vllm.vllm_engine import EXTENSION

module, _, name = EXTENSION.rpartition(".")
extension = getattr(importlib.import_module(module), name)
print(extension.__name__, callable(extension.compare_q_install), sys.modules[module].__file__)
"""
"""Runs in a Python in which only the given folder contains compare_q, with a vLLM for GPUs."""


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_vllm_finds_the_worker_extension(
    installed: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    """Outside the checkout, vLLM finds the class that vllm_score names."""
    ran = run("-c", WHAT_VLLM_IMPORTS, installed[kind], cwd=tmp_path)
    # An editable installation imports the checkout that it was made from.
    sources = {
        "wheel": installed["wheel"] / "compare_q",
        "editable": installed["wheel"].parent / "copy",
    }
    extension = sources[kind] / "backends" / "vllm" / "extension.py"
    assert ran.stdout.splitlines() == [f"ScoringExtension True {extension}"], ran.stderr
