"""The identity of an installation: versions, commits, plugins; and the files that options name."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.common import engine_options, machine, packages
from tests.support.toy import refusal


def install(site: Path, name: str, version: str, entry_points: str = "", **url: Any) -> None:
    """Write the metadata that pip leaves in ``site`` for an installed distribution."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text(entry_points)
    if url:
        (folder / "direct_url.json").write_text(json.dumps(url))


IMPORTED = (
    re.compile(rb"\n *(?:from|import) ([a-z]\w*)(?:\.\w+)*(?: import \w| import \(| as |,|  #|\n)"),
    re.compile(rb'(?:find_spec|_has_module|_has_module_spec|import_module)\(\s*"([a-z]\w*)[".]'),
)
COMPUTES = {
    "vllm": (
        "_*.py",
        "compilation/**/*.py",
        "cute_utils/**/*.py",
        "ir/**/*.py",
        "kernels/**/*.py",
        "model_executor/**/*.py",
        "models/**/*.py",
        "platforms/*.py",
        "tilelang_utils/*.py",
        "triton_utils/*.py",
        "utils/*.py",
        "v1/attention/**/*.py",
    ),
    "transformers": (
        "modeling_*.py",
        "activations.py",
        "cache_utils.py",
        "core_model_loading.py",
        "pytorch_utils.py",
        "integrations/**/*.py",
        "quantizers/*.py",
        "models/*/modeling_*.py",
    ),
}
"""Package -> its files that compute, or that choose the code that computes."""
DISTRIBUTIONS = {
    "aiter": "amd-aiter",
    "auto_round_kernel": "auto-round-lib",
    "conch": "conch-triton-kernels",
    "cutlass": "nvidia-cutlass-dsl",
    "fla": "flash-linear-attention",
    "flash_attn_interface": "flash-attn-3",
    "flashinfer": "flashinfer-python",
    "flute": "flute-kernel",
    "hpc": "hpc-ops",
    "humming": "humming-kernels",
    "mori": "amd-mori",
    "quack": "quack-kernels",
    "quark": "amd-quark",
}
"""Module -> name of its distribution, if different."""
EXCUSED = {
    # They read or fetch files: the weights are the same.
    "fastsafetensors",
    "instanttensor",
    "modelscope",
    "runai_model_streamer",
    "tensorizer",
    # They find, start or name devices.
    "amdsmi",
    "cuda",
    "libtpu",
    "nvidia",
    "ray",
    # They drive devices that compare_q has no engine for.
    "torch_npu",
    "torch_xla",
    "tpu_inference",
    # They read images and sound.
    "detectron2",
    "terratorch",
    "timm",
    "torchaudio",
    "torchvision",
    # They read tokens and GGUF files, which no worker of Transformers does.
    "gguf",
    "mistral_common",
    "tiktoken",
    # They train.
    "deepspeed",
    "smdistributed",
    # They come with what is declared.
    "packaging",
    "scipy",
    "sympy",
    "typing_extensions",
    "urllib3",
    "xxhash",
}
"""Packages that engines import and that change no score."""


def normalized(name: str) -> str:
    """Return a distribution's name, normalized as in package indices."""
    return re.sub(r"[-_.]+", "-", name).lower()


def imported_packages(root: Path, package: str) -> set[str]:
    """Return the packages that the computing files of a package import."""
    names = set()
    for pattern in COMPUTES[package]:
        for file in root.glob(pattern):
            # It monitors training.
            if file == root / "integrations" / "integration_utils.py":
                continue
            content = file.read_bytes()
            for statement in IMPORTED:
                names.update(name.decode() for name in statement.findall(content))
    return names


def required_distributions(distribution: str) -> set[str]:
    """Return the distributions that a distribution requires without extras."""
    names = set()
    for line in metadata.requires(distribution) or ():
        if "extra ==" not in line:
            names.add(normalized(re.split(r"[^\w.-]", line)[0]))
    return names


@pytest.mark.parametrize("package", COMPUTES)
def test_whatever_an_engine_imports_where_it_is_installed_may_compute(package: str) -> None:
    """If a new version of an engine imports another package: add the name to ``COMPUTING``."""
    root = packages.package_folder(package)
    if root is None:
        pytest.skip(f"{package} is not installed")
    provided = metadata.packages_distributions()
    declared = required_distributions(provided[package][0])
    declared.update(normalized(name) for name in packages.COMPUTING)
    names = imported_packages(root, package)
    # Both engines import these: the patterns still find imports.
    assert {"torch", "flash_attn"} <= names
    undeclared = []
    for name in names - {*sys.stdlib_module_names, package} - EXCUSED:
        distributions = (name, DISTRIBUTIONS.get(name, name), *provided.get(name, ()))
        if declared.isdisjoint(map(normalized, distributions)):
            undeclared.append(name)
    assert undeclared == []


def test_a_version_that_was_built_here_counts_with_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that an installer writes differently each time do not count.

    Of a build from an index, only the version counts.
    """
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    install(tmp_path, "peft", "9.1", url="file:///code", dir_info={})
    install(tmp_path, "apex", "9.2")

    def build(code: str = "sha256=a", script: str = "sha256=s", note: str = "sha256=n") -> str:
        record = (
            f"peft/a.py,{code},1\npeft/__pycache__/a.pyc,,\n../../bin/peft,{script},1\n"
            f"peft-9.1.dist-info/direct_url.json,{note},1\npeft-9.1.dist-info/RECORD,,\n"
        )
        for name in ("peft-9.1", "apex-9.2"):
            (tmp_path / f"{name}.dist-info" / "RECORD").write_text(record)
        builds = packages.torch_related_builds()
        assert builds["apex"] == "9.2"
        return builds["peft"]

    assert build() == "9.1 " + hashlib.sha256(b"peft/a.py,sha256=a,1").hexdigest()
    assert build() == build(script="sha256=t", note="sha256=o")
    assert build() != build(code="sha256=b")


def test_what_is_installed_meanwhile_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook, a package may be installed or replaced between two runs."""
    monkeypatch.syspath_prepend(tmp_path)
    plugin = "[torch.backends]\nmade_up = made_up:load\n"
    names = ("made-up-kernels",)
    assert packages.installed_versions(names) == {}
    assert "made-up-kernels" not in packages.torch_related_builds()
    install(tmp_path, "made-up-kernels", "1", plugin)
    assert packages.installed_versions(names) == {"made-up-kernels": "1"}
    assert packages.torch_related_builds()["made-up-kernels"] == "1"
    shutil.rmtree(tmp_path / "made_up_kernels-1.dist-info")
    install(tmp_path, "made-up-kernels", "2", plugin)
    assert packages.installed_versions(names) == {"made-up-kernels": "2"}
    assert packages.torch_related_builds()["made-up-kernels"] == "2"


def test_options_that_name_files_count_with_their_content(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    folder = tmp_path / "draft"
    folder.mkdir()
    options = {
        "dtype": "auto",
        "config": {"paths": [str(file), str(tmp_path / "none")]},
        "model": str(folder),
    }
    output_options = {"offload_folder": str(folder)}
    assert engine_options.named_files({**output_options, "dtype": "auto"}) == {}
    changes: tuple[Callable[[], object], ...] = (
        lambda: file.write_text("1"),
        lambda: file.write_text("2"),
        lambda: (folder / "x").write_text(""),
        lambda: (folder / "x").rename(folder / "y"),
    )
    digests = set()
    for change in changes:
        change()
        files = engine_options.named_files(options)
        assert set(files) == {str(file), str(folder)}
        digests.add(tuple(files.values()))
    assert len(digests) == len(changes)


def test_a_folder_of_too_many_files_is_refused(tmp_path: Path) -> None:
    for number in range(engine_options.MOST_FILES + 1):
        (tmp_path / str(number)).touch()
    options = {"model": str(tmp_path)}
    assert "more than 1,000 files" in refusal(engine_options.named_files, options)


@pytest.fixture
def folders_like_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder in which values of options are also names of folders."""
    monkeypatch.chdir(tmp_path)
    for name in ("fp8", "auto", "2", "bfloat16", "nvfp4", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("1")
    (tmp_path / "rows.csv").write_text("1")


@pytest.mark.usefixtures("folders_like_words")
def test_words_of_an_engine_are_no_paths() -> None:
    """People who quantize have folders named fp8: they change no key, but paths still count."""
    words = {
        "kv_cache_dtype": "fp8",
        "dtype": "auto",
        "hf_overrides": {"torch_dtype": "bfloat16", "quantization_config": {"formats": ["nvfp4"]}},
    }
    assert engine_options.named_files(words) == {}
    paths = {
        "table": "rows.csv",
        "speculative_config": {"model": "draft", "method": "fp8"},
        "places": ["./fp8"],
    }
    assert set(engine_options.named_files({**words, **paths})) == {"rows.csv", "draft", "./fp8"}


@pytest.mark.usefixtures("folders_like_words")
def test_words_in_variables_are_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("OMP_PLACES", "auto")
    monkeypatch.setenv("OMP_TABLE_FILE", "draft")
    variables = machine.variables(("OMP_",))
    assert variables["OMP_NUM_THREADS"] == "2"
    assert variables["OMP_PLACES"] == "auto"
    # The value of a variable that names a path has a digest of the content.
    assert variables["OMP_TABLE_FILE"] != "draft"
