"""``check`` refuses what a run refuses before it loads a model, with the same messages; fast checks
come first.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from compare_q.backends.common import machine
from compare_q.backends.hf.transformers_engine import TransformersEngine
from compare_q.eval.text import text_windows
from tests.support.comparisons import fake
from tests.support.toy import FAKE, Run, Specs, in_transformers, needs_accelerate

TWO: list[dict[str, Any]] = [fake("ref", reference=True), fake("other")]


@pytest.mark.parametrize(
    ("models", "flags", "said"),
    [
        (
            [{**FAKE, "load_fn": "fkae"}],
            [],
            "fake: load_fn: unknown engine 'fkae' (did you mean 'fake'?)",
        ),
        (TWO, ["-o", "no/r.json"], "--output: no/r.json: cannot be written; there is no folder no"),
        (
            TWO,
            ["--plots", "data.json"],
            "--plots: data.json: is read here, or lies in a folder that is; name another",
        ),
        (
            TWO,
            ["--plots", "file/new"],
            "--plots: file/new: cannot be written; is the folder yours?",
        ),
        (
            TWO,
            ["--csv", "x", "--html", "x"],
            "--html: x: is the file of --csv as well; name another file",
        ),
        (TWO, ["-pf", "p.bmp"], "--plot_file: p.bmp: must end in .png, .svg, .pdf"),
        (
            TWO,
            ["--pair", "ref", "othr"],
            "--pair: no model is called 'othr' (did you mean 'other'?); there are: ref, ",
        ),
    ],
)
def test_what_a_run_refuses_is_refused_before_a_text_is_tokenized(
    compare_q: Run,
    write_specs: Specs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    models: list[dict[str, Any]],
    flags: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text_windows, "build", lambda *_, **__: pytest.fail("tokenized"))
    Path("file").touch()
    write_specs(models)
    words = ["-d", "data.json", "-m", "models.json", *flags]
    for ran in (compare_q("check", *words), compare_q(*words)):
        assert ran.status == 2
        assert f"error: {said}" in ran.err
        assert "downloaded" not in ran.out


@needs_accelerate
def test_a_check_starts_and_leaves_nothing(
    compare_q: Run,
    write_specs: Specs,
    toy_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TransformersEngine, "load", lambda self: pytest.fail("loaded"))
    data, models = write_specs([in_transformers(toy_model)])
    before = set(Path().iterdir())
    ran = compare_q(
        "check", "-d", data, "-m", models, "--plots", "a/b", "--tokens-out", "c", "-o", "d.json"
    )
    assert ran.status == 0, ran.err
    assert "toy: transformers (transformers " in ran.out
    assert set(Path().iterdir()) == before
    data, models = write_specs([in_transformers(Path("/nowhere/model"))], path="/nowhere/text.txt")
    ran = compare_q("check", "-d", data, "-m", models)
    assert ran.status == 2
    assert f"error: {data}: path: /nowhere/text.txt: no such file" in ran.err
    assert "error: toy: /nowhere/model: no such folder" in ran.err


@pytest.mark.parametrize(
    ("flags", "out", "err"),
    [
        (
            [],
            "windows of 100 every 100 tokens: 9 windows, 891 scored tokens, of a text of 1,000 "
            "tokens",
            "",
        ),
        (
            ["-m", "other.json"],
            "b: fake (built in), none",
            "no KL divergence: no model is the reference",
        ),
        # Without a plot, its flags do nothing.
        (["-v", "-mx", "8"], "9 windows", "-v, -mx"),
        (["-v", "-p"], "9 windows", ""),
    ],
)
def test_a_check(
    compare_q: Run,
    write_specs: Specs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    out: str,
    err: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text(json.dumps(fake("b")))
    data, spec = write_specs([fake("a")])
    ran = compare_q("check", "-d", data, "-m", spec, *flags)
    assert ran.status == 0, ran.err
    assert out in ran.out
    assert ran.err.startswith(err)
    assert err or "-v" not in ran.err


@needs_accelerate
def test_a_model_larger_than_the_memory_is_named_with_what_to_do(
    compare_q: Run, write_specs: Specs, toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (toy_model / "model.safetensors").stat().st_size
    models = [
        in_transformers(toy_model, reference=True),
        in_transformers(toy_model, label="streamed"),
    ]
    models[1]["engine"] = {"streaming": True}
    words = ("check", "-d", *write_specs(models)[:1], "-m", *write_specs(models)[1:])
    monkeypatch.setattr(machine, "memory_bytes", lambda: size)
    assert "does not fit" not in compare_q(*words).out
    monkeypatch.setattr(machine, "memory_bytes", lambda: size - 1)
    lines = [line for line in compare_q(*words).out.splitlines() if "does not fit" in line]
    assert len(lines) == 1
    assert lines[0].startswith("toy: ")
    assert "streaming" in lines[0]
    assert "reference pack" in lines[0]


@needs_accelerate
def test_a_check_names_a_tensor_that_the_files_lack(
    compare_q: Run, write_specs: Specs, toy_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "incomplete"
    shutil.copytree(toy_model, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    data, models = write_specs([in_transformers(folder)])
    ran = compare_q("check", "-d", data, "-m", models)
    assert ran.status == 1
    assert "model.layers.1.mlp.up_proj.weight" in ran.out
