"""Data sets -> text, without the network: recorded arguments, the real ``datasets`` on local files, local text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest

from eval import corpus
from eval.progress import Progress
from eval.spec_files import parse_data_spec
from eval.specs import DataSpec
from tests.conftest import refusal as refusal_of

PROGRESS = Progress(quiet=True)
COLUMNS = {"text": ["a", "b"], "sentence": ["c", "d"], "id": [1, 2]}
OPENWEBTEXT10K = "hf://datasets/stas/openwebtext-10k@refs/convert/parquet/plain_text/train/*.parquet"
PTB = "hf://datasets/ptb-text-only/ptb_text_only@refs/convert/parquet/penn_treebank/test/*.parquet"
# name: path, configuration, split, data_files, streamed, text of COLUMNS
KNOWN = {
    "wiki2": ("wikitext", "wikitext-2-raw-v1", "test", None, False, "a\n\nb"),
    "wikitext2": ("wikitext", "wikitext-2-raw-v1", "test", None, False, "a\n\nb"),
    "wiki103": ("wikitext", "wikitext-103-raw-v1", "test", None, False, "a\n\nb"),
    "wikitext103": ("wikitext", "wikitext-103-raw-v1", "test", None, False, "a\n\nb"),
    "ptb": ("parquet", None, "test", {"test": PTB}, False, "c\n\nd"),
    "lambada": ("EleutherAI/lambada_openai", None, "test", None, False, "a\n\nb"),
    "tinystories": ("roneneldan/TinyStories", None, "validation", None, False, "a\n\nb"),
    "c4": ("allenai/c4", "en", "validation", None, False, "a\n\nb"),
    "openwebtext10k": ("parquet", None, "train", OPENWEBTEXT10K, False, "a\n\nb"),
    "openwebtext": ("Skylion007/openwebtext", None, "train", None, True, "a\n\nb"),
    "fineweb": ("HuggingFaceFW/fineweb", "sample-10BT", "train", None, True, "a\n\nb"),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", None, True, "a\n\nb"),
}


class Recorder:
    """Stands in for ``datasets.load_dataset``: keeps the arguments, hands out ``rows``."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.calls: list[dict[str, Any]] = []

    def __call__(self, path: str, name: str | None = None, **keys: Any) -> Any:
        self.calls.append({"path": path, "name": name, **keys})
        if isinstance(self.rows, Exception):
            raise self.rows
        return self.rows


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Recorder]:
    def install(rows: Any) -> Recorder:
        recorder = Recorder(rows)
        monkeypatch.setattr(datasets, "load_dataset", recorder)
        return recorder

    return install


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real data set library in a cache of its own, off the network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def spec(folder: Path = Path(), **keys: Any) -> DataSpec:
    base = {"tokenizer_dir": "t", "dataset": "text", "eval_stride": 2, "eval_len": 4}
    return parse_data_spec({**base, **keys}, folder / "d.json")


def text(**keys: Any) -> str:
    return corpus.load_text(spec(**keys), PROGRESS)


def refusal(**keys: Any) -> str:
    """The one line with which the text of a data spec is refused."""
    return refusal_of(text, **keys)


def numbered(file: Path, count: int = 5) -> dict[str, Any]:
    """Keys of a local data set whose rows are r0, r1, ..."""
    file.write_text("".join(json.dumps({"text": f"r{i}", "id": i}) + "\n" for i in range(count)))
    return {"dataset": "json", "dataset_data_files": str(file), "split": "train"}


def parquet(file: Path, **columns: list[Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), file, compression="none", use_dictionary=False)
    return file


def test_every_known_name_is_below() -> None:
    assert set(KNOWN) == set(corpus.SOURCES)


@pytest.mark.parametrize("name", KNOWN)
def test_known_name(name: str, serve: Callable[[Any], Recorder]) -> None:
    path, configuration, split, files, streamed, gold_text = KNOWN[name]
    recorder = serve(datasets.Dataset.from_dict(COLUMNS))
    assert text(dataset=name.upper()) == gold_text
    gold = {"path": path, "name": configuration, "split": split, "data_files": files, "streaming": streamed}
    assert recorder.calls == [{**gold, "revision": None}]


def test_keys_of_the_spec_replace_those_of_the_name(serve: Callable[[Any], Recorder]) -> None:
    recorder = serve(datasets.Dataset.from_dict(COLUMNS))
    keys = {"dataset_path": "org/data", "dataset_name": "conf", "dataset_split": "dev", "split": "unused"}
    assert text(dataset="ptb", text_column="text", dataset_data_files="f", revision="v1", **keys) == "a\n\nb"
    gold = {"path": "org/data", "name": "conf", "split": "dev", "data_files": "f", "revision": "v1", "streaming": False}
    assert recorder.calls == [gold]
    text(dataset="org/other", split="validation")
    assert [recorder.calls[1][key] for key in ("path", "name", "split")] == ["org/other", None, "validation"]


@pytest.mark.parametrize(
    ("keys", "gold"),
    [
        ({"dataset": "openwebtext"}, 1000),
        ({"dataset_split": "train[:7]"}, 7),
        ({"max_text_rows": 3}, 3),
        ({"max_dataset_rows": 3}, 3),
        ({"max_text_rows": 3, "dataset_split": "train[:7]"}, 3),
        ({"max_text_rows": 9, "dataset_split": "train[:7]"}, 7),
    ],
)
def test_first_rows_are_streamed(keys: dict[str, Any], gold: int, serve: Callable[[Any], Recorder]) -> None:
    produced = []

    def many() -> Iterator[dict[str, str]]:
        while len(produced) < 2000:
            produced.append(f"r{len(produced)}")
            yield {"text": produced[-1]}

    recorder = serve(datasets.IterableDataset.from_generator(many))
    assert text(**{"dataset": "org/data", **keys}).split("\n\n") == [f"r{i}" for i in range(gold)]
    assert recorder.calls[0]["streaming"] is True
    assert "[" not in recorder.calls[0]["split"]  # a stream cannot be sliced by name
    assert len(produced) <= gold + 1  # the library's own take() looks one row ahead


@pytest.mark.parametrize(
    ("rows", "limit", "gold"),
    [
        (["", "a", " \n", "b\n", None, " c"], None, "a\n\nb\n\n\n c"),
        (["", "a", " ", "b"], 0, "a\n\nb"),
        (["", "a", " ", "b"], 3, "a"),  # upstream takes the first rows and then drops the blank ones
        (["", "a", " ", "b"], 99, "a\n\nb"),
    ],
)
def test_blank_rows_are_dropped(
    rows: list[str], limit: int | None, gold: str, serve: Callable[[Any], Recorder], tmp_path: Path
) -> None:
    serve(datasets.Dataset.from_dict({"text": rows}))
    assert text(dataset="wiki2", max_text_rows=limit) == gold
    assert text(path=str(parquet(tmp_path / "a.parquet", text=rows)), max_text_rows=limit) == gold
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n\n".join(json.dumps({"text": row}) for row in rows))
    assert text(path=str(lines), max_text_rows=limit) == gold


def test_blank_rows_stay_for_gptq(serve: Callable[[Any], Recorder], tmp_path: Path) -> None:
    """``"\\n\\n".join(rows)`` of the rows as they are, each with its own newline; a row without text is none."""
    rows = ["", " = A = \n", "", " a b \n", None, ""]
    keys: dict[str, Any] = {"method": "gptq", "eval_stride": None}
    gold = "\n\n = A = \n\n\n\n\n a b \n\n\n"
    serve(datasets.Dataset.from_dict({"text": rows}))
    assert text(dataset="wiki2", **keys) == gold
    assert text(path=str(parquet(tmp_path / "a.parquet", text=rows)), **keys) == gold
    assert text(dataset="wiki2", max_text_rows=2, **keys) == "\n\n = A = \n"
    assert text(dataset="wiki2") == " = A = \n\n\n a b \n"
    (tmp_path / "a.txt").write_bytes(b"a\r\n\n\nb\n")
    assert text(path=str(tmp_path / "a.txt"), **keys) == "a\n\n\nb\n"


@pytest.mark.parametrize(("limit", "count"), [(None, 5), (4, 4), (5, 4), (6, 5)])
def test_documents_are_rows_as_they_are(limit: int | None, count: int, serve: Any, tmp_path: Path) -> None:
    """lm-eval drops no blank row; a row without text is none."""
    gold = ["", "a", " \n", "b\n", " c"][:count]
    rows = ["", "a", " \n", "b\n", None, " c"]
    serve(datasets.Dataset.from_dict({"text": rows}))
    assert corpus.load_documents(spec(dataset="wiki2", max_text_rows=limit), PROGRESS) == gold
    file = str(parquet(tmp_path / "a.parquet", text=rows))
    assert corpus.load_documents(spec(path=file, max_text_rows=limit), PROGRESS) == gold


def test_a_plain_file_is_one_document_and_blank_rows_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n\nb\n")
    assert corpus.load_documents(spec(tmp_path, path="a.txt"), PROGRESS) == ["a\n\nb\n"]
    blank = spec(path=str(parquet(tmp_path / "a.parquet", text=["", " "])))
    assert refusal_of(corpus.load_documents, blank, PROGRESS) == "dataset 'text': no text in its rows"


@pytest.mark.parametrize(("first", "second", "gold"), [(2, 3, "r0\n\nr1"), (0, 1, "r0\n\nr1\n\nr2"), (None, 1, "r0")])
def test_max_text_rows_goes_before_max_dataset_rows(
    first: int | None, second: int, gold: str, tmp_path: Path, serve: Callable[[Any], Recorder]
) -> None:
    """Upstream: ``spec.get("max_text_rows", spec.get("max_dataset_rows", 0))``; absent here is None."""
    serve(datasets.Dataset.from_dict({"text": ["r0", "r1", "r2"]}))
    limits = {"max_dataset_rows": second} | ({} if first is None else {"max_text_rows": first})
    assert text(dataset="wiki2", **limits) == gold


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("keys", "gold"),
    [
        ({}, "r0 r1 r2 r3 r4"),
        ({"max_text_rows": 2}, "r0 r1"),
        ({"split": "train[:2]"}, "r0 r1"),
        ({"split": "train[1:3]"}, "r1 r2"),
        ({"split": "train[1:3]", "max_text_rows": 1}, "r1"),
        ({"split": "train[:80%]", "max_text_rows": 3}, "r0 r1 r2"),
        ({"text_column": "id"}, "; they hold values of type int"),
        ({"split": "train[:0]"}, ""),
    ],
)
def test_local_data_set_through_the_real_library(tmp_path: Path, keys: dict[str, Any], gold: str) -> None:
    source = {**numbered(tmp_path / "a.jsonl"), **keys}
    if not gold.startswith("r"):
        assert refusal(**source) == f"dataset 'json': no text in its rows{gold}"
    else:
        assert text(**source).split("\n\n") == gold.split()


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("streamed", [{}, {"max_text_rows": 9}])
def test_bad_local_data_sets(tmp_path: Path, streamed: dict[str, int]) -> None:
    source = {**numbered(tmp_path / "a.jsonl"), **streamed}
    assert refusal(**source, text_column="texts") == "dataset 'json': no text column 'texts'; there are: text, id"
    assert "cannot load json" in refusal(**{**source, "split": "dev"})
    assert "none.jsonl" in refusal(**{**source, "dataset_data_files": str(tmp_path / "none.jsonl")})
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text":\n')
    assert refusal(**source).startswith("dataset 'json': ")


def test_column_of_a_stream_that_does_not_name_its_columns(serve: Callable[[Any], Recorder]) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"id": "1", "body": "a"}

    serve(datasets.IterableDataset.from_generator(rows))
    assert text(dataset="org/data", text_column="body", max_text_rows=1) == "a"
    assert refusal(dataset="org/data", max_text_rows=1).startswith("dataset 'org/data': no text column 'text'")


@pytest.mark.usefixtures("offline")
def test_unreachable_data_set() -> None:
    assert refusal(dataset="org/nowhere").startswith("dataset 'org/nowhere': cannot load org/nowhere: ")
    assert refusal(dataset="wikki2").endswith("(did you mean 'wiki2'?)")


@pytest.mark.usefixtures("offline")
def test_a_known_name_is_not_taken_for_a_misspelling() -> None:
    assert "did you mean" not in refusal(dataset="wiki2")


def test_reason_is_folded_to_one_line(serve: Callable[[Any], Recorder]) -> None:
    serve(ConnectionError("\n  \nno route\nto host"))
    assert refusal(dataset="org/data") == "dataset 'org/data': cannot load org/data: no route to host"
    serve(TimeoutError())
    assert refusal(dataset="org/data") == "dataset 'org/data': cannot load org/data: TimeoutError"


@pytest.mark.parametrize("content", ["a\n\nb \n", "  a", "\ufeffé\u2028ß"])
@pytest.mark.parametrize("keys", [{}, {"method": "llamacpp", "eval_stride": None}])
def test_local_text_is_taken_as_it_is(tmp_path: Path, content: str, keys: dict[str, Any]) -> None:
    """A byte order mark is text, as it is for llama-perplexity, which reads bytes."""
    (tmp_path / "a.txt").write_bytes(content.encode())
    assert corpus.load_text(spec(tmp_path, path="a.txt", **keys), PROGRESS) == content  # relative to the spec's folder


def test_every_line_end_is_a_newline(tmp_path: Path) -> None:
    """A copy of a corpus with Windows line ends scores as the original does, but by llama-perplexity's method."""
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\rc\n")
    assert corpus.load_text(spec(tmp_path, path="a.txt"), PROGRESS) == "a\nb\nc\n"
    raw = spec(tmp_path, path="a.txt", method="llamacpp", eval_stride=None)
    assert corpus.load_text(raw, PROGRESS) == "a\r\nb\rc\n"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_text_must_be_utf8(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'{"text": "caf\xe9"}\n')
    assert str(tmp_path / name) in refusal(path=str(tmp_path / name))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_missing_and_empty_files(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    assert refusal(path=str(file)) == f"path: {file}: no such file"
    if name == "a.parquet":
        parquet(file, text=[])
    else:
        file.write_bytes(b"")
    assert "no text" in refusal(path=str(file))


def test_columns_of_local_files(tmp_path: Path) -> None:
    rows = parquet(tmp_path / "a.parquet", id=[1, 2], body=["a", "b"])
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"id": 1, "body": "a"}\n{"id": 2, "body": "b"}\n')
    for file in (rows, lines):
        assert text(path=str(file), text_column="body") == "a\n\nb"
        message = refusal(path=str(file))
        assert str(file) in message
        assert message.endswith("no text column 'text'; there are: id, body")


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_conversations_are_told_what_can_be_done(tmp_path: Path, column: str) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    rows = parquet(tmp_path / "a.parquet", **{column: [chat]})
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({column: chat, "id": 1}) + "\n")
    for file in (rows, lines):
        for keys in ({}, {"text_column": column}):  # no text column; a text column that holds no text
            message = refusal(path=str(file), **keys)
            assert "; conversations are not read: write each as text to a column of its own" in message
            assert "apply_chat_template(..., tokenize=False)" in message
    lines.write_text(json.dumps({column: chat, "rendered": "user: Hello"}) + "\n")
    assert text(path=str(lines), text_column="rendered") == "user: Hello"


@pytest.mark.parametrize("line", ['{"text": "b"', '["text"]', '"text"', '{"body": "b"}'])
def test_bad_lines_are_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "a"}}\n\n{line}\n')
    assert refusal(path=str(file)).startswith(f"path: {file}: line 3: ")
    assert text(path=str(file), max_text_rows=1) == "a"


def test_bad_parquet(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", text=["a" * 100, "b" * 100])
    damaged = bytearray(file.read_bytes())
    damaged[4:40] = b"\xff" * 36  # the header of the first page; the footer stays whole
    file.write_bytes(b"no parquet")
    assert refusal(path=str(file)).startswith(f"path: {file}: not a parquet file")
    file.write_bytes(damaged)
    assert str(file) in refusal(path=str(file))


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


def test_identity_of_a_data_set_is_where_it_lies() -> None:
    base = {"dataset": "org/data"}
    changes: list[dict[str, Any]] = [
        {}, {"dataset": "org/other"}, {"dataset_path": "org/other2"}, {"dataset_name": "en"}, {"split": "dev"},
        {"text_column": "body"}, {"max_text_rows": 5}, {"dataset_data_files": "f"}, {"revision": "v1"},
    ]  # fmt: skip
    seen = [json.dumps(corpus.identity(spec(**{**base, **keys})), sort_keys=True) for keys in changes]
    assert len(set(seen)) == len(changes)
    assert corpus.identity(spec(**base, eval_len=8, dataset_display_name="x")) == json.loads(seen[0])


@pytest.mark.usefixtures("offline")
def test_identity_of_a_local_data_set_follows_its_content(tmp_path: Path) -> None:
    keys = numbered(tmp_path / "a.jsonl", 5)
    before, identity = text(**keys), corpus.identity(spec(**keys))
    numbered(tmp_path / "a.jsonl", 6)
    os.utime(tmp_path / "a.jsonl", (9, 9))
    assert text(**keys) != before
    assert corpus.identity(spec(**keys)) != identity
