"""The identity of an installation: versions, commits, plugins; and the files that options name."""

from __future__ import annotations

import hashlib
import json
import re
import sys
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
    "read or fetch files, the same weights": "fastsafetensors instanttensor modelscope runai_model_streamer tensorizer",
    "find, start or name devices": "amdsmi cuda libtpu nvidia ray",
    "drive devices that compare_q has no engine for": "torch_npu torch_xla tpu_inference",
    "read images and sound": "detectron2 terratorch timm torchaudio torchvision",
    "read tokens and GGUF files, which no worker of Transformers does": "gguf mistral_common tiktoken",
    "train": "deepspeed smdistributed",
    "come with what is declared": "packaging scipy sympy typing_extensions urllib3 xxhash",
}


def same(name: str) -> str:
    """Return a distribution's name, normalized as in package indices."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("package", COMPUTES)
def test_whatever_an_engine_imports_where_it_is_installed_may_compute(package: str) -> None:
    """If a new version of an engine imports another package, this test fails: add the name to
    ``COMPUTING``.
    """
    root = packages.package_folder(package)
    if root is None:
        pytest.skip(f"{package} is not installed")
    provided = metadata.packages_distributions()
    files = {file for pattern in COMPUTES[package] for file in root.glob(pattern)} - {
        root / "integrations" / "integration_utils.py"  # for monitoring of training
    }
    contents = [file.read_bytes() for file in files]
    names = {
        name.decode() for each in IMPORTED for content in contents for name in each.findall(content)
    }
    lines = [
        line for line in metadata.requires(provided[package][0]) or () if "extra ==" not in line
    ]
    known = {same(re.split(r"[^\w.-]", line)[0]) for line in lines} | {
        same(name) for name in packages.COMPUTING
    }
    others = names - {*sys.stdlib_module_names, package, *" ".join(EXCUSED.values()).split()}
    called = {
        name: (name, DISTRIBUTIONS.get(name, name), *provided.get(name, ())) for name in others
    }
    assert {"torch", "flash_attn"} <= names
    assert [name for name in called if known.isdisjoint(map(same, called[name]))] == []


def test_a_version_that_was_built_here_counts_with_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that an installer writes differently each time do not count; of a build from an index,
    only the version.
    """
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    install(tmp_path, "peft", "9.1", url="file:///code", dir_info={})
    install(tmp_path, "apex", "9.2")

    def seen(code: str = "sha256=a", script: str = "sha256=s", note: str = "sha256=n") -> str:
        record = (
            f"peft/a.py,{code},1\npeft/__pycache__/a.pyc,,\n../../bin/peft,{script},1\n"
            f"peft-9.1.dist-info/direct_url.json,{note},1\npeft-9.1.dist-info/RECORD,,\n"
        )
        for name in ("peft-9.1", "apex-9.2"):
            (tmp_path / f"{name}.dist-info" / "RECORD").write_text(record)
        found = packages.computing()
        assert found["apex"] == "9.2"
        return found["peft"]

    assert seen() == "9.1 " + hashlib.sha256(b"peft/a.py,sha256=a,1").hexdigest()
    assert seen() == seen(script="sha256=t", note="sha256=o") != seen(code="sha256=b")


def test_options_that_name_files_count_with_their_content(tmp_path: Path) -> None:
    file, folder = tmp_path / "a.json", tmp_path / "draft"
    folder.mkdir()
    given = {
        "dtype": "auto",
        "config": {"paths": [str(file), str(tmp_path / "none")]},
        "model": str(folder),
    }
    written = {"offload_folder": str(folder)}
    assert engine_options.named_files({**written, "dtype": "auto"}) == {}
    seen = []
    for change in (
        lambda: file.write_text("1"),
        lambda: file.write_text("2"),
        lambda: (folder / "x").write_text(""),
        lambda: (folder / "x").rename(folder / "y"),
    ):
        change()
        seen.append(engine_options.named_files(given))
    assert [set(each) for each in seen] == [{str(file), str(folder)}] * 4
    assert len({repr(each) for each in seen}) == 4
    for number in range(engine_options.MOST_FILES + 1):
        (folder / str(number)).touch()
    assert "more than 1,000 files" in refusal(engine_options.named_files, given)


def test_words_of_an_engine_are_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """People who quantize have folders named fp8; these change no key, and paths of the current
    folder still count.
    """
    monkeypatch.chdir(tmp_path)
    words = ["fp8", "auto", "2", "bfloat16", "nvfp4"]
    for name in (*words, "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("1")
    (tmp_path / "rows.csv").write_text("1")
    chosen = {
        "kv_cache_dtype": "fp8",
        "dtype": "auto",
        "hf_overrides": {"torch_dtype": "bfloat16", "quantization_config": {"formats": ["nvfp4"]}},
    }
    assert engine_options.named_files(chosen) == {}
    named = {
        "table": "rows.csv",
        "speculative_config": {"model": "draft", "method": "fp8"},
        "places": ["./fp8"],
    }
    assert set(engine_options.named_files({**chosen, **named})) == {"rows.csv", "draft", "./fp8"}
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("OMP_PLACES", "auto")
    monkeypatch.setenv("OMP_TABLE_FILE", "draft")
    found = machine.variables(("OMP_",))
    assert (found["OMP_NUM_THREADS"], found["OMP_PLACES"]) == ("2", "auto")
    assert found["OMP_TABLE_FILE"] != "draft"  # with a digest of its content
