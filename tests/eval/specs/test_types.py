"""The JSON specs: every key of upstream's and ours, and one line that names file and key for everything else."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from compare_q.backends.hub import is_hub_id
from compare_q.eval.specs.reading import load_data_specs, load_model_specs, parse_data_spec, parse_model_spec
from compare_q.eval.specs.types import ONLY_WITH, DataSpec, ModelSpec, json_schemas
from tests.support.toy import refusal

DATA = {"tokenizer_dir": "t", "dataset": "wiki2", "eval_stride": 512, "eval_len": 2048}
MODEL = {"load_fn": "transformers", "model_dir": "m"}

DATA_VALUES: dict[str, list[Any]] = {
    "label": ["code", None],
    "tokenize_fn": ["transformers"], "tokenizer_dir": ["/some/folder", "org/model"], "tokenizer_revision": ["v1", None],
    "trust_remote_code": [True], "dataset": ["c4", "org/data"], "revision": ["v1"], "dataset_path": ["org/data"],
    "dataset_name": ["en", None], "dataset_split": ["test", "train[:1000]"], "split": ["validation"],
    "dataset_data_files": ["a.jsonl", ["a.jsonl", "b.jsonl"], {"train": "a.jsonl"}], "text_column": ["sentence"],
    "max_text_rows": [0, 1000, None], "max_dataset_rows": [0, 1000], "eval_stride": [1, 4096], "eval_len": [2, 4096],
    "method": ["exllamav3", "llamacpp", "lm_eval", "gptq", "once"],
    "detokenize": [None], "max_rows": [0, 1, None], "chat_template": [True, False],
    "warmup_tokens": [0, 2046],  # 2,048 tokens less 2,046 less the one after the warm-up: one is scored
    "dataset_display_name": ["WikiText-2"], "display_rows": [20, "all"], "display_eval_len": [2048, "2k"],
}  # fmt: skip
CHAT = {"tokenizer_dir": "t", "dataset": "chat", "path": "a.jsonl", "eval_len": 2048}
CHAT_VALUES: dict[str, list[Any]] = {
    "score_roles": [["assistant"], ["user", "tool"]], "score_turns": ["all", "last"],
    "long": ["truncate", "split", "skip"], "chat_template_kwargs": [{}, {"enable_thinking": False}],
    "text_column": ["talk"], "max_rows": [3], "max_text_rows": [3],
}  # fmt: skip
ANSWERS = {"tokenizer_dir": "t", "dataset": "lm_eval", "task": "arc_easy", "eval_len": 2048}
ANSWERS_VALUES: dict[str, list[Any]] = {
    "task": ["mine.yaml"], "include_path": ["tasks", None], "num_fewshot": [0, 5, None], "max_rows": [100],
}  # fmt: skip
MODEL_VALUES: dict[str, list[Any]] = {
    "load_fn": ["exllamav3"],
    "fwd_fn": ["exllamav3", None],
    "label": ["EXL3 4.0 [h6]"],
    "group": ["NVFP4"],
    "model_dir": ["/m", ["/m", {"bits": 4}], ["/m", "extra.safetensors"], ["/m", ["a.safetensors", "b.safetensors"]]],
    "revision": ["main"],
    "engine": [{}, {"max_model_len": 4096, "nested": {"a": [1]}}],
    "python": ["/venv/bin/python", "../venv", None],
    "gpus": [0, 2, None],
    "replicas": [1, 2],
    "resources": [{}, {"h200": 1, "fast_disk": 0.5}],
    "reference": [True, False],
    "noise_floor": [True, False],
    "out_logits": ["/logits"],
    "override_bpw_layer": [4, 4.25],
    "override_bpw_head": [6.0],
    "override_vram_bits": [31e9],
}


def cases(values: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(key, value) for key, choices in values.items() for value in choices]


def write(file: Path, content: Any) -> Path:
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


def models(*labels: str) -> list[ModelSpec]:
    return [parse_model_spec({**MODEL, "label": label}, Path("m.json")) for label in labels]


@pytest.mark.parametrize(("key", "value"), cases(DATA_VALUES))
def test_data_key(key: str, value: Any) -> None:
    free = {"eval_stride": None} if key == "method" and value != "exllamav3" else {}
    spec = parse_data_spec({**DATA, **free, key: value}, Path("d.json"))
    assert getattr(spec, key) == value


@pytest.mark.parametrize(("key", "value"), cases(CHAT_VALUES))
def test_key_of_conversations(key: str, value: Any) -> None:
    spec = parse_data_spec({**CHAT, key: value}, Path("d.json"))
    assert getattr(spec, key) == value
    same = spec.digest() == parse_data_spec(CHAT, Path("d.json")).digest()
    assert same == (value == DataSpec.model_fields[key].get_default(call_default_factory=True))


@pytest.mark.parametrize(
    ("keys", "gold"),
    [
        ({"path": None}, 'd.json: path: dataset "chat" needs either path, a .jsonl or .parquet file, or dataset_path'),
        ({"dataset_path": "org/data"}, 'd.json: path: dataset "chat" needs either path, '),
        ({"method": "once"}, 'd.json: method: cannot go with dataset "chat"; leave it out'),
        ({"eval_stride": 512}, 'd.json: eval_stride: cannot go with dataset "chat"; leave it out'),
        ({"warmup_tokens": 1}, "d.json: warmup_tokens: cannot go with"),
        ({"chat_template": True}, "d.json: chat_template: cannot go with"),
        ({"score_roles": []}, "d.json: score_roles: "),
        ({"score_roles": "assistant"}, "d.json: score_roles: "),
        ({"score_turns": "first"}, "d.json: score_turns: "),
        ({"long": "cut"}, "d.json: long: "),
        ({"chat_template_kwargs": {"a": 1, "tools": []}}, "d.json: chat_template_kwargs: tools is not yours to set"),
        ({"chat_template_kwargs": {"self": 1}}, "d.json: chat_template_kwargs: self is not yours to set"),
        (
            {"dataset": "wiki2", "path": None, "eval_stride": 512, "long": "skip"},
            'd.json: long: only with dataset "chat"',
        ),
    ],
)
def test_refused_keys_of_conversations(keys: dict[str, Any], gold: str) -> None:
    assert refusal(parse_data_spec, {**CHAT, **keys}, Path("d.json")).startswith(gold)


@pytest.mark.parametrize(("key", "value"), cases(ANSWERS_VALUES))
def test_key_of_answers(key: str, value: Any) -> None:
    spec = parse_data_spec({**ANSWERS, key: value}, Path("d.json"))
    assert getattr(spec, key) == value
    assert (spec.windows, spec.longest) == ("answers", 2049)


@pytest.mark.parametrize(
    ("keys", "gold"),
    [
        ({"task": None}, 'd.json: task: missing; dataset "lm_eval" needs the name of a task'),
        ({"task": " "}, "d.json: task: missing"),
        ({"eval_stride": 512}, 'd.json: eval_stride: cannot go with dataset "lm_eval"; leave it out'),
        ({"method": "lm_eval"}, "d.json: method: cannot go with"),
        ({"chat_template": True}, "d.json: chat_template: cannot go with"),
        ({"path": "a.jsonl"}, "d.json: path: cannot go with"),
        ({"max_text_rows": 5}, "d.json: max_text_rows: cannot go with"),
        ({"num_fewshot": -1}, "d.json: num_fewshot: "),
        ({"dataset": "wiki2", "eval_stride": 512}, 'd.json: task: only with dataset "lm_eval"'),
    ],
)
def test_refused_keys_of_answers(keys: dict[str, Any], gold: str) -> None:
    assert refusal(parse_data_spec, {**ANSWERS, **keys}, Path("d.json")).startswith(gold)


@pytest.mark.parametrize(("key", "value"), cases(MODEL_VALUES))
def test_model_key(key: str, value: Any) -> None:
    spec = parse_model_spec({**MODEL, key: value}, Path("m.json"))
    assert getattr(spec, key) == value


def test_schema_key_for_editors_is_not_part_of_the_spec() -> None:
    data = parse_data_spec({**DATA, "$schema": "schema/data.schema.json"}, Path("d.json"))
    assert data.digest() == parse_data_spec(DATA, Path("d.json")).digest()
    assert (
        parse_model_spec({**MODEL, "$schema": "s"}, Path("m.json")).digest() == parse_model_spec(MODEL, Path()).digest()
    )


def test_tables_above_hold_every_key() -> None:
    assert {*DATA_VALUES, *CHAT_VALUES, *ANSWERS_VALUES, "path"} == set(
        DataSpec.model_fields
    )  # path: it needs dataset "text"
    assert set(MODEL_VALUES) == set(ModelSpec.model_fields)


@pytest.mark.parametrize(
    ("keys", "gold"),
    [
        ({"evallen": 5}, "d.json: evallen: unknown key (did you mean 'eval_len'?)"),
        ({"max_row": 5}, "d.json: max_row: unknown key (did you mean 'max_rows'?)"),
        ({"zzzzzz": 5}, "d.json: zzzzzz: unknown key"),
        ({"eval_len": None}, "d.json: eval_len: "),
        ({"eval_len": "2048"}, "d.json: eval_len: "),
        ({"eval_len": 2048.5}, "d.json: eval_len: "),
        ({"eval_len": True}, "d.json: eval_len: "),
        ({"eval_stride": True}, "d.json: eval_stride: "),
        ({"max_rows": "all"}, "d.json: max_rows: "),
        ({"chat_template": 1}, "d.json: chat_template: "),
        ({"display_rows": True}, "d.json: display_rows"),
        ({"dataset": ["wiki2"]}, "d.json: dataset: "),
        ({"dataset_data_files": 5}, "d.json: dataset_data_files"),
        ({"tokenize_fn": "llamacpp"}, "d.json: tokenize_fn: "),
        ({"eval_stride": None}, "d.json: eval_stride: missing"),
        ({"method": "llama.cpp"}, "d.json: method: "),
        (
            {"method": "llamacpp"},
            'd.json: eval_stride: with method "llamacpp" windows follow one another; leave it out',
        ),
        ({"method": "lm_eval"}, 'd.json: eval_stride: with method "lm_eval" windows follow one another'),
        ({"method": "gptq"}, 'd.json: eval_stride: with method "gptq" windows follow one another'),
        ({"method": "once", "eval_stride": 2048}, 'd.json: eval_stride: must be below eval_len with method "once"'),
        (
            {"method": "llamacpp", "eval_len": 2, "eval_stride": None},
            "d.json: eval_len: must be at least 3 with method",
        ),
        ({"method": "once", "warmup_tokens": 1}, 'd.json: warmup_tokens: cannot go with method "once"'),
        ({"method": "lm_eval", "eval_stride": None, "warmup_tokens": 1}, "d.json: warmup_tokens: cannot go with"),
        ({"method": "llamacpp", "eval_stride": None, "warmup_tokens": 1}, "d.json: warmup_tokens: cannot go with"),
        ({"method": "llamacpp", "eval_stride": None, "chat_template": True}, "d.json: chat_template: cannot go with"),
        ({"method": "lm_eval", "eval_stride": None, "chat_template": True}, "d.json: chat_template: cannot go with"),
        ({"method": "gptq", "eval_stride": 2048, "warmup_tokens": 1}, "d.json: warmup_tokens: cannot go with"),
        ({"method": "gptq", "eval_stride": None, "chat_template": True}, "d.json: chat_template: cannot go with"),
        ({"detokenize": "wikitext"}, "d.json: detokenize: rewrites documents, which only method"),
        ({"method": "lm_eval", "eval_stride": None, "detokenize": "wiki"}, "d.json: detokenize: "),
        ({"eval_stride": 0}, "d.json: eval_stride: "),
        ({"eval_stride": -512}, "d.json: eval_stride: "),
        ({"eval_len": 0}, "d.json: eval_len: "),
        ({"eval_len": -1}, "d.json: eval_len: "),
        ({"eval_len": 1}, "d.json: eval_len: input should be greater than or equal to 2 (got 1)"),
        ({"max_rows": -1}, "d.json: max_rows: "),
        ({"max_text_rows": -1}, "d.json: max_text_rows: "),
        ({"warmup_tokens": -1}, "d.json: warmup_tokens: "),
        ({"warmup_tokens": 2047}, "d.json: warmup_tokens: 2047 leaves nothing of eval_len 2048"),
        ({"dataset": "text"}, "d.json: path: missing"),
        ({"path": "a.txt"}, "d.json: path: only with dataset"),
        ({"eval\nlen": 5}, "d.json: "),
    ],
)
def test_data_refusals(keys: dict[str, Any], gold: str) -> None:
    assert refusal(parse_data_spec, {**DATA, **keys}, Path("d.json")).startswith(gold)


@pytest.mark.parametrize(
    ("keys", "gold"),
    [
        ({}, 512),
        ({"method": "llamacpp", "eval_stride": None}, 2048),
        ({"method": "llamacpp", "eval_stride": 2048}, 2048),
        ({"method": "lm_eval", "eval_stride": 2048}, 2048),
        ({"method": "gptq", "eval_stride": None}, 2048),
        ({"method": "once", "eval_stride": None}, 1024),
        ({"method": "once", "eval_stride": None, "eval_len": 3}, 1),
        ({"method": "once", "chat_template": True}, 512),
    ],
)
def test_stride_is_the_methods_where_the_spec_has_none(keys: dict[str, Any], gold: int) -> None:
    assert parse_data_spec({**DATA, **keys}, Path("d.json")).stride == gold


def test_digests_are_those_from_before_later_keys() -> None:
    """Of canonical JSON with every key of then."""
    for spec, later in (
        (
            parse_data_spec(DATA, Path()),
            dict.fromkeys(("method", "detokenize", "label", *ONLY_WITH["chat"], *ONLY_WITH["lm_eval"])),
        ),
        (
            parse_model_spec(MODEL, Path()),
            dict.fromkeys(("noise_floor", "group", "python", "gpus", "replicas", "resources")),
        ),
    ):
        then = {key: value for key, value in spec.model_dump().items() if key not in later}
        assert len(then) == len(spec.model_dump()) - len(later)
        assert spec.digest() == hashlib.sha256(json.dumps(then, sort_keys=True).encode()).hexdigest()
    assert parse_data_spec({**DATA, "label": "a"}, Path()).digest() != parse_data_spec(DATA, Path()).digest()
    assert parse_data_spec({**DATA, "method": "once"}, Path()).digest() != parse_data_spec(DATA, Path()).digest()
    assert parse_model_spec({**MODEL, "noise_floor": True}, Path()).digest() != parse_model_spec(MODEL, Path()).digest()


@pytest.mark.parametrize(
    ("model_dir", "options", "files"),
    [
        ("m", {"a": 1}, []),
        (["m", {"b": 2}], {"a": 1, "b": 2}, []),
        (["m", "x.st"], {"a": 1}, ["x.st"]),
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
    """``both`` is in either folder, ``near`` only beside the spec, ``here`` only in the working directory."""
    near, here = tmp_path / "specs", tmp_path / "work"
    for folder in (near / "both", near / "near", here / "both", here / "here"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    gold = {"both": near / "both", "near": near / "near", "here": Path("here"), "org/model": Path("org/model")}
    gold[str(here / "both")] = here / "both"
    for name, folder in gold.items():
        data = write(near / "d.json", {**DATA, "dataset": "text", "tokenizer_dir": name, "path": name})
        (spec,) = load_data_specs([data])
        assert spec.locate(spec.tokenizer_dir) == spec.locate(spec.path or "") == str(folder)
        (model,) = load_model_specs([write(near / "m.json", {**MODEL, "model_dir": [name, [name]]})])
        assert (model.located, model.override_tensors) == (str(folder), (folder,))
    monkeypatch.setenv("HOME", str(here))
    assert spec.locate("~/both") == str(here / "both")


@pytest.mark.parametrize("name", ["./models/llama", "models/../models/llama", "../llama"])
def test_a_missing_folder_written_as_a_path_does_not_become_a_hub_id(tmp_path: Path, name: str) -> None:
    spec = parse_model_spec({**MODEL, "model_dir": name}, tmp_path / "m.json")
    assert not is_hub_id(spec.located)


def test_digest_follows_what_the_spec_says_not_how() -> None:
    def digest(text: str) -> str:
        return parse_model_spec(json.loads(text), Path("m.json")).digest()

    first = digest('{"load_fn": "f", "model_dir": "m", "engine": {"a": 1, "b": {"c": 2, "d": 3}}}')
    assert digest('{"engine":{"b":{"d":3,"c":2},"a":1},\n\n "model_dir":"m","load_fn":"f"}') == first
    assert digest('{"load_fn": "f", "model_dir": "m", "engine": {"a": 1, "b": {"c": 2, "d": 4}}}') != first
    assert digest('{"load_fn": "f", "model_dir": "n", "engine": {"a": 1, "b": {"c": 2, "d": 3}}}') != first
    assert parse_data_spec(DATA, Path("a/d.json")).digest() == parse_data_spec(DATA, Path("b/e.json")).digest()


def test_schemas_accept_what_the_parser_accepts() -> None:
    schemas = json_schemas()
    assert set(schemas) == {"data.schema.json", "models.schema.json"}
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    data, model = (jsonschema.Draft202012Validator(schema) for schema in schemas.values())
    for key, value in cases(DATA_VALUES):
        data.validate({**DATA, key: value})
    for key, value in cases(MODEL_VALUES):
        model.validate([{**MODEL, key: value}])
    model.validate({**MODEL, "$schema": "s"})
    data.validate({**DATA, "$schema": "s"})
    assert data.is_valid({**DATA, "dataset": "text", "path": "a.txt"})


def test_schemas_refuse_what_the_parser_refuses() -> None:
    data, model = (jsonschema.Draft202012Validator(schema) for schema in json_schemas().values())
    for keys in ({"evallen": 5}, {"eval_len": "2048"}, {"eval_len": 0}, {"max_rows": -1}, {"dataset": None}):
        assert not data.is_valid({**DATA, **keys}), keys
    assert not data.is_valid({key: value for key, value in DATA.items() if key != "eval_len"})
    for entry in ({**MODEL, "bits": 4}, {"load_fn": "f"}, {**MODEL, "model_dir": 5}):
        assert not model.is_valid(entry), entry
        assert not model.is_valid([MODEL, entry]), entry


def test_a_folder_of_override_tensors_stands_for_its_files(tmp_path: Path) -> None:
    """Upstream named a folder; one without tensors stays as it is, for the check that will name it."""
    for folder in ("over", "empty"):
        (tmp_path / folder).mkdir()
    for name in ("b.safetensors", "a.safetensors", "config.json"):
        (tmp_path / "over" / name).touch()
    spec = parse_model_spec({**MODEL, "model_dir": ["m", ["over", "empty"]]}, tmp_path / "m.json")
    over = tmp_path / "over"
    assert spec.override_tensors == (over / "a.safetensors", over / "b.safetensors", tmp_path / "empty")
