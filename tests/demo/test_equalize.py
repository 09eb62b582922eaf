"""An equalized model computes the same as the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from demo.equalize import equalized
from tests.support import toy

pytestmark = pytest.mark.engine


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return logits [L, V] in float32 of the model in a folder, computed in its own dtype."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.inference_mode():
        result: torch.Tensor = model(tokens[None]).logits[0].float()
    return result


def save_llama(folder: Path, **shape: Any) -> None:
    """Save a Llama: two layers, hidden size 64, 4 query and 2 key/value heads; random float32
    weights.
    """
    from transformers import AutoModelForCausalLM

    shape |= {
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "head_dim": 16,
        "rms_norm_eps": 0.1,
    }
    model = AutoModelForCausalLM.from_pretrained(toy.save_llama(folder, dtype="float32", **shape))
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(weight, mean=1.0, std=0.3)
    model.save_pretrained(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_an_equalized_toy_is_the_same_function(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    save_llama(tmp_path / "m", tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    after = equalized(model.state_dict(), model.config)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    layer = {
        name.removeprefix("model.layers.1."): weight
        for name, weight in after.items()
        if "layers.1." in name
    }
    assert all(bool((weight == 1).all()) for name, weight in layer.items() if "norm" in name)
    torch.testing.assert_close(
        layer["mlp.up_proj.weight"].abs().amax(1), layer["mlp.down_proj.weight"].abs().amax(0)
    )
    read = layer["self_attn.o_proj.weight"].abs().amax(0).view(2, 2, 16).amax(1).flatten()
    torch.testing.assert_close(layer["self_attn.v_proj.weight"].abs().amax(1), read)
    tokens = torch.arange(3, 43)
    original = logits(tmp_path / "m", tokens)
    model.load_state_dict(after)
    model.save_pretrained(tmp_path / "e")
    assert original.std() > 0.5
    torch.testing.assert_close(logits(tmp_path / "e", tokens), original, rtol=0, atol=1e-4)
