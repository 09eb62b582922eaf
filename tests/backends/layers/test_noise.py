"""The noise: its size compared with the normal distribution, its draws, and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compare_q.backends.base import ScoreRequest, TokenScores, Window
from compare_q.backends.common.errors import ModelError
from compare_q.backends.hf.transformers_engine import TransformersEngine
from compare_q.backends.layers.noise import Noise
from compare_q.backends.reference import store
from demo.__main__ import BASE, ROOT, make_models
from tests.support.toy import planned

SCALE = 2.0**-9
LENGTH = 256
"""Tokens of a window of a real model."""


class Returns(nn.Module):
    """A decoder layer that returns its arguments, in a tuple if there are several."""

    def forward(self, *arguments: Any) -> Any:
        if len(arguments) > 1:
            return arguments
        return arguments[0]


def started(noise: Noise, length: int) -> Noise:
    """Return noise at the beginning of a forward pass of ``length`` tokens from position 0."""
    noise.begin(torch.arange(length, dtype=torch.int32), torch.arange(length))
    return noise


def test_size_in_float32() -> None:
    """A million draws determine the standard deviation to 0.07 %.

    The fourth moment of a normal distribution is 3.
    """
    layer = Returns()
    states = torch.full((1000, 1000), 3.0)
    started(Noise({0: layer}, 0), 1000)
    n = (layer(states) / states - 1) / SCALE
    # Five standard errors or more: 0.001, 0.0007, and sqrt(105 - 9) / 1,000 = 0.01, since the
    # eighth moment is 105.
    assert abs(n.mean()) < 0.005
    assert abs(n.std() - 1) < 0.004
    assert abs((n**4).mean() - 3) < 0.05


@pytest.mark.parametrize("shape", [(), (1,), (4, 1)])
def test_a_tokens_noise_is_its_own_in_every_batch(shape: tuple[int, ...]) -> None:
    """Two windows are in one step, or the second is in two parts, or both are in another order."""
    token_ids = torch.randint(0, 50_000, (60,))
    positions = torch.arange(30).repeat(2)
    layer = Returns()
    noise = Noise({7: layer}, 3)

    def noisy(rows: list[int]) -> torch.Tensor:
        noise.begin(token_ids[rows], positions[rows])
        output: torch.Tensor = layer(torch.ones(*shape, len(rows), 64))
        return output

    both = noisy([*range(60)])
    dim = len(shape)
    mixed_up = [*range(40, 60), *range(17), *range(30, 40), *range(17, 30)]
    assert torch.equal(noisy(mixed_up), both.index_select(dim, torch.tensor(mixed_up)))
    assert torch.equal(noisy([*range(30, 60)]), both.narrow(dim, 30, 30))
    assert len(torch.unique(both.movedim(dim, 0).flatten(1), dim=0)) == 60
    noise.remove()


@pytest.mark.parametrize(
    "output",
    [
        (torch.ones(2, 4), torch.ones(2, 4), torch.ones(2, 4)),
        (torch.ones(2, 4), torch.ones(2, 3, 4)),
        (torch.ones(2, 4), "cache"),
        (torch.ones(2, 4, dtype=torch.int32),),
        (None, None),
    ],
)
def test_an_unknown_stream_is_refused(output: tuple[Any, ...]) -> None:
    """For example hyper-connections: noise on only some of the streams would have another size."""
    layer = Returns()
    noise = Noise({5: layer}, 0, pairs=True)
    with pytest.raises(ModelError, match=r"layer 5 returns \(.*, not one tensor or two of a shape"):
        layer(*output)
    noise.remove()


def test_a_layer_that_ran_without_noise_is_found() -> None:
    """Code that calls ``forward`` itself, as a compiled graph does, skips the hooks."""
    layers = {4: Returns(), 6: Returns()}
    noise = started(Noise(layers, 0), 3)
    states = torch.ones(3, 3)
    layers[4](states)
    assert torch.equal(layers[6].forward(states), states)
    missed = "engine.noise: layer 6 has run without it; this model cannot be given noise"
    assert noise.missed() == missed
    layers[6](states)
    assert noise.remove() == ""
    assert layers[4](states) is states


def scores_of(windows: list[Window], task: ScoreRequest, **options: Any) -> list[TokenScores]:
    """Return the scores of SmolLM2 in bf16."""
    engine = TransformersEngine(planned("x", "transformers_auto_bf16", str(BASE), LENGTH, options))
    engine.load()
    scores = list(engine.score(windows, task))
    engine.close()
    return scores


@pytest.mark.engine
def test_the_noise_floor_of_a_real_model(tmp_path: Path) -> None:
    """SmolLM2's noise floor over two windows is 0.0021 in Transformers.

    In vLLM, with the same noise, it is 0.0019 over four windows.
    """
    from transformers import AutoTokenizer

    make_models()
    # 2,000 characters are more than a window.
    text = (ROOT / "eval" / "spec" / "opticks.txt").read_text(encoding="utf-8")[:2000]
    ids = np.array(AutoTokenizer.from_pretrained(BASE)(text).input_ids, np.int32)
    window = Window.scored_from(0, ids[:LENGTH])
    assert len(window.token_ids) == LENGTH
    folder = tmp_path / "store"
    folder.mkdir()
    scores_of([window], ScoreRequest(record=folder))
    store.seal(folder, {}, [window.digest])
    vocab_size = store.Reader(folder).head.vocab_size
    task = ScoreRequest(reference=folder, vocab_size=vocab_size)
    floor = np.mean([scores.kld for scores in scores_of([window], task, noise="bf16")])
    # About half and twice the known values.
    assert 0.001 < floor < 0.004
