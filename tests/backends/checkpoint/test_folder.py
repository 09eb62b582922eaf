"""A model that is a folder: once it is fetched, nothing asks the hub about it again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backends.base import LoadRequest
from backends.checkpoint.folder import FolderModel
from backends.hf.backend import TransformersBackend
from backends.hub import repositories
from tests.support.toy import refusal


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever resolves a name a second time fails."""

    def resolve(name: str, *_: object, **__: object) -> Path:
        raise AssertionError(f"{name} was resolved again")

    monkeypatch.setattr(repositories, "resolve", resolve)


@pytest.mark.parametrize("ask", [FolderModel.facts, FolderModel.stamp, FolderModel.content])
def test_a_folder_is_not_resolved_again(ask: Callable[[LoadRequest], object], toy_model: Path) -> None:
    ask(LoadRequest("x", "transformers", str(toy_model), 10))
    gone = LoadRequest("x", "transformers", str(toy_model / "gone"), 10)
    assert refusal(ask, gone) == f"{toy_model / 'gone'}: no such folder"


def test_a_backend_knows_its_folder(toy_model: Path) -> None:
    backend = TransformersBackend(LoadRequest("x", "transformers", str(toy_model), 10))
    assert backend.folder == toy_model
    assert backend.storage().bpw_layer == 16.0
