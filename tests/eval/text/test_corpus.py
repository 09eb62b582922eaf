"""Local data sets and files -> text, with the real ``datasets`` (hub: test_hub_datasets.py)."""

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
from compare_q.eval.specs.spec_files import parse_data_spec
from compare_q.eval.specs.spec_types import DataSpec
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
    base: dict[str, Any] = {"tokenizer_dir": "t", "dataset": "text", "eval_len": 4}
    if keys.get("method", "exllamav3") == "exllamav3":
        base["eval_stride"] = 2
    return parse_data_spec({**base, **keys}, folder / "d.json")


def text(**keys: Any) -> str:
    (only_text,) = corpus.load_texts(spec(**keys), PROGRESS)
    return only_text


def refusal(**keys: Any) -> str:
    """Return the one line that refuses the text of a data spec."""
    return refusal_of(text, **keys)


def numbered(file: Path, count: int = 5) -> dict[str, Any]:
    """Write a local data set with the rows r0, r1, ...; return the keys of its spec."""
    file.write_text("".join(json.dumps({"text": f"r{i}", "id": i}) + "\n" for i in range(count)))
    return {"dataset": "json", "dataset_data_files": str(file), "split": "train"}


def local(file: Path, rows: list[str | None]) -> dict[str, Any]:
    return {
        "dataset": "parquet",
        "dataset_data_files": str(parquet(file, text=rows)),
        "split": "train",
    }


def parquet(file: Path, **columns: list[Any]) -> Path:
    pyarrow.parquet.write_table(
        pyarrow.table(columns), file, compression="none", use_dictionary=False
    )
    return file


ROWS = ["", "a", " \n", "b\n", None, " c"]


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("method", "limit", "gold"),
    [
        ("exllamav3", None, ["a\n\nb\n\n\n c"]),
        # The limit counts rows as they are in the file, blank ones too.
        ("exllamav3", 3, ["a"]),
        ("gptq", None, ["\n\na\n\n \n\n\nb\n\n\n c"]),
        ("gptq", 2, ["\n\na"]),
        ("lm_eval", None, ["", "a", " \n", "b\n", " c"]),
        ("lm_eval", 4, ["", "a", " \n", "b\n"]),
    ],
)
def test_blank_rows(method: str, limit: int | None, gold: list[str], tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    # Empty lines of a .jsonl are no rows.
    lines.write_text("\n\n".join(json.dumps({"text": row}) for row in ROWS))
    table = parquet(tmp_path / "a.parquet", text=ROWS)
    sources = (
        local(tmp_path / "b.parquet", ROWS),
        {"path": str(table)},
        {"path": str(lines)},
    )
    for source in sources:
        data = spec(**source, method=method, max_text_rows=limit)
        assert corpus.load_texts(data, PROGRESS) == gold


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
def test_local_data_set_through_the_real_library(
    tmp_path: Path, keys: dict[str, Any], gold: str
) -> None:
    source = {**numbered(tmp_path / "a.jsonl"), **keys}
    if not gold:
        assert refusal(**source) == "dataset 'json': no text in its rows"
    else:
        assert text(**source).split("\n\n") == gold.split()


@pytest.mark.parametrize(
    ("content", "gold", "llamacpp"),
    [
        ("a\n\nb ", "a\n\nb ", "a\n\nb "),
        # A byte order mark is text, and so is \u2028, at which str.splitlines() would end a line.
        ("\ufeffé\u2028ß", "\ufeffé\u2028ß", "\ufeffé\u2028ß"),
        # llama-perplexity reads bytes, and drops a last newline.
        ("a\r\nb\rc\n\n", "a\nb\nc\n\n", "a\r\nb\rc\n"),
    ],
)
def test_local_text(tmp_path: Path, content: str, gold: str, llamacpp: str) -> None:
    """Only line ends are changed: a copy with Windows line ends gives the same scores."""
    (tmp_path / "a.txt").write_bytes(content.encode())
    expected = {"exllamav3": gold, "gptq": gold, "lm_eval": gold, "llamacpp": llamacpp}
    for method, expected_text in expected.items():
        # Relative to the spec's folder.
        data = spec(tmp_path, path="a.txt", method=method)
        assert corpus.load_texts(data, PROGRESS) == [expected_text]


@pytest.mark.parametrize("line", ['{"text": "b"', '["text"]', '{"body": "b"}'])
def test_bad_lines_are_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "a"}}\n\n{line}\n')
    assert refusal(path=str(file)).startswith(f"path: {file}: line 3")
    # A line that is not read may be wrong.
    assert text(path=str(file), max_text_rows=1) == "a"


@pytest.mark.parametrize(
    "keys",
    [
        # This builder of ``datasets`` reads pickles.
        {"dataset": "pandas", "dataset_data_files": "x.json"},
        {"dataset": "wiki2", "dataset_path": "pandas"},
        *(
            {"dataset": "json", "dataset_data_files": {"train": ["x.json", f"https://h/x.{end}"]}}
            # Endings in capitals, of compressed files and before a query.
            for end in ("pkl", "pickle.gz", "PT", "npy?x=1")
        ),
    ],
)
def test_pickles_are_refused_before_they_are_read(keys: dict[str, Any]) -> None:
    assert "pickle" in refusal_of(corpus.text_identity, spec(**keys))
    # With the builder ``text`` nothing is unpickled: .pt may mean Portuguese.
    portuguese = {**keys, "dataset_path": "text", "dataset_data_files": "x.pt"}
    assert corpus.text_identity(spec(**portuguese))


@pytest.mark.parametrize(
    ("dataset", "file", "gold"),
    [
        ("json", "train.jsonl", False),
        ("json", "https://host/train.jsonl", True),
        ("owner/rows", "train.jsonl", True),
    ],
)
def test_a_named_file_of_a_data_set_on_the_hub_is_remote(
    dataset: str, file: str, gold: bool
) -> None:
    """Its tokens are then kept for a version of the data set, and not for ever."""
    assert hub_datasets.is_remote(spec(dataset=dataset, dataset_data_files=file)) is gold


def test_a_secret_in_a_url_is_no_part_of_the_identity() -> None:
    one, other, redacted = (
        corpus.text_identity(spec(dataset="json", dataset_data_files=file))
        for file in (
            "https://me:a@host/x.json?token=b",
            "https://you:c@host/x.json?token=d",
            "https://***@host/y.json?token=***",
        )
    )
    assert one == other
    assert one != redacted


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_identity_of_a_local_file_is_its_content(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    moved = tmp_path / "elsewhere" / f"b{name}"
    file.write_text('{"text": "a"}')
    first = corpus.text_identity(spec(path=str(file)))
    os.utime(file, (1, 1))
    assert corpus.text_identity(spec(path=str(file))) == first
    moved.parent.mkdir()
    file.rename(moved)
    assert corpus.text_identity(spec(path=str(moved))) == first
    moved.write_text('{"text": "b"}')
    assert corpus.text_identity(spec(path=str(moved))) != first


@pytest.mark.usefixtures("offline")
def test_identity_of_a_local_data_set_follows_the_names_of_its_files(tmp_path: Path) -> None:
    """A file's name decides its split: ``test`` is the second of three files, then the third."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for name, count in (("a", 1), ("test", 2), ("train", 3)):
        numbered(folder / f"{name}.jsonl", count)
    keys = {"dataset": str(folder), "split": "test"}
    before = text(**keys)
    identity = corpus.text_identity(spec(**keys))
    (folder / "test.jsonl").rename(folder / "b.jsonl")
    (folder / "train.jsonl").rename(folder / "test.jsonl")
    assert (before, text(**keys)) == ("r0\n\nr1", "r0\n\nr1\n\nr2")
    assert corpus.text_identity(spec(**keys)) != identity


@pytest.mark.parametrize(
    ("method", "path", "gold"),
    [
        ("gptq", "a.txt", "on a raw file"),
        ("gptq", "a.parquet", "on the rows"),
        ("gptq", None, "on the rows"),
        ("llamacpp", "a.txt", ""),
        ("llamacpp", None, "on joined rows"),
        ("exllamav3", "a.txt", ""),
    ],
)
def test_methods_say_which_form_of_a_text_they_have(
    method: str, path: str | None, gold: str
) -> None:
    """WikiText-2 has 304,978 Llama 2 tokens if rows are joined, and 301,948 as a file."""
    keys = {"dataset": "wiki2"}
    if path:
        keys = {"dataset": "text", "path": path}
    notes = corpus.method_notes(spec(method=method, **keys))
    if gold:
        assert gold in "".join(notes)
    else:
        assert not notes
