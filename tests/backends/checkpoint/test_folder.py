"""A model that is a folder: once it is fetched, nothing asks the hub about it again."""

from __future__ import annotations

from pathlib import Path

import pytest

from compare_q.backends import hub
from compare_q.backends.base import LoadRequest
from compare_q.backends.checkpoint.folder import HuggingFaceFolder
from tests.support.toy import refusal


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever resolves a name a second time fails."""

    def resolve(name: str, *_: object, **__: object) -> Path:
        raise AssertionError(f"{name} was resolved again")

    monkeypatch.setattr(hub, "resolve", resolve)


@pytest.mark.parametrize("ask", ["facts", "stamp", "content"])
def test_a_folder_is_not_resolved_again(ask: str, toy_model: Path) -> None:
    def asked(folder: Path) -> object:
        return getattr(HuggingFaceFolder(LoadRequest("x", "transformers", str(folder), 10)), ask)()

    asked(toy_model)
    assert refusal(asked, toy_model / "gone") == f"{toy_model / 'gone'}: no such folder"
