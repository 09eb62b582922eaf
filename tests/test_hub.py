"""Folders and hub ids, without the hub: what would be fetched is recorded, its errors are raised by hand."""

from __future__ import annotations

import fnmatch
import importlib
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from backends import hub
from tests.conftest import refusal as refusal_of

REQUEST_ID = "404 Client Error. (Request ID: Root=1-2-3)"


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that holds the folder here/model and the file here/file."""
    (tmp_path / "here" / "model").mkdir(parents=True)
    (tmp_path / "here" / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Download:
    """Stands in for ``snapshot_download``."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.calls: list[dict[str, Any]] = []

    def __call__(self, repo: str, **keys: Any) -> str:
        self.calls.append({"repo": repo, **keys})
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return str(self.outcome)


def downloads(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> Download:
    download = Download(outcome)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return download


def http_error(kind: type[errors.HfHubHTTPError], message: str) -> errors.HfHubHTTPError:
    """As the hub's client raises it; the HTTP library below it has changed its name between versions."""
    client = importlib.import_module(errors.Response.__module__.partition(".")[0])
    return kind(message, response=client.Response(404, request=client.Request("GET", "https://hub.example/api")))


def refusal(name: str, **keys: Any) -> str:
    """The one line with which a name is refused."""
    return refusal_of(hub.resolve, name, None, **keys)


@pytest.mark.parametrize(
    ("name", "gold"),
    [
        ("org/model", True),
        ("Org-1/Llama-3.1_8B", True),
        ("here/other", True),
        ("here/model", False),
        ("here/file", False),
        ("./org/model", False),
        ("../org", False),
        ("/abs/model", False),
        ("~/model", False),
        ("org/..", False),
        ("a/b/c", False),
        ("org/", False),
        ("/", False),
        ("model", False),
        ("org/my model", False),
        ("org/model\n", False),
        ("", False),
    ],
)
def test_hub_ids(name: str, gold: bool) -> None:
    assert hub.is_hub_id(name) is gold


def test_folders_need_no_hub(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download = downloads(monkeypatch, AssertionError("fetched"))
    monkeypatch.setenv("HOME", str(work / "here"))
    assert hub.resolve("here/model", None) == Path("here/model")
    assert hub.resolve(str(work / "here"), "v1", download=False) == work / "here"
    assert hub.resolve("~/model", None) == work / "here" / "model"
    for name in ("./none", "/none/at/all", "a/b/c", "~/none", "none", "here/file"):
        assert refusal(name) == f"{name}: no such folder"
    assert download.calls == []


@pytest.mark.parametrize("tokenizer_only", [False, True])
@pytest.mark.parametrize("download", [False, True])
def test_what_is_fetched(work: Path, monkeypatch: pytest.MonkeyPatch, tokenizer_only: bool, download: bool) -> None:
    recorder = downloads(monkeypatch, work / "snapshot")
    folder = hub.resolve("org/model", "v1", tokenizer_only=tokenizer_only, download=download)
    (call,) = recorder.calls
    assert folder == work / "snapshot"
    assert (call["repo"], call["revision"], call["local_files_only"]) == ("org/model", "v1", not download)

    def wanted(name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in call["allow_patterns"])

    for name in ("config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja"):
        assert wanted(name), name
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.gguf", "flax_model.msgpack"):
        assert not wanted(name), name
    assert wanted("model-00001-of-00002.safetensors") is not tokenizer_only


def test_nothing_on_disk_or_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    downloads(monkeypatch, errors.LocalEntryNotFoundError("Cannot find\nan appropriate snapshot"))
    assert refusal("org/model") == (
        "org/model: neither a folder nor found on the hub (is it reachable?) nor in the local cache"
    )
    assert refusal("org/model", download=False) == (
        "org/model: neither a folder nor found on disk or in the local cache"
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (http_error(errors.RepositoryNotFoundError, f"{REQUEST_ID}\n\nRepository Not Found for url: u."), "Not Found"),
        (http_error(errors.GatedRepoError, f"{REQUEST_ID}\n\nCannot access gated repo for url u."), "gated"),
        (http_error(errors.RevisionNotFoundError, f"{REQUEST_ID}\n\nRevision Not Found for url: u."), "Revision"),
        (http_error(errors.HfHubHTTPError, "503 Service Unavailable"), "503 Service Unavailable"),
        (errors.OfflineModeIsEnabled("offline mode\nis enabled"), "offline mode"),
        (errors.HFValidationError("Repo id must be\nalphanumeric"), "Repo id must be"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (TimeoutError(), ""),  # sockets give no text
        (errors.HTTPError("proxy refused"), "proxy refused"),  # snapshot_download passes proxy errors on
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_errors_of_the_hub_are_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str) -> None:
    downloads(monkeypatch, error)
    text = refusal("org/model")
    assert text.startswith("org/model: ")
    assert reason in text
