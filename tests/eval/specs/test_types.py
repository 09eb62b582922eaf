"""The JSON specs: every key of upstream's compare_q and of compare_q, and one line with file and
key for errors.
"""

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
            "warmup_tokens": [0, 2046],  # 2,048 tokens - 2,046 - 1 after the warm-up: one is scored
        },
    ),
    (
        {**DATA, "eval_stride": None, "method": "once"},
        {"method": ["llamacpp", "lm_eval", "gptq", "once"]},
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
        'streaming: unknown key; it is an option of the engine, and belongs in "engine": {"streaming": ...}',
    ),
    (
        {**MODEL, "load_fn": "llamacpp"},
        {"type_k": "q8_0"},
        'type_k: unknown key; it is an option of the engine, and belongs in "engine": {"type_k": ...}',
    ),
    (
        {**MODEL, "load_fn": "vllm_server"},
        {"n_threads": 1},
        'n_threads: unknown key; it is an option of llamacpp, in "engine", and vllm_server does not have it',
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
    (
        DATA,
        {"method": "once", "eval_stride": 2048},
        'eval_stride: must be below eval_len with method "once"',
    ),
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
    *(
        (MODEL, {"model_dir": given}, "model_dir: must be a string")
        for given in (["m"], ["m", {}, {}], [5, {}])
    ),
    *(
        (MODEL, {"model_dir": ["m", given]}, "model_dir: the second item")
        for given in (5, [], ["a", 5])
    ),
    (MODEL, {"model_dir": ["m", {"bits": 4}], "engine": {"bits": 4}}, "model_dir: option 'bits' "),
    (MODEL, {"phase": "both"}, "phase: input should be 'prefill' or 'decode'"),
    (MODEL, {"phase": "decode", "step": 17}, "step: input should be "),
    (MODEL, {"step": 1}, 'step: only with "phase": "decode"'),
    (MODEL, {"model_dir": ""}, "model_dir: is empty; give a folder, a file or a hub id"),
    (MODEL, {"label": " "}, "label: must be one line of printable text"),
    *(
        (MODEL, {"override_bpw_layer": given}, "override_bpw_layer: ")
        for given in ("4.0", True, -4.0)
    ),
    *(
        (MODEL, {"model_dir": name}, "model_dir: must be one line of printable text")
        for name in ("a\nb", "a\x1b[2J", "a\u202eb", "a\x00b")
    ),
)
"""Keys of a spec, the changed keys, and the beginning of the refusal."""


def spec_of(keys: dict[str, Any]) -> DataSpec | ModelSpec:
    return (parse_data_spec if "dataset" in keys else parse_model_spec)(keys, Path("s.json"))


def test_every_key_is_taken_by_the_parser_and_the_schema() -> None:
    """A value changes the digest, except the default value of a key that was added later."""
    schemas = [jsonschema.Draft202012Validator(schema) for schema in json_schemas().values()]
    known: dict[bool, set[str]] = {True: set(), False: set()}
    for keys, values in VALUES:
        for key, value in ((key, value) for key, choices in values.items() for value in choices):
            spec = spec_of({**keys, key: value})
            assert getattr(spec, key) == value
            schema, same = schemas["dataset" not in keys], spec.digest() == spec_of(keys).digest()
            schema.validate({"$schema": "s", **keys, key: value})
            schema.validate([keys, {**keys, key: value}])
            assert spec.digest() == spec_of({"$schema": "s", **keys, key: value}).digest()
            default = type(spec).model_fields[key].get_default(call_default_factory=True)
            assert same == (value == keys.get(key, default))
        known["dataset" in keys] |= values.keys()
    with_a_pack = {"pack"}  # needs a folder, which tests/eval/cli/test_pack.py has
    assert known == {
        True: set(DataSpec.model_fields) - with_a_pack,
        False: set(ModelSpec.model_fields),
    }
    schemas[0].validate({"pack": "p", "max_rows": 4})


@pytest.mark.parametrize(("keys", "changes", "gold"), REFUSED)
def test_refusals(keys: dict[str, Any], changes: dict[str, Any], gold: str) -> None:
    assert refusal(spec_of, {**keys, **changes}).startswith(f"s.json: {gold}")


def test_schemas_refuse_what_the_parser_refuses() -> None:
    schemas = [jsonschema.Draft202012Validator(schema) for schema in json_schemas().values()]
    faults = (
        (DATA, "evallen", 5),
        (DATA, "eval_len", "2048"),
        (DATA, "eval_len", 1),
        (DATA, "max_rows", -1),
    )
    for keys, name, value in (
        *faults,
        (DATA, "dataset", None),
        (MODEL, "bits", 4),
        (MODEL, "model_dir", 5),
    ):
        assert not schemas["dataset" not in keys].is_valid([keys, {**keys, name: value}]), name
    for keys, name in ((DATA, "eval_len"), (MODEL, "model_dir")):
        assert not schemas["dataset" not in keys].is_valid(
            {key: keys[key] for key in keys if key != name}
        ), name


LATER = {
    DataSpec: "method sample detokenize label score_last score_every score_roles score_turns long chat_template_kwargs "
    "pack",
    ModelSpec: "noise_floor group python gpus replicas resources phase step batch repeat",
}


def test_digests_are_those_from_before_later_keys() -> None:
    """The digest is that of canonical JSON with all original keys."""
    for spec in (spec_of(DATA), spec_of(MODEL)):
        later, keys = LATER[type(spec)].split(), spec.model_dump()
        then = {key: keys[key] for key in keys.keys() - set(later)}
        assert len(then) == len(keys) - len(later)
        assert (
            spec.digest() == hashlib.sha256(json.dumps(then, sort_keys=True).encode()).hexdigest()
        )


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
    """``both`` is in both folders, ``near`` only next to the spec, ``here`` only in the working
    directory.
    """
    near, here = tmp_path / "specs", tmp_path / "work"
    for folder in (near / "both", near / "near", here / "both", here / "here"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    gold = {
        "both": near / "both",
        "near": near / "near",
        "here": Path("here"),
        "org/model": Path("org/model"),
    }
    gold[str(here / "both")] = here / "both"
    for name, folder in gold.items():
        (near / "d.json").write_text(
            json.dumps({**DATA, "dataset": "text", "tokenizer_dir": name, "path": name})
        )
        (spec,) = load_data_specs([near / "d.json"])
        assert spec.locate(spec.tokenizer_dir) == spec.locate(spec.path or "") == str(folder)
        (near / "m.json").write_text(json.dumps({**MODEL, "model_dir": [name, [name]]}))
        (model,) = load_model_specs([near / "m.json"])
        assert (model.located, model.override_tensors) == (str(folder), (folder,))
    monkeypatch.setenv("HOME", str(here))
    assert spec.locate("~/both") == str(here / "both")
    for missing in (
        "./models/llama",
        "models/../models/llama",
        "../llama",
    ):  # none becomes a hub id
        assert not is_hub_id(spec.locate(missing))


def test_digest_follows_what_the_spec_says_not_how() -> None:
    one = '{"load_fn": "f", "model_dir": "m", "engine": {"a": 1, "b": {"c": 2, "d": 3}}}'
    same = '{"engine":{"b":{"d":3,"c":2},"a":1},\n\n "model_dir":"m","load_fn":"f"}'
    other = one.replace("3", "4")
    digests = [
        parse_model_spec(json.loads(text), Path("m.json")).digest() for text in (one, same, other)
    ]
    assert digests[0] == digests[1] != digests[2]
    assert (
        parse_data_spec(DATA, Path("a/d.json")).digest()
        == parse_data_spec(DATA, Path("b/e.json")).digest()
    )
