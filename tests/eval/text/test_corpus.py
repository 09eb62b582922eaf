"""Local data sets and files -> text, with the real ``datasets``; data sets of the hub are in test_hub_datasets.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest

from compare_q.eval.common.progress import Progress
from compare_q.eval.specs.reading import parse_data_spec
from compare_q.eval.specs.types import DataSpec
from compare_q.eval.text import corpus, hub_datasets
from tests.support.toy import refusal as refusal_of

PROGRESS = Progress(quiet=True)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the real data set library with its own cache, without network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def spec(folder: Path = Path(), **keys: Any) -> DataSpec:
    stride = {"eval_stride": 2} if keys.get("method", "exllamav3") == "exllamav3" else {}
    base = {"tokenizer_dir": "t", "dataset": "text", "eval_len": 4}
    return parse_data_spec({**base, **stride, **keys}, folder / "d.json")


def text(**keys: Any) -> str:
    (found,) = corpus.load_texts(spec(**keys), PROGRESS)
    return found


def refusal(**keys: Any) -> str:
    """Return the one line that refuses the text of a data spec."""
    return refusal_of(text, **keys)


def numbered(file: Path, count: int = 5) -> dict[str, Any]:
    """Write a local data set with the rows r0, r1, ...; return the keys of its spec."""
    file.write_text("".join(json.dumps({"text": f"r{i}", "id": i}) + "\n" for i in range(count)))
    return {"dataset": "json", "dataset_data_files": str(file), "split": "train"}


def local(file: Path, rows: list[str | None]) -> dict[str, Any]:
    return {"dataset": "parquet", "dataset_data_files": str(parquet(file, text=rows)), "split": "train"}


def parquet(file: Path, **columns: list[Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), file, compression="none", use_dictionary=False)
    return file


ROWS = ["", "a", " \n", "b\n", None, " c"]


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("method", "limit", "gold"),
    [
        ("exllamav3", None, ["a\n\nb\n\n\n c"]),
        ("exllamav3", 3, ["a"]),
        ("gptq", None, ["\n\na\n\n \n\n\nb\n\n\n c"]),
        ("gptq", 2, ["\n\na"]),
        ("lm_eval", None, ["", "a", " \n", "b\n", " c"]),
        ("lm_eval", 4, ["", "a", " \n", "b\n"]),
    ],
)
def test_blank_rows(method: str, limit: int | None, gold: list[str], tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n\n".join(json.dumps({"text": row}) for row in ROWS))
    files = [parquet(tmp_path / "a.parquet", text=ROWS), lines]
    for source in (local(tmp_path / "b.parquet", ROWS), *({"path": str(file)} for file in files)):
        wanted = spec(**source, method=method, max_text_rows=limit)
        assert corpus.load_texts(wanted, PROGRESS) == gold


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("keys", "gold"),
    [
        ({}, "r0 r1 r2 r3 r4"),
        ({"split": "train[1:3]"}, "r1 r2"),
        ({"split": "train[1:3]", "max_text_rows": 1}, "r1"),
        ({"text_column": "id"}, ""),
    ],
)
def test_local_data_set_through_the_real_library(tmp_path: Path, keys: dict[str, Any], gold: str) -> None:
    source = {**numbered(tmp_path / "a.jsonl"), **keys}
    if not gold:
        assert refusal(**source) == "dataset 'json': no text in its rows"
    else:
        assert text(**source).split("\n\n") == gold.split()


@pytest.mark.parametrize(
    ("content", "gold", "llamacpp"),
    [
        ("a\n\nb ", "a\n\nb ", "a\n\nb "),
        ("\ufeffé\u2028ß", "\ufeffé\u2028ß", "\ufeffé\u2028ß"),  # a byte order mark is text
        ("a\r\nb\rc\n\n", "a\nb\nc\n\n", "a\r\nb\rc\n"),  # llama-perplexity reads bytes, and drops a last newline
    ],
)
def test_local_text(tmp_path: Path, content: str, gold: str, llamacpp: str) -> None:
    """The text is unchanged, except for line ends: a copy with Windows line ends gives the same scores."""
    (tmp_path / "a.txt").write_bytes(content.encode())
    found = [corpus.load_texts(spec(tmp_path, path="a.txt", method=method), PROGRESS)  # relative to the spec's folder
             for method in ("exllamav3", "gptq", "lm_eval", "llamacpp")]  # fmt: skip
    assert found == [[gold], [gold], [gold], [llamacpp]]


@pytest.mark.parametrize("line", ['{"text": "b"', '["text"]', '{"body": "b"}'])
def test_bad_lines_are_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "a"}}\n\n{line}\n')
    assert refusal(path=str(file)).startswith(f"path: {file}: line 3: ")
    assert text(path=str(file), max_text_rows=1) == "a"


@pytest.mark.parametrize("keys", [
    {"dataset": "pandas", "dataset_data_files": "x.json"}, {"dataset": "wiki2", "dataset_path": "pandas"},
    *({"dataset": "json", "dataset_data_files": {"train": ["x.json", f"https://h/x.{end}"]}}
      for end in ("pkl", "pickle.gz", "PT", "npy?x=1")),
])  # fmt: skip
def test_pickles_are_refused_before_they_are_read(keys: dict[str, Any]) -> None:
    assert "pickle" in refusal_of(corpus.identity, spec(**keys))
    assert corpus.identity(spec(**{**keys, "dataset_path": "text", "dataset_data_files": "x.pt"}))  # Portuguese


@pytest.mark.parametrize(
    ("dataset", "file", "gold"),
    [("json", "train.jsonl", False), ("json", "https://host/train.jsonl", True), ("owner/rows", "train.jsonl", True)],
)
def test_a_named_file_of_a_data_set_on_the_hub_is_remote(dataset: str, file: str, gold: bool) -> None:
    """Its tokens are then kept for a version of the data set, and not for ever."""
    assert hub_datasets.is_remote(spec(dataset=dataset, dataset_data_files=file)) is gold


def test_a_secret_in_a_url_is_no_part_of_the_identity() -> None:
    files = (f"https://{user}host/x.json?token={key}" for user, key in (("me:a@", "b"), ("you:c@", "d")))
    one, other = (corpus.identity(spec(dataset="json", dataset_data_files=file)) for file in files)
    assert one == other
    assert one != corpus.identity(spec(dataset="json", dataset_data_files="https://***@host/y.json?token=***"))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_identity_of_a_local_file_is_its_content(tmp_path: Path, name: str) -> None:
    file, moved = tmp_path / name, tmp_path / "elsewhere" / f"b{name}"
    file.write_text('{"text": "a"}')
    first = corpus.identity(spec(path=str(file)))
    os.utime(file, (1, 1))
    assert corpus.identity(spec(path=str(file))) == first
    moved.parent.mkdir()
    file.rename(moved)
    assert corpus.identity(spec(path=str(moved))) == first
    moved.write_text('{"text": "b"}')
    assert corpus.identity(spec(path=str(moved))) != first


@pytest.mark.usefixtures("offline")
def test_identity_of_a_local_data_set_follows_the_names_of_its_files(tmp_path: Path) -> None:
    """A file's name decides its split: the test split is first the second of three files, and then the third."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for name, count in (("a", 1), ("test", 2), ("train", 3)):
        numbered(folder / f"{name}.jsonl", count)
    keys = {"dataset": str(folder), "split": "test"}
    before, identity = text(**keys), corpus.identity(spec(**keys))
    (folder / "test.jsonl").rename(folder / "b.jsonl")
    (folder / "train.jsonl").rename(folder / "test.jsonl")
    assert (before, text(**keys)) == ("r0\n\nr1", "r0\n\nr1\n\nr2")
    assert corpus.identity(spec(**keys)) != identity


@pytest.mark.parametrize(
    ("method", "path", "gold"),
    [
        ("gptq", "a.txt", "on a raw file"), ("gptq", "a.parquet", "on the rows"), ("gptq", None, "on the rows"),
        ("llamacpp", "a.txt", ""), ("llamacpp", None, "on joined rows"), ("exllamav3", "a.txt", ""),
    ],
)  # fmt: skip
def test_methods_say_which_form_of_a_text_they_have(method: str, path: str | None, gold: str) -> None:
    """WikiText-2 has 304,978 Llama 2 tokens if rows are joined, and 301,948 as a file."""
    keys = {"dataset": "text", "path": path} if path else {"dataset": "wiki2"}
    notes = corpus.method_notes(spec(method=method, **keys))
    assert (gold in "".join(notes)) if gold else not notes
