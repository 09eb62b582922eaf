"""Spec files: several files, unique labels, masks, sweeps, and errors of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.common.errors import InputError
from compare_q.eval.run import plan
from compare_q.eval.run.run_config import local_config
from compare_q.eval.specs import spec_files
from compare_q.eval.specs.spec_files import (
    apply_mask,
    load_data_specs,
    load_model_specs,
    matching,
    parse_model_spec,
    specs_in,
)
from compare_q.eval.specs.spec_types import ModelSpec
from tests.support.toy import refusal

MODEL = {"load_fn": "transformers", "model_dir": "m"}


def write(file: Path, content: Any) -> Path:
    if not isinstance(content, str):
        content = json.dumps(content)
    file.write_text(content)
    return file


def models(*labels: str, **keys: Any) -> list[ModelSpec]:
    return [parse_model_spec({**MODEL, "label": label, **keys}, Path("m.json")) for label in labels]


@pytest.mark.parametrize(
    ("entries", "gold"),
    [
        (
            [MODEL, {**MODEL, "label": "EXL3 4.0", "bits": 4}],
            "model 2 (EXL3 4.0): bits: unknown key",
        ),
        ([MODEL, [MODEL]], "model 2: "),
        ([{**MODEL, "label": "two\nlines", "bits": 4}], "model 1"),
        ([], "holds no model"),
        (
            {"models": [MODEL]},
            "model 1: models: unknown key (did you mean 'model_dir'?); it holds no key of a model",
        ),
        ("[null]", "model 1: must be a JSON object"),
        ([{**MODEL, "model_dir": 1}], "model 1: model_dir: input"),
        ('{\n  "a": 1,\n  "b": x\n}', "line 3, column 8: not valid JSON"),
    ],
)
def test_refusals_name_file_number_and_label(tmp_path: Path, entries: Any, gold: str) -> None:
    file = write(tmp_path / "m.json", entries)
    assert refusal(load_model_specs, [file]).startswith(f"{file}: {gold}")


def test_unreadable_files(tmp_path: Path) -> None:
    assert (
        refusal(load_data_specs, [tmp_path / "none.json"])
        == f"{tmp_path / 'none.json'}: no such file"
    )
    assert refusal(load_data_specs, [tmp_path]).startswith(f"{tmp_path}: cannot be read")
    # In Latin-1 é is one byte, which is not UTF-8.
    (tmp_path / "latin.json").write_bytes(b'{"dataset": "\xe9"}')
    assert refusal(load_data_specs, [tmp_path / "latin.json"]).startswith(
        f"{tmp_path / 'latin.json'}: cannot be read"
    )


def test_duplicate_labels_are_told_apart_and_kept(tmp_path: Path) -> None:
    """Two files often have the same label.  A number that a spec already has is left out."""
    same = {**MODEL, "label": "same"}
    one = write(tmp_path / "a.json", [same, {**MODEL, "label": "same (2)"}])
    two = write(tmp_path / "b.json", [{**same, "model_dir": str(tmp_path)}, same])
    single = write(tmp_path / "d.json", {**MODEL, "label": "one"})
    specs = load_model_specs([one, single, two])
    assert [spec.name for spec in specs] == ["same", "same (2)", "one", "same (3)", "same (4)"]
    assert [spec.located for spec in specs] == ["m", "m", "m", str(tmp_path), "m"]


def test_a_changed_label_is_reported(tmp_path: Path) -> None:
    file = write(tmp_path / "c.json", [MODEL, {**MODEL, "load_fn": "exllamav3"}])
    lines: list[str] = []
    specs = load_model_specs([file], say=lines.append)
    assert [spec.name for spec in specs] == ["m", "m (2)"]
    assert lines == [
        "label: an earlier model is called m too; this one (exllamav3 m) is called m (2)"
    ]


def test_a_mask_that_matches_nothing_is_refused_in_one_line() -> None:
    """The labels of results that are shown may have any characters."""
    assert refusal(matching, ["a\nb", "c"], "x").endswith("a\\nb, c")


@pytest.mark.parametrize(
    ("mask", "gold"), [(None, "012"), ("", "012"), ("gguf;EXL2", "12"), (" gguf ; ", "1")]
)
def test_mask(mask: str | None, gold: str) -> None:
    """An empty word matches nothing; otherwise "gguf;" would choose every model."""
    labels = ["EXL3 4.0", "GGUF Q4_K_M", "exl2 4.0"]
    specs = apply_mask(models(*labels), mask)
    assert "".join(str(labels.index(spec.name)) for spec in specs) == gold


def check_settings_of(file: Path) -> None:
    """Without this file the settings are empty; with it they are what it has."""
    assert spec_files.load_settings().python == {}
    pythons = {"vllm_score": "/venv/bin/python", "exllamav3": "~/exl3"}
    write(file, {"python": pythons})
    assert spec_files.load_settings().python == pythons


def test_settings_are_in_the_file_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv(spec_files.SETTINGS_VARIABLE, str(tmp_path / "mine.json"))
    check_settings_of(tmp_path / "mine.json")


@pytest.mark.parametrize("variable", ["", None])
def test_settings_are_in_the_configuration_folder(
    variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty variable is as one that is not set."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv(spec_files.SETTINGS_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(spec_files.SETTINGS_VARIABLE, variable)
    (tmp_path / "compare_q").mkdir()
    check_settings_of(tmp_path / "compare_q" / "settings.json")


FILE = Path("m.json")
SWEPT = {
    "load_fn": "fake",
    "model_dir": "m",
    "label": "W4A16",
    "engine": {"dtype": "bfloat16"},
    "gpus": 1,
}


def rows(sweep: Any, **keys: Any) -> list[ModelSpec]:
    return specs_in(ModelSpec, {**SWEPT, **keys, "sweep": sweep}, FILE)


def test_lists_are_multiplied_and_the_last_one_changes_fastest() -> None:
    specs = rows({"engine.type_k": ["f16", "q8_0"], "engine.flash_attn": [True, None]})
    assert [(spec.name, spec.engine) for spec in specs] == [
        (
            "W4A16 type_k=f16 flash_attn=true",
            {"dtype": "bfloat16", "type_k": "f16", "flash_attn": True},
        ),
        (
            "W4A16 type_k=f16 flash_attn=null",
            {"dtype": "bfloat16", "type_k": "f16", "flash_attn": None},
        ),
        (
            "W4A16 type_k=q8_0 flash_attn=true",
            {"dtype": "bfloat16", "type_k": "q8_0", "flash_attn": True},
        ),
        (
            "W4A16 type_k=q8_0 flash_attn=null",
            {"dtype": "bfloat16", "type_k": "q8_0", "flash_attn": None},
        ),
    ]
    assert {type(spec) for spec in specs} == {ModelSpec}


def test_a_row_is_the_spec_that_would_have_been_written_without_a_sweep() -> None:
    """Even the digest, which is part of the results, is the same."""
    (_, swept) = rows({"engine.kv_cache_dtype": ["auto", "fp8"]}, group="g")
    written = {
        **SWEPT,
        "group": "g",
        "label": swept.name,
        "engine": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    }
    (alone,) = specs_in(ModelSpec, written, FILE)
    assert swept.model_dump() == alone.model_dump()
    assert swept.digest() == alone.digest()
    assert json.loads(swept.model_dump_json(exclude_unset=True)) == written


def test_other_keys_are_axes_too_and_lists_of_models_keep_their_order(tmp_path: Path) -> None:
    bare = {"load_fn": "fake", "model_dir": "m"}
    swept = {**bare, "sweep": {"revision": ["a", "b"]}}
    # A label that the sweep makes, too.
    file = write(tmp_path / "m.json", [swept, {**bare, "label": "m revision=a"}])
    specs = load_model_specs([file])
    assert [(spec.name, spec.revision) for spec in specs] == [
        ("m revision=a", "a"),
        ("m revision=b", "b"),
        ("m revision=a (2)", None),
    ]
    assert specs[0]._folder == tmp_path


@pytest.mark.parametrize(
    ("sweep", "gold"),
    [
        ({"engine.x": 1}, "sweep.engine.x: input should be a valid list"),
        ({"engine.x": []}, "sweep.engine.x: list should have at least 1 item"),
        ({"engine.x": [1, 2, 1]}, "sweep.engine.x[2]: 1 "),
        # Python takes True for 1, but in JSON they are two values.
        ({"engine.x": [True, 1]}, ""),
        ({"engine.dtype": ["float16"]}, "sweep.engine.dtype: "),
        (
            {"resources": [{}, {"h200": 0}]},
            "sweep.resources[1].h200: input should be greater than 0",
        ),
        (
            {"replica": [1]},
            "sweep.replica: this key cannot have several values (did you mean 'replicas'?)",
        ),
        (
            {"streaming": [True]},
            "sweep.streaming: this key cannot have several values; "
            "an option of the engine is written",
        ),
        (
            {"engine": [{}]},
            'sweep.engine: this key cannot have several values; name an option ("engine.NAME"), or',
        ),
        (
            # 17 * 17 models: 16 * 16 are allowed.
            {"engine.x": list(range(17)), "engine.y": list(range(17))},
            "sweep: gives 289 models; at most 256",
        ),
    ],
)
def test_what_cannot_be_swept_is_one_line_with_the_key(sweep: Any, gold: str) -> None:
    if gold:
        assert refusal(rows, sweep).startswith(f"m.json: model 1 (W4A16): {gold}")
    else:
        assert len(rows(sweep)) == 2


def problems_of(specs: list[ModelSpec]) -> list[str]:
    with pytest.raises(InputError) as refused:
        plan.plan_models(local_config(), specs, 100)
    return str(refused.value).splitlines()


def test_what_an_engine_refuses_is_said_once_with_file_and_key() -> None:
    """Each value of an unknown option is reported once, even if two rows have it.

    An option outside of the sweep is reported for each row.
    """
    axes = {"engine.y": [4, 8], "engine.z": ["a", "b"]}
    specs = rows({"engine.x": [1, 2]}, engine={}) + rows(axes, engine={})
    problems = problems_of(specs)
    where = "m.json: model 1 (W4A16): sweep.engine."
    assert problems == [f"{where}{key}: unknown key" for key in ("x[0]", "x[1]", "y[0]", "y[1]")]
    first, second = problems_of(rows({"replicas": [1, 2]}))
    assert first.startswith("W4A16 replicas=1: engine.dtype: ")
    assert second.startswith("W4A16 replicas=2: engine.dtype: ")
