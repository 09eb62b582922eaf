"""Data sets of the hub: the real ``datasets`` and a stand-in for the hub (tests/support/hub.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, hub_layouts
from tests.support.hub import Client, Hub

pytestmark = pytest.mark.engine

READ = """
one = spec(**{keys})
said = Watch()
hub_datasets.fetch(one, Progress(quiet=True))
value = corpus.load_rows(one, Progress(quiet=True))
"""
TALKS = """
from compare_q.eval.specs import spec_files
from compare_q.eval.text import conversations
(data,) = spec_files.load_data_specs([pathlib.Path({file!r})])
value = [talk.messages for talk in conversations.read(data, Progress(quiet=True))]
"""
WIKI2 = "wikitext-2-raw-v1"
EIGHT = [f"en/c4-validation.{i:05d}-of-00008.json.gz" for i in range(8)]
# Name -> repository, first row, number of rows, the requested data files.
KNOWN: dict[str, tuple[str, str, int, list[str]]] = {
    "wiki2": (
        "Salesforce/wikitext",
        " = wikitext-2-raw-v1 test = \n",
        3,
        [f"{WIKI2}/test-00000-of-00001.parquet"],
    ),
    # Already in the cache.
    "wikitext2": ("Salesforce/wikitext", " = wikitext-2-raw-v1 test = \n", 3, []),
    "code": (
        "code-search-net/code_search_net",
        "def test_0(): pass",
        1000,
        ["python/test/0000.parquet"],
    ),
    "ptb": (
        "ptb-text-only/ptb_text_only",
        " = ptb test = \n",
        3,
        ["penn_treebank/test/0000.parquet"],
    ),
    "c4": ("allenai/c4", "c4 en validation file 0", 8, EIGHT),
    "fineweb": (
        "HuggingFaceFW/fineweb",
        "fineweb file 0 row 0",
        1000,
        ["sample/10BT/000_00000.parquet", "sample/10BT/001_00000.parquet"],
    ),
}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub() as server:
        hub_layouts.add_all(server)
        yield server


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def client(hub: Hub, home: Path) -> Iterator[Client]:
    with Client(hub, home) as process:
        yield process


@pytest.fixture(scope="module")
def away(hub: Hub, home: Path, client: Client) -> Iterator[Client]:
    """A client with the cache that other tests have filled, without a hub."""
    client.run(READ.format(keys={"dataset": "wiki2"}))
    # Nothing listens on port 1.
    with Client(hub, home, HF_ENDPOINT="http://127.0.0.1:1") as process:
        yield process


def read(client: Client, **keys: Any) -> list[str]:
    rows = client.run(READ.format(keys=keys))
    assert isinstance(rows, list)
    return rows


def refusal(client: Client, **keys: Any) -> str:
    return client.refusal(READ.format(keys=keys))


def data_files(client: Client, path: str) -> list[str]:
    """Return the data files that the last run of a client requested from a repository."""
    metadata_files = ("README.md", ".huggingface.yaml", "dataset_infos.json")
    names = set()
    for request in client.asked:
        prefix, _, revision_and_name = request.path.partition("/resolve/")
        name = revision_and_name.partition("/")[2]
        if prefix != f"/datasets/{path}" or "." not in request.path:
            continue
        if name not in metadata_files and not name.endswith(".py"):
            names.add(name)
    return sorted(names)


@pytest.mark.parametrize("name", KNOWN)
def test_known_name(name: str, client: Client) -> None:
    """The rows are right, and no file of another split, language or dump is requested."""
    path, first, count, files = KNOWN[name]
    # Names of data sets are known in any case.
    rows = read(client, dataset=name.upper())
    assert (rows[0], len(rows)) == (first, count)
    assert data_files(client, path) == files
    assert client.said.read_text() == ""


@pytest.mark.parametrize(
    "file", sorted((ROOT / "eval" / "spec").glob("chat_*.json")), ids=lambda file: file.stem
)
def test_ready_specs_of_conversations(file: Path, client: Client) -> None:
    """The specs, with another tokenizer, stream the first rows of one split."""
    keys = json.loads(file.read_text())
    talks = client.run(TALKS.format(file=str(file)))
    path = keys["dataset_path"]
    first = [{"content": f"{path} 0", "role": "user"}, {"content": "Yes.", "role": "assistant"}]
    assert (talks[0], len(talks)) == (first, 2)
    assert all(f"/{keys['dataset_split']}-" in name for name in data_files(client, path))


@pytest.mark.parametrize(
    ("keys", "gold"),
    [
        ({"dataset": "c4", "max_text_rows": 1}, 1),
        ({"dataset": "fineweb", "max_text_rows": 3}, 3),
        ({"dataset": "fineweb", "split": "train[:7]"}, 7),
        ({"dataset": "fineweb", "split": "train[:7]", "max_dataset_rows": 9}, 7),
    ],
)
def test_first_rows_are_streamed(keys: dict[str, Any], gold: int, client: Client) -> None:
    assert len(read(client, **keys)) == gold
    assert len(data_files(client, KNOWN[keys["dataset"]][0])) == 1


@pytest.mark.parametrize(
    ("keys", "read_reason", "probe_reason"),
    [
        (
            {"dataset": "org/none"},
            "not on the hub, or private; check the name, or sign in",
            "not on the hub, or",
        ),
        ({"dataset": "wiki2", "split": "dev"}, f"no file {WIKI2}/dev-* on the hub", "dev-*"),
        (
            {"dataset": "wiki2", "revision": "v9"},
            "no revision 'v9' of it on the hub; see ",
            "no revision 'v9'",
        ),
        ({"dataset": "wiki2", "text_column": "body"}, "no text column 'body'; there are: text", ""),
        (
            {"dataset": "Salesforce/wikitext", "dataset_name": WIKI2, "split": "dev"},
            'Unknown split "dev"',
            "no split 'dev'; there are: train, validation, test",
        ),
        (
            {"dataset": "ptb-text-only/ptb_text_only"},
            "Dataset scripts are no longer supported",
            "Dataset scripts",
        ),
    ],
)
def test_what_is_not_there_is_one_line(
    keys: dict[str, Any], read_reason: str, probe_reason: str, client: Client
) -> None:
    """A run has this error, and so does ``would_fetch``, which does not check columns."""
    assert read_reason in refusal(client, **keys)
    if probe_reason:
        assert probe_reason in client.refusal(f"value = hub_datasets.would_fetch(spec(**{keys}))")


@pytest.mark.parametrize(
    "keys", [{"dataset": "ptb", "split": "train"}, {"dataset": "c4"}, {"dataset": "org/other"}]
)
def test_without_a_hub_the_rest_is_one_line(keys: dict[str, Any], away: Client) -> None:
    reason = "http://127.0.0.1:1 cannot be reached ([Errno 111] Connection refused)"
    assert f"in the local cache, and {reason}" in refusal(away, **keys)
