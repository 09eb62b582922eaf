"""Every spec in eval/spec loads and matches its file name, and the generated schemas are current."""

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
    """The spec names a data set that compare_q or the hub knows, or a text, and its windows contain
    what they score.
    """
    (spec,) = spec_files.load_data_specs([file])
    assert (
        spec.dataset in ("text", "chat") or spec.dataset.lower() in SOURCES or "/" in spec.dataset
    )
    assert spec.is_chat == ("chat" in file.stem.split("_"))
    assert (file.stem.rpartition("_")[2] == "llamacpp") == (spec.method == "llamacpp")
    assert spec.stride <= spec.eval_len
    jsonschema.validate(json.loads(file.read_text()), SCHEMAS["data.schema.json"])


def test_specs_of_the_page_of_published_numbers() -> None:
    """The page has three complete specs, of which the second is the ready spec, and two that use a
    file.
    """
    page = (FOLDER.parent.parent / "docs" / "windows.md").read_text()
    blocks = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL)]
    whole = [block for block in blocks if "tokenizer_dir" in block]
    methods = [spec_files.parse_data_spec(block, Path("d.json")).method for block in whole]
    assert methods == ["gptq", "lm_eval", "llamacpp"]
    (ready,) = spec_files.load_data_specs([FOLDER / "wiki2_lm_eval.json"])
    assert spec_files.parse_data_spec(whole[1], Path("d.json")).digest() == ready.digest()
    hub = ("dataset", "dataset_name", "split", "text_column")
    for block, local in zip(whole, blocks[3:], strict=False):
        rest = {key: value for key, value in block.items() if key not in hub}
        assert spec_files.parse_data_spec({**rest, **local}, Path("d.json")).path == local["path"]


@pytest.mark.parametrize("file", MODEL_FILES, ids=lambda file: file.stem)
def test_model_examples(file: Path) -> None:
    """The engine matches the file's name, and every model has its own label."""
    models = spec_files.load_model_specs([file])
    engines = {backends.resolve(model.load_fn, model.fwd_fn)[0] for model in models}
    assert engines == {next(engine for word, engine in ENGINES.items() if word in file.stem)}
    assert all(model.label for model in models)
    jsonschema.validate(json.loads(file.read_text()), SCHEMAS["models.schema.json"])


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_current(name: str) -> None:
    """Run `make schema` if this fails."""
    assert json.loads((FOLDER / "schema" / name).read_text()) == SCHEMAS[name]


def test_published_results_follow_the_schema() -> None:
    file = ROOT / "results" / "h200" / "table" / "results.json"
    jsonschema.validate(json.loads(file.read_text()), SCHEMAS["results.schema.json"])
