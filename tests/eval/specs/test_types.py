"""The JSON specs: every key of upstream's compare_q and of compare_q, and errors of one line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from compare_q.backends.hub import is_hub_id
from compare_q.eval.specs.spec_files import (
    load_data_specs,
    load_model_specs,
    parse_data_spec,
    parse_model_spec,
)
from compare_q.eval.specs.spec_types import DataSpec, ModelSpec, json_schemas
from tests.support.toy import refusal

DATA = {"tokenizer_dir": "t", "dataset": "wiki2", "eval_stride": 512, "eval_len": 2048}
CHAT = {"tokenizer_dir": "t", "dataset": "chat", "path": "a.jsonl", "eval_len": 2048}
SAMPLED = {"tokenizer_dir": "t", "dataset": "sampled", "path": "a.txt", "eval_len": 512}
MODEL = {"load_fn": "transformers", "model_dir": "m"}
VALUES: tuple[tuple[dict[str, Any], dict[str, list[Any]]], ...] = (
    (
        DATA,
        {
            "label": ["code", None],
            "tokenize_fn": ["transformers"],
            "tokenizer_dir": ["/some/folder", "org/model"],
            "tokenizer_revision": ["v1", None],
            "trust_remote_code": [True],
            "dataset": ["c4"],
            "revision": ["v1"],
            "dataset_path": ["org/data"],
            "dataset_name": ["en", None],
            "dataset_split": ["test", "train[:1000]"],
            "split": ["validation"],
            "dataset_data_files": ["a.jsonl", ["a.jsonl"], {"train": "a.jsonl"}],
            "text_column": ["sentence"],
            "max_text_rows": [0, 1000, None],
            "max_dataset_rows": [0],
            "eval_stride": [1],
            "eval_len": [2, 4096],
            "method": ["exllamav3"],
            "sample": ["first", "spread"],
            "detokenize": [None],
            "max_rows": [0, 1, None],
            "chat_template": [True, False],
            "dataset_display_name": ["WikiText-2"],
            "display_rows": [20, "all"],
            "display_eval_len": [2048, "2k"],
            "score_last": [None],
            "score_every": [None],
            # 2,048 tokens - 2,046 - 1 after the warm-up: one is scored.
            "warmup_tokens": [0, 2046],
        },
    ),
    (
        {**DATA, "eval_stride": None, "method": "once"},
        {"method": ["llamacpp", "lm_eval", "gptq", "once"]},
    ),
    (
        SAMPLED,
        {"seed": [0, 5], "max_rows": [3], "path": ["b.jsonl"], "text_column": ["body"]},
    ),
    (
        CHAT,
        {
            "score_roles": [["assistant"], ["user", "tool"]],
            "score_turns": ["all", "last"],
            "max_rows": [3],
            "long": ["truncate", "split", "skip"],
            "chat_template_kwargs": [{}, {"enable_thinking": False}],
            "path": ["b.parquet"],
            "max_text_rows": [3],
        },
    ),
    (
        MODEL,
        {
            "load_fn": ["exllamav3"],
            "fwd_fn": ["exllamav3", None],
            "label": ["EXL3 4.0 [h6]"],
            "group": ["NVFP4"],
            "model_dir": [
                "/m",
                ["/m", {"bits": 4}],
                ["/m", "extra.safetensors"],
                ["/m", ["a.safetensors"]],
            ],
            "revision": ["main"],
            "engine": [{}, {"max_model_len": 4096, "nested": {"a": [1]}}],
            "gpus": [0, 2, None],
            "python": ["../venv", None],
            "replicas": [1, 2],
            "resources": [{}, {"h200": 1, "fast_disk": 0.5}],
            "reference": [True, False],
            "noise_floor": [True],
            "out_logits": ["/logits"],
            "override_bpw_layer": [4, 4.25],
            "override_bpw_head": [6.0],
            "override_vram_bits": [31e9],
            "phase": ["prefill", "decode"],
            "repeat": ["second", None],
        },
    ),
    (
        {**MODEL, "phase": "decode"},
        {
            "step": [1, 4, 16],
            "batch": [1, 8, None],
        },
    ),
    (
        {**DATA, "score_every": 512, "score_last": 16},
        {"score_every": [17, 2048], "score_last": [1, 511]},
    ),
)
"""Keys of a spec, and allowed values of further keys in this spec."""
REFUSED: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    (DATA, {"evallen": 5}, "evallen: unknown key (did you mean 'eval_len'?)"),
    (DATA, {"phase": "decode"}, "phase: unknown key; it is a key of model specs"),
    (MODEL, {"engine": {"hf_token": "x"}}, "engine.hf_token: holds a secret"),
    (
        MODEL,
        {"model_dir": ["/m", {"extra": [{"api_key": "x"}]}]},
        "model_dir.1.extra.0.api_key: holds a secret",
    ),
    (MODEL, {"eval_len": 64}, "eval_len: unknown key; it is a key of data specs"),
    (
        DATA,
        {"streaming": True},
        'streaming: unknown key; it is an option of transformers, and belongs in "engine"',
    ),
    (
        {**MODEL, "load_fn": "transformers_auto"},
        {"streaming": True},
        "streaming: unknown key; it is an option of the engine, "
        'and belongs in "engine": {"streaming": ...}',
    ),
    (
        {**MODEL, "load_fn": "llamacpp"},
        {"type_k": "q8_0"},
        "type_k: unknown key; it is an option of the engine, "
        'and belongs in "engine": {"type_k": ...}',
    ),
    (
        {**MODEL, "load_fn": "vllm_server"},
        {"n_threads": 1},
        'n_threads: unknown key; it is an option of llamacpp, in "engine", '
        "and vllm_server does not have it",
    ),
    (
        {**MODEL, "load_fn": "unknown"},
        {"streaming": True},
        'streaming: unknown key; it is an option of transformers, and belongs in "engine"',
    ),
    (
        {**MODEL, "load_fn": "llamacpp"},
        {"engine": {"reference": True}},
        'engine.reference: is a key of the model spec; write it next to "engine"',
    ),
    (
        {**MODEL, "load_fn": "transformers"},
        {"engine": {"phase": "decode"}},
        "engine.phase: is a key of the model",
    ),
    (
        {**MODEL, "load_fn": "pack"},
        {"engine": {"eval_len": 64}},
        "engine.eval_len: is a key of data specs",
    ),
    (
        {**MODEL, "load_fn": "transformers"},
        {"model_dir": ["/m", {"python": "x"}]},
        "engine.python: is a key of the",
    ),
    (DATA, {"eval\nlen": 5}, ""),
    (DATA, {"eval_len": "2048"}, "eval_len: "),
    # For Python, True is an integer.
    (DATA, {"eval_len": True}, "eval_len: "),
    (DATA, {"chat_template": 1}, "chat_template: "),
    (DATA, {"display_rows": True}, "display_rows"),
    (DATA, {"warmup_tokens": 2047}, "warmup_tokens: 2047 leaves nothing of eval_len 2048"),
    (DATA, {"score_last": 5}, "score_every: missing; score_last needs it"),
    (DATA, {"score_every": 5, "score_last": 5}, "score_last: must be below score_every 5"),
    (
        DATA,
        {"score_every": 9, "score_last": 5, "warmup_tokens": 1},
        "score_every: cannot go with warmup_tokens",
    ),
    (
        DATA,
        {"score_every": 9, "score_last": 5, "method": "once"},
        'score_every: cannot go with method "once"',
    ),
    (MODEL, {"step": 4}, 'step: only with "phase": "decode"'),
    (DATA, {"method": "llama.cpp"}, "method: "),
    (DATA, {"eval_stride": None}, "eval_stride: missing"),
    (
        DATA,
        {"method": "gptq"},
        'eval_stride: with method "gptq" windows follow one another; leave it out',
    ),
    (
        DATA,
        {"method": "gptq", "eval_stride": None, "chat_template": True},
        "chat_template: cannot go with method",
    ),
    *(
        (
            DATA,
            {"method": name, "eval_stride": None, "warmup_tokens": 1},
            "warmup_tokens: cannot go with method",
        )
        for name in ("llamacpp", "lm_eval", "gptq", "once")
    ),
    # Without an overlap, the first token of each window would never be scored.
    (
        DATA,
        {"method": "once", "eval_stride": 2048},
        'eval_stride: must be below eval_len with method "once"',
    ),
    # The second half of two tokens has no position that is scored.
    (
        DATA,
        {"method": "llamacpp", "eval_len": 2, "eval_stride": None},
        "eval_len: must be at least 3 with method",
    ),
    (DATA, {"detokenize": "wikitext"}, "detokenize: rewrites documents, which only method"),
    (DATA, {"dataset": "text"}, "path: missing"),
    (DATA, {"path": "a.txt"}, "path: only with dataset"),
    (DATA, {"long": "skip"}, 'long: only with dataset "chat"'),
    (DATA, {"task": "x"}, "task: compare_q scores no tasks"),
    (
        CHAT,
        {"path": None},
        'path: dataset "chat" needs either path, a .jsonl or .parquet file, or dataset_path',
    ),
    (CHAT, {"eval_stride": 512}, "eval_stride: cannot go with"),
    (CHAT, {"score_roles": []}, "score_roles: "),
    (
        CHAT,
        {"chat_template_kwargs": {"a": 1, "tools": []}},
        "chat_template_kwargs: tools is not yours to set",
    ),
    (DATA, {"dataset": "lm_eval"}, "dataset: compare_q scores no tasks"),
    (MODEL, {"model_dir": ["m"]}, "model_dir: must be a string"),
    (MODEL, {"model_dir": ["m", {}, {}]}, "model_dir: must be a string"),
    (MODEL, {"model_dir": [5, {}]}, "model_dir: must be a string"),
    (MODEL, {"model_dir": ["m", 5]}, "model_dir: the second item"),
    (MODEL, {"model_dir": ["m", []]}, "model_dir: the second item"),
    (MODEL, {"model_dir": ["m", ["a", 5]]}, "model_dir: the second item"),
    (MODEL, {"model_dir": ["m", {"bits": 4}], "engine": {"bits": 4}}, "model_dir: option 'bits' "),
    (MODEL, {"phase": "both"}, "phase: input should be 'prefill' or 'decode'"),
    (MODEL, {"phase": "decode", "step": 17}, "step: input should be "),
    (MODEL, {"step": 1}, 'step: only with "phase": "decode"'),
    (MODEL, {"model_dir": ""}, "model_dir: is empty; give a folder, a file or a hub id"),
    (MODEL, {"label": " "}, "label: must be one line of printable text"),
    (MODEL, {"override_bpw_layer": "4.0"}, "override_bpw_layer: "),
    (MODEL, {"override_bpw_layer": True}, "override_bpw_layer: "),
    (MODEL, {"override_bpw_layer": -4.0}, "override_bpw_layer: "),
    # Control characters would change what a terminal shows.
    (MODEL, {"model_dir": "a\nb"}, "model_dir: must be one line of printable text"),
    (MODEL, {"model_dir": "a\x1b[2J"}, "model_dir: must be one line of printable text"),
    (MODEL, {"model_dir": "a\u202eb"}, "model_dir: must be one line of printable text"),
    (MODEL, {"model_dir": "a\x00b"}, "model_dir: must be one line of printable text"),
)
"""Keys of a spec, the changed keys, and the beginning of the refusal."""


def spec_of(keys: dict[str, Any]) -> DataSpec | ModelSpec:
    if "dataset" in keys:
        return parse_data_spec(keys, Path("s.json"))
    return parse_model_spec(keys, Path("s.json"))


SCHEMAS = json_schemas()


def schema_of(keys: dict[str, Any]) -> Any:
    """Return the validator of the schema of the spec that has these keys."""
    name = "models.schema.json"
    if "dataset" in keys:
        name = "data.schema.json"
    return jsonschema.Draft202012Validator(SCHEMAS[name])


def check_value(keys: dict[str, Any], key: str, value: Any) -> None:
    """A value changes the digest, except the default value of a key that was added later."""
    changed = {**keys, key: value}
    spec = spec_of(changed)
    assert getattr(spec, key) == value
    schema_of(keys).validate({"$schema": "s", **changed})
    schema_of(keys).validate([keys, changed])
    assert spec.digest() == spec_of({"$schema": "s", **changed}).digest()
    default = type(spec).model_fields[key].get_default(call_default_factory=True)
    has_same_digest = spec.digest() == spec_of(keys).digest()
    assert has_same_digest == (value == keys.get(key, default))


def test_every_key_is_taken_by_the_parser_and_the_schema() -> None:
    data_keys: set[str] = set()
    model_keys: set[str] = set()
    for keys, values in VALUES:
        for key, choices in values.items():
            for value in choices:
                check_value(keys, key, value)
        if "dataset" in keys:
            data_keys |= values.keys()
        else:
            model_keys |= values.keys()
    # A pack needs a folder, which tests/eval/cli/test_pack.py has.
    assert data_keys == set(DataSpec.model_fields) - {"pack"}
    assert model_keys == set(ModelSpec.model_fields)
    schema_of(DATA).validate({"pack": "p", "max_rows": 4})


@pytest.mark.parametrize(("keys", "changes", "gold"), REFUSED)
def test_refusals(keys: dict[str, Any], changes: dict[str, Any], gold: str) -> None:
    assert refusal(spec_of, {**keys, **changes}).startswith(f"s.json: {gold}")


def test_a_model_that_is_a_file_may_have_a_path_in_parser_and_schema() -> None:
    keys = {"load_fn": "scores_file", "path": "s.jsonl"}
    schema_of(keys).validate(keys)
    spec = spec_of(keys)
    assert spec.model_dir == "s.jsonl"
    assert spec.digest() == spec_of({"load_fn": "scores_file", "model_dir": "s.jsonl"}).digest()
    assert not schema_of(keys).is_valid({**keys, "model_dir": "s.jsonl"})
    assert not schema_of(keys).is_valid({"load_fn": "scores_file"})


def test_schemas_refuse_what_the_parser_refuses() -> None:
    faults = (
        (DATA, "evallen", 5),
        (DATA, "eval_len", "2048"),
        (DATA, "eval_len", 1),
        (DATA, "max_rows", -1),
        (DATA, "dataset", None),
        (MODEL, "bits", 4),
        (MODEL, "model_dir", 5),
    )
    for keys, name, value in faults:
        assert not schema_of(keys).is_valid([keys, {**keys, name: value}]), name
    for keys, name in ((DATA, "eval_len"), (MODEL, "model_dir")):
        others = {key: value for key, value in keys.items() if key != name}
        assert not schema_of(keys).is_valid(others), name


LATER = {
    DataSpec: "method sample detokenize label score_last score_every score_roles score_turns long "
    "chat_template_kwargs pack seed",
    ModelSpec: "noise_floor group python gpus replicas resources phase step batch repeat",
}


def test_digests_are_those_from_before_later_keys() -> None:
    """The digest is that of canonical JSON with all original keys."""
    for spec in (spec_of(DATA), spec_of(MODEL)):
        later = set(LATER[type(spec)].split())
        keys = spec.model_dump()
        original = {key: keys[key] for key in keys.keys() - later}
        assert len(original) == len(keys) - len(later)
        canonical = json.dumps(original, sort_keys=True).encode()
        assert spec.digest() == hashlib.sha256(canonical).hexdigest()


@pytest.mark.parametrize(
    ("model_dir", "options", "files"),
    [
        ("m", {"a": 1}, []),
        (["m", {"b": 2}], {"a": 1, "b": 2}, []),
        (["m", ["x.st", "y.st"]], {"a": 1}, ["x.st", "y.st"]),
    ],
)
def test_model_dir_forms(model_dir: Any, options: dict[str, int], files: list[str]) -> None:
    spec = parse_model_spec({**MODEL, "model_dir": model_dir, "engine": {"a": 1}}, Path("m.json"))
    assert (spec.located, spec.name, spec.options) == ("m", "m", options)
    assert spec.override_tensors == tuple(Path(name) for name in files)


def test_relative_paths_start_at_the_spec_then_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One folder is in both places, one only next to the spec, one only in the working folder."""
    spec_folder = tmp_path / "specs"
    work_folder = tmp_path / "work"
    for folder in (spec_folder / "both", spec_folder / "in_specs"):
        folder.mkdir(parents=True)
    for folder in (work_folder / "both", work_folder / "in_work"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(work_folder)
    gold = {
        "both": spec_folder / "both",
        "in_specs": spec_folder / "in_specs",
        "in_work": Path("in_work"),
        "org/model": Path("org/model"),
        str(work_folder / "both"): work_folder / "both",
    }
    data_file = spec_folder / "d.json"
    model_file = spec_folder / "m.json"
    for name, folder in gold.items():
        keys = {**DATA, "dataset": "text", "tokenizer_dir": name, "path": name}
        data_file.write_text(json.dumps(keys))
        (spec,) = load_data_specs([data_file])
        assert spec.locate(spec.tokenizer_dir) == spec.locate(spec.path or "") == str(folder)
        model_file.write_text(json.dumps({**MODEL, "model_dir": [name, [name]]}))
        (model,) = load_model_specs([model_file])
        assert (model.located, model.override_tensors) == (str(folder), (folder,))
    monkeypatch.setenv("HOME", str(work_folder))
    assert spec.locate("~/both") == str(work_folder / "both")
    # The name of a missing folder must not become a hub id.
    for name in ("./models/llama", "models/../models/llama", "../llama"):
        assert not is_hub_id(spec.locate(name))


def test_digest_follows_what_the_spec_says_not_how() -> None:
    one = '{"load_fn": "f", "model_dir": "m", "engine": {"a": 1, "b": {"c": 2, "d": 3}}}'
    same = '{"engine":{"b":{"d":3,"c":2},"a":1},\n\n "model_dir":"m","load_fn":"f"}'
    other = one.replace("3", "4")
    digests = []
    for text in (one, same, other):
        digests.append(parse_model_spec(json.loads(text), Path("m.json")).digest())
    assert digests[0] == digests[1] != digests[2]


def test_digest_does_not_follow_the_file() -> None:
    one = parse_data_spec(DATA, Path("a/d.json"))
    other = parse_data_spec(DATA, Path("b/e.json"))
    assert one.digest() == other.digest()
