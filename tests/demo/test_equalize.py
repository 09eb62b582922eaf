"""An equalized model computes what the original computes, in weights that lie elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from demo.equalize import equalize, equalized
from tests.demo.test_pad import logits, save_llama

pytestmark = pytest.mark.engine


def test_factors_by_hand() -> None:
    """Largest weights 8 and 2 of a channel become sqrt(8 * 2) = 4 both; two query heads read one head of two values."""
    writer = torch.tensor([[8.0, -1.0], [0.5, -0.5], [0.0, 0.0]])
    reader = torch.tensor([[1.0, 8.0, 5.0], [-2.0, 4.0, 5.0]])
    equalize(writer, reader, groups=1, width=3)
    assert writer.tolist() == [[4.0, -0.5], [2.0, -2.0], [0.0, 0.0]]
    assert reader.tolist() == [[2.0, 2.0, 5.0], [-4.0, 1.0, 5.0]]
    writer, reader = torch.tensor([[4.0], [9.0]]), torch.tensor([[1.0, 1.0, 0.25, 1.0]])
    equalize(writer, reader, groups=2, width=2)
    assert writer.tolist() == [[2.0], [3.0]]
    assert reader.tolist() == [[2.0, 3.0, 0.5, 3.0]]


@pytest.mark.parametrize("tied", [True, False])
def test_an_equalized_toy_is_the_same_function(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    save_llama(tmp_path / "m", tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    after = equalized(model.state_dict(), model.config)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    layer = {name.removeprefix("model.layers.1."): weight for name, weight in after.items() if "layers.1." in name}
    assert all(bool((weight == 1).all()) for name, weight in layer.items() if "norm" in name)
    torch.testing.assert_close(layer["mlp.up_proj.weight"].abs().amax(1), layer["mlp.down_proj.weight"].abs().amax(0))
    read = layer["self_attn.o_proj.weight"].abs().amax(0).view(2, 2, 16).amax(1).flatten()
    torch.testing.assert_close(layer["self_attn.v_proj.weight"].abs().amax(1), read)
    tokens = torch.arange(3, 43)
    original = logits(tmp_path / "m", tokens)
    model.load_state_dict(after)
    model.save_pretrained(tmp_path / "e")
    assert original.std() > 0.5
    torch.testing.assert_close(logits(tmp_path / "e", tokens), original, rtol=0, atol=1e-4)


def test_biases_are_refused(tmp_path: Path) -> None:
    config: Any = type("Config", (), {"num_hidden_layers": 1})
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.v_proj\.bias"):
        equalized({"model.layers.0.self_attn.v_proj.bias": torch.zeros(2)}, config)
