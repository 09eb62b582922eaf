"""Spec files: wildcards, several files, one label each, masks, the reference, and one line for what cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compare_q.eval.specs import reading
from compare_q.eval.specs.reading import (
    apply_mask,
    expand,
    load_data_specs,
    load_model_specs,
    one_reference,
    parse_model_spec,
)
from compare_q.eval.specs.types import ModelSpec
from tests.support.toy import refusal

MODEL = {"load_fn": "transformers", "model_dir": "m"}


def write(file: Path, content: Any) -> Path:
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def models(*labels: str, **keys: Any) -> list[ModelSpec]:
    return [parse_model_spec({**MODEL, "label": label, **keys}, Path("m.json")) for label in labels]


@pytest.mark.parametrize(
    ("entries", "gold"),
    [
        ([MODEL, {**MODEL, "label": "EXL3 4.0", "bits": 4}], "model 2 (EXL3 4.0): bits: unknown key"),
        ([{"load_fn": "transformers"}], "model 1: model_dir: missing"),
        ([MODEL, "text"], "model 2: "),
        ([MODEL, [MODEL]], "model 2: "),
        (5, "model 1: "),
        ([{**MODEL, "label": "two\nlines", "bits": 4}], "model 1"),
        ([], "holds no model"),
        ('{\n  "a": 1,\n  "b": x\n}', "line 3, column 8: not valid JSON"),
        ("", "line 1, column 1: not valid JSON"),
        ("[" * 100_000, "brackets are nested more than 64 deep"),
        ('{"label": "\\ud800"}', "no Unicode text: half of a surrogate pair"),
        ('{"override_bpw_head": NaN}', "nan is not a number in JSON"),
    ],
)
def test_refusals_name_file_number_and_label(tmp_path: Path, entries: Any, gold: str) -> None:
    file = write(tmp_path / "m.json", entries)
    assert refusal(load_model_specs, [file]).startswith(f"{file}: {gold}")


def test_unreadable_files(tmp_path: Path) -> None:
    assert refusal(load_data_specs, [tmp_path / "none.json"]) == f"{tmp_path / 'none.json'}: no such file"
    assert refusal(load_data_specs, [tmp_path]).startswith(f"{tmp_path}: cannot be read")
    (tmp_path / "latin.json").write_bytes(b'{"dataset": "\xe9"}')
    assert refusal(load_data_specs, [tmp_path / "latin.json"]).startswith(f"{tmp_path / 'latin.json'}: cannot be read")


def test_wildcards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("c.json", "a.json", "b.json", "x.txt"):
        write(tmp_path / name, [])
    names = [["*.json"], ["b.json", "*.json"], ["./c.json", "c.json", "[ab].json"], ["?.json", "none.json"]]
    gold = ["a b c", "b a c", "c a b", "a b c none"]
    assert [" ".join(file.stem for file in expand(patterns)) for patterns in names] == gold
    assert refusal(expand, ["a.json", "*.yaml"]) == "*.yaml: no file matches"
    assert expand(["*.json"])[0] == Path("a.json")


def test_duplicate_labels_are_told_apart_and_kept(tmp_path: Path) -> None:
    """Two files often hold one label; a label that looks like a number that was given is not given twice."""
    same = {**MODEL, "label": "same"}
    one = write(tmp_path / "a.json", [same, {**MODEL, "label": "same (2)"}])
    two = write(tmp_path / "b.json", [{**same, "model_dir": str(tmp_path)}, same])
    single = write(tmp_path / "d.json", {**MODEL, "label": "one"})
    found = load_model_specs([one, single, two])
    assert [spec.name for spec in found] == ["same", "same (2)", "one", "same (3)", "same (4)"]
    assert [spec.located for spec in found] == ["m", "m", "m", str(tmp_path), "m"]
    unlabelled, said = write(tmp_path / "c.json", [MODEL, {**MODEL, "load_fn": "exllamav3"}]), list[str]()
    assert [spec.name for spec in load_model_specs([unlabelled], say=said.append)] == ["m", "m (2)"]
    assert said == ["label: an earlier model is called m too; this one (exllamav3 m) is called m (2)"]


def test_the_first_of_several_marked_models_is_the_reference() -> None:
    plain, marked = models("a"), models("b", "c", reference=True)
    kept = models("d", out_logits="here")
    specs, (said,) = one_reference([*plain, *marked, *kept])
    assert [spec.is_reference for spec in specs] == [False, True, False, False]
    assert said == "b is the reference, as the first of 3 that are marked; not: c, d"
    assert one_reference([*plain, marked[0]]) == ([*plain, marked[0]], [])


@pytest.mark.parametrize(
    ("mask", "gold"),
    [(None, "012"), ("", "012"), ("exl", "02"), ("gguf;EXL2", "12"), (" gguf ; ", "1"), ("q4", "1")],
)
def test_mask(mask: str | None, gold: str) -> None:
    """An empty word matches nothing, or "gguf;" would choose every model."""
    labels = ["EXL3 4.0", "GGUF Q4_K_M", "exl2 4.0"]
    assert [spec.name for spec in apply_mask(models(*labels), mask)] == [labels[int(each)] for each in gold]


@pytest.mark.parametrize("chosen", ["mine.json", "", None])
def test_settings(chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Pythons of engines, from the file that the environment names, or from the user's configuration folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv(reading.SETTINGS, raising=False)
    if chosen is not None:
        monkeypatch.setenv(reading.SETTINGS, chosen and str(tmp_path / chosen))
    assert reading.load_settings().python == {}
    (tmp_path / "compare_q").mkdir()
    pythons = {"vllm_score": "/venv/bin/python", "exllamav3": "~/exl3"}
    write(tmp_path / (chosen or "compare_q/settings.json"), {"python": pythons})
    assert reading.load_settings().python == pythons
