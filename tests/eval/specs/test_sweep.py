"""One spec for several models: which rows a ``sweep`` makes, what they are called, and where errors say that it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.common.errors import InputError
from compare_q.eval.run import plan
from compare_q.eval.run.config import local_config
from compare_q.eval.specs.reading import load_model_specs, one_reference, specs_in
from compare_q.eval.specs.types import ModelSpec
from tests.support.toy import refusal

FILE = Path("m.json")
MODEL = {"load_fn": "fake", "model_dir": "m", "label": "W4A16", "engine": {"dtype": "bfloat16"}, "gpus": 1}


def rows(sweep: Any, **keys: Any) -> list[ModelSpec]:
    return specs_in(ModelSpec, {**MODEL, **keys, "sweep": sweep}, FILE)


def test_lists_are_multiplied_and_the_last_one_changes_fastest() -> None:
    found = rows({"engine.type_k": ["f16", "q8_0"], "engine.flash_attn": [True, None]})
    assert [(spec.name, spec.engine) for spec in found] == [
        ("W4A16 type_k=f16 flash_attn=true", {"dtype": "bfloat16", "type_k": "f16", "flash_attn": True}),
        ("W4A16 type_k=f16 flash_attn=null", {"dtype": "bfloat16", "type_k": "f16", "flash_attn": None}),
        ("W4A16 type_k=q8_0 flash_attn=true", {"dtype": "bfloat16", "type_k": "q8_0", "flash_attn": True}),
        ("W4A16 type_k=q8_0 flash_attn=null", {"dtype": "bfloat16", "type_k": "q8_0", "flash_attn": None}),
    ]
    assert {type(spec) for spec in found} == {ModelSpec}


def test_a_row_is_the_spec_that_would_have_been_written_without_a_sweep() -> None:
    """To its digest, which is part of the results."""
    (_, swept) = rows({"engine.kv_cache_dtype": ["auto", "fp8"]}, group="g")
    written = {**MODEL, "group": "g", "label": swept.name, "engine": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}}
    (alone,) = specs_in(ModelSpec, written, FILE)
    assert swept.model_dump() == alone.model_dump()
    assert swept.digest() == alone.digest()
    assert json.loads(swept.model_dump_json(exclude_unset=True)) == written


def test_keys_beside_engine_are_axes_too_and_lists_of_models_keep_their_order(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    bare = {"load_fn": "fake", "model_dir": "m"}
    file.write_text(json.dumps([{**bare, "sweep": {"revision": ["a", "b"]}}, {**bare, "label": "m revision=a"}]))
    found = load_model_specs([file])
    assert [(spec.name, spec.revision) for spec in found] == [
        ("m revision=a", "a"), ("m revision=b", "b"), ("m revision=a (2)", None)
    ]  # fmt: skip
    assert found[0]._folder == tmp_path


@pytest.mark.parametrize(
    ("sweep", "gold"),
    [
        (5, "sweep: input should be a valid dictionary"),
        ({"engine.x": 1}, "sweep.engine.x: input should be a valid list"),
        ({"engine.x": []}, "sweep.engine.x: list should have at least 1 item"),
        ({"engine.x": [1, 2, 1]}, "sweep.engine.x[2]: 1 "),
        ({"engine.x": [True, 1]}, ""),
        ({"engine.dtype": ["float16"]}, "sweep.engine.dtype: "),
        ({"gpus": [1, 2]}, "sweep.gpus: "),
        ({"replicas": [1, 0]}, "sweep.replicas[1]: input should be greater than 0"),
        ({"resources": [{}, {"h200": 0}]}, "sweep.resources[1].h200: input should be greater than 0"),
        ({"replica": [1]}, "sweep.replica: this key cannot have several values (did you mean 'replicas'?)"),
        ({"engine": [{}]}, 'sweep.engine: this key cannot have several values; name an option ("engine.NAME"), or'),
        ({"engine.": [1]}, "sweep.engine.: "),
        ({"model_dir": ["a"]}, "sweep.model_dir: "),
        ({"engine.x": list(range(17)), "engine.y": list(range(17))}, "sweep: gives 289 models; at most 256"),
    ],
)
def test_what_cannot_be_swept_is_one_line_with_the_key(sweep: Any, gold: str) -> None:
    if gold:
        assert refusal(rows, sweep).startswith(f"m.json: model 1 (W4A16): {gold}")
    else:
        assert len(rows(sweep)) == 2


def test_rows_are_compared_with_a_reference_of_their_own() -> None:
    reference = {**MODEL, "label": "bf16", "reference": True}
    specs, said = one_reference(specs_in(ModelSpec, [reference, {**MODEL, "sweep": {"engine.x": [1, 2]}}], FILE))
    assert [spec.is_reference for spec in specs] == [True, False, False]
    assert said == []


def problems_of(specs: list[ModelSpec]) -> list[str]:
    """What is wrong with these specs."""
    with pytest.raises(InputError) as refused:
        plan.plan_models(local_config(), specs, 100)
    return str(refused.value).splitlines()


def test_what_an_engine_refuses_is_said_once_with_file_and_key() -> None:
    """An option that the engine does not have, in two of four rows each, and one that stands outside of the sweep."""
    axes = {"engine.y": [4, 8], "engine.z": ["a", "b"]}
    specs = rows({"engine.x": [1, 2]}, engine={}) + rows(axes, engine={})
    problems = problems_of(specs)
    where = "m.json: model 1 (W4A16): sweep.engine."
    assert problems == [f"{where}{key}: unknown key" for key in ("x[0]", "x[1]", "y[0]", "y[1]")]
    first, second = problems_of(rows({"replicas": [1, 2]}))
    assert first == "W4A16 replicas=1: engine.dtype: unknown key"
    assert second == "W4A16 replicas=2: engine.dtype: unknown key"
