"""States beside a model's own in one product of its head, however the model calls its LogitsProcessor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from compare_q.backends.vllm.logits import LogitsSource
from tests.support.stores import numbers

WEIGHT = numbers(7, 4)


def model_of(*, by_name: bool) -> Any:
    """A model that halves its states before they enter the head, as some do."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    class Plain(LogitsProcessor):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.org_vocab_size, self.soft_cap, self.scale, self.logits_as_input = 7, None, 1.0, False

        def forward(self, lm_head: Any, hidden_states: torch.Tensor, embedding_bias: Any = None) -> torch.Tensor:
            return hidden_states @ lm_head.weight.T

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.processor, self.lm_head = Plain(), SimpleNamespace(weight=WEIGHT)

        def compute_logits(self, hidden_states: torch.Tensor) -> Any:
            halved = hidden_states / 2
            if by_name:
                return self.processor(lm_head=self.lm_head, hidden_states=halved)
            return self.processor(self.lm_head, halved)

    return Model()


@pytest.mark.engine
@pytest.mark.parametrize("by_name", [False, True])
def test_states_beside_enter_the_head_as_they_are(by_name: bool) -> None:
    """What was kept of a reference are the states that enter the head; the model's own halving is not theirs."""
    source = LogitsSource(model_of(by_name=by_name))
    hidden, beside = numbers(3, 4, seed=1), numbers(3, 4, seed=2)
    own, reference = source.local_beside(hidden, beside)
    torch.testing.assert_close(own, hidden / 2 @ WEIGHT.T)
    torch.testing.assert_close(reference, beside @ WEIGHT.T)
    assert torch.equal(source.states, hidden / 2)  # what a recording keeps
    torch.testing.assert_close(source.local(hidden), own)  # nothing is beside them any more
