"""Every spec in eval/spec loads and matches its file name; the generated schemas are current."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from compare_q import backends
from compare_q.eval import results
from compare_q.eval.specs import spec_files, spec_types
from compare_q.eval.text.hub_datasets import SOURCES
from tests.support import ROOT

FOLDER = ROOT / "eval" / "spec"
FILES = sorted(FOLDER.glob("*.json"))
DATA_FILES = [file for file in FILES if "dataset" in json.loads(file.read_text())]
MODEL_FILES = [file for file in FILES if file not in DATA_FILES]
ENGINES = {
    "vllm_server": "vllm_server",
    "vllm": "vllm_score",
    "gguf": "llamacpp",
    "exl3": "exllamav3",
    "transformers": "transformers",
    "hf": "transformers",
}
"""Word in a file's name -> its engine; the first match counts."""
SCHEMAS = {**spec_types.json_schemas(), "results.schema.json": results.json_schema()}


@pytest.mark.parametrize("file", DATA_FILES, ids=lambda file: file.stem)
def test_data_examples(file: Path) -> None:
    """The spec names a known data set or a text, and its windows contain what they score."""
    (spec,) = spec_files.load_data_specs([file])
    is_file = spec.dataset in ("text", "chat")
    is_on_hub = "/" in spec.dataset
    assert is_file or is_on_hub or spec.dataset.lower() in SOURCES
    assert spec.is_chat == ("chat" in file.stem.split("_"))
    assert (file.stem.rpartition("_")[2] == "llamacpp") == (spec.method == "llamacpp")
    assert spec.stride <= spec.eval_len
    jsonschema.validate(json.loads(file.read_text()), SCHEMAS["data.schema.json"])


def test_specs_of_the_page_of_published_numbers() -> None:
    """The page has three complete specs, then two groups of keys that use a file.

    The second spec is the ready one.
    """
    page = (ROOT / "docs" / "windows.md").read_text()
    blocks = []
    for text in re.findall(r"```json\n(.*?)```", page, re.DOTALL):
        blocks.append(json.loads(text))
    complete = [block for block in blocks if "tokenizer_dir" in block]
    specs = [spec_files.parse_data_spec(block, Path("d.json")) for block in complete]
    assert [spec.method for spec in specs] == ["gptq", "lm_eval", "llamacpp"]
    (ready,) = spec_files.load_data_specs([FOLDER / "wiki2_lm_eval.json"])
    assert specs[1].digest() == ready.digest()
    keys_of_hub = ("dataset", "dataset_name", "split", "text_column")
    for block, local_keys in zip(complete, blocks[3:], strict=False):
        keys = {key: value for key, value in block.items() if key not in keys_of_hub}
        spec = spec_files.parse_data_spec({**keys, **local_keys}, Path("d.json"))
        assert spec.path == local_keys["path"]


@pytest.mark.parametrize("file", MODEL_FILES, ids=lambda file: file.stem)
def test_model_examples(file: Path) -> None:
    """The engine matches the file's name, and every model has its own label."""
    gold = next(engine for word, engine in ENGINES.items() if word in file.stem)
    models = spec_files.load_model_specs([file])
    for model in models:
        engine, _ = backends.resolve(model.load_fn, model.fwd_fn)
        assert engine == gold
        assert model.label
    jsonschema.validate(json.loads(file.read_text()), SCHEMAS["models.schema.json"])


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_current(name: str) -> None:
    """Run `make schema` if this fails."""
    assert json.loads((FOLDER / "schema" / name).read_text()) == SCHEMAS[name]


def test_published_results_follow_the_schema() -> None:
    file = ROOT / "results" / "h200" / "table" / "results.json"
    jsonschema.validate(json.loads(file.read_text()), SCHEMAS["results.schema.json"])
