"""The noise: its size against the normal distribution worked out by hand, its draws, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compare_q.backends import window_scores
from compare_q.backends.base import LoadRequest, Task, TokenScores, Window
from compare_q.backends.common.errors import ModelError
from compare_q.backends.hf.engine import TransformersEngine
from compare_q.backends.layers.noise import Noise, seed_of, vllm_decoder_layers
from compare_q.backends.reference import store
from demo.__main__ import BASE, ROOT, make_models
from tests.support.toy import refusal

SCALE, SPACING = 2.0**-9, 2.0**-7  # the noise; the distance of bf16 numbers from 1 to 2


class Returns(nn.Module):
    """A decoder layer that returns what it is given, in a tuple if that is more than one thing."""

    def forward(self, *given: Any) -> Any:
        return given if len(given) > 1 else given[0]


def started(noise: Noise, length: int, first: int = 0) -> Noise:
    """Noise at the beginning of a forward of ``length`` tokens at positions from 0 on: ``first``, ``first`` + 1, ..."""
    noise.begin(torch.arange(first, first + length, dtype=torch.int32), torch.arange(length))
    return noise


def draws(seed: int, number: int, like: torch.Tensor, first: int = 0) -> torch.Tensor:
    """What is left of 1 + SCALE * n after division."""
    layer = Returns()
    noise = started(Noise({number: layer}, seed), len(like), first)
    found: torch.Tensor = (layer(like) / like - 1) / SCALE
    noise.remove()
    return found


def test_size_in_float32() -> None:
    """A million draws: the standard deviation is known to 0.07 %, the fourth moment of a normal is 3."""
    n = draws(0, 0, torch.full((1000, 1000), 3.0))
    assert abs(n.mean()) < 0.005
    assert abs(n.std() - 1) < 0.004
    assert abs((n**4).mean() - 3) < 0.05


@pytest.mark.parametrize("value", [1 + SPACING, 1.5, 2 - SPACING])
def test_size_in_bfloat16(value: float) -> None:
    """The result is rounded: it moves by k spacings where the noise is within half a spacing of k."""
    layer, given = Returns(), torch.full((1000, 1000), value, dtype=torch.bfloat16)
    noise = started(Noise({0: layer}, 0), 1000)
    moved = ((layer(given).double() - value) / SPACING).flatten()
    noise.remove()
    width = SPACING / (value * SCALE)  # of a spacing, in standard deviations

    def within(k: int) -> float:
        a, b = (k - 0.5) * width, (k + 0.5) * width
        return (math.erf(b / math.sqrt(2)) - math.erf(a / math.sqrt(2))) / 2

    # Beyond 2 there are other spacings: from 2 on they are twice as wide.
    for k in (0, -1, 1) if value < 2 - SPACING else (0, -1):
        assert abs((moved == k).double().mean() - within(k)) < 0.002, k
    assert within(0) < 0.96


def test_draws_are_repeatable_and_independent() -> None:
    like = torch.ones(200, 500)
    first = draws(0, 0, like)
    assert torch.equal(draws(0, 0, like), first)
    others = [draws(*at) for at in ((0, 0, like, 1), (0, 1, like), (1, 0, like), ((1 << 20) - 1, 0, like))]
    for i, a in enumerate([first, first.roll(1, 0), *others]):
        for b in [first.roll(1, 0), *others][i:]:
            assert abs((a * b).mean()) < 5 / math.sqrt(like.numel())


@pytest.mark.parametrize("shape", [(), (1,), (4, 1)])
def test_a_tokens_noise_is_its_own_in_every_batch(shape: tuple[int, ...]) -> None:
    """Tokens of two windows in one step, the second in two parts, and in the order of another engine or another run."""
    windows = torch.randint(0, 50_000, (2, 30)), torch.arange(30).repeat(2, 1)
    layer = Returns()
    noise = Noise({7: layer}, 3)

    def of(*rows: int) -> torch.Tensor:
        noise.begin(*(each.flatten()[list(rows)] for each in windows))
        return layer(torch.ones(*shape, len(rows), 64)) if shape else layer(torch.ones(len(rows), 64))

    whole, dim = of(*range(60)), len(shape)
    mixed_up = [*range(40, 60), *range(17), *range(30, 40), *range(17, 30)]
    assert torch.equal(of(*mixed_up), whole.index_select(dim, torch.tensor(mixed_up)))
    assert torch.equal(of(*range(30, 60)), whole.narrow(dim, 30, 30))
    assert len(torch.unique(whole.movedim(dim, 0).flatten(1), dim=0)) == 60
    noise.remove()


def test_a_forward_whose_tokens_are_not_known_is_refused() -> None:
    layer = Returns()
    noise = started(Noise({2: layer}, 0), 5)
    with pytest.raises(ModelError, match=r"^engine\.noise: layer 2 returns \(4, 8\), and its tokens are 5$"):
        layer(torch.ones(4, 8))
    noise.remove()


def test_both_tensors_of_a_pair_get_the_same_factor() -> None:
    """So that it is the factor of their sum, if the next layer adds them, and of the first, if it does not."""
    layer = Returns()
    noise = started(Noise({3: layer}, 7, pairs=True), 50)
    hidden, residual = torch.randn(50, 8), torch.randn(50, 8)
    a, b = layer(hidden, residual)
    torch.testing.assert_close(a / hidden, b / residual, atol=1e-6, rtol=0)
    assert (a / hidden - 1).std() > SCALE / 2
    again = layer(hidden, None)
    assert again[1] is None
    assert not torch.equal(again[0], hidden)
    noise.remove()


def test_what_follows_the_states_is_left_alone() -> None:
    """Attention weights, router logits: in Transformers only the first is the stream."""
    layer = Returns()
    noise = started(Noise({0: layer}, 0), 4)
    states, router = torch.ones(4, 8), torch.ones(4, 8)
    found = layer(states, router, "cache")
    assert found[1] is router
    assert found[2] == "cache"
    assert not torch.equal(found[0], states)
    noise.remove()


@pytest.mark.parametrize(
    "given",
    [
        (torch.ones(2, 4), torch.ones(2, 4), torch.ones(2, 4)),
        (torch.ones(2, 4), torch.ones(2, 3, 4)),
        (torch.ones(2, 4), "cache"),
        (torch.ones(2, 4, dtype=torch.int32),),
        (None, None),
    ],
)
def test_an_unknown_stream_is_refused(given: tuple[Any, ...]) -> None:
    """Hyper-connections, for example: noise on some of the streams would be another noise."""
    layer = Returns()
    noise = Noise({5: layer}, 0, pairs=True)
    with pytest.raises(ModelError, match=r"layer 5 returns \(.*, not one tensor or two of a shape"):
        layer(*given)
    noise.remove()


def test_a_layer_that_ran_without_noise_is_found() -> None:
    """Something that calls ``forward`` itself, as a compiled graph does."""
    layers = {4: Returns(), 6: Returns()}
    noise = started(Noise(layers, 0), 3)
    given = torch.ones(3, 3)
    layers[4](given)
    assert torch.equal(layers[6].forward(given), given)
    assert noise.missed() == "engine.noise: layer 6 has run without it; this model cannot be given noise"
    layers[6](given)
    assert noise.remove() == ""
    assert layers[4](given) is given


class PPMissingLayer(nn.Identity):
    """By its name: what vLLM has in the place of another pipeline rank's layers."""


class Multimodal(nn.Module):
    """A vision tower with as many layers as its language model."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleList(Returns() for _ in range(3))
        self.language = nn.Sequential(nn.ModuleList([PPMissingLayer(), Returns(), Returns()]))

    def get_language_model(self) -> nn.Module:
        return self.language


def test_layers_of_a_pipeline_rank() -> None:
    """They keep their numbers, and so their noise; another tower's are not taken."""
    model = Multimodal()
    assert vllm_decoder_layers(model, 3) == {1: model.language[0][1], 2: model.language[0][2]}
    with pytest.raises(ModelError, match=r"^engine\.noise: Multimodal has no list of 4 decoder layers$"):
        vllm_decoder_layers(model, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": "fp8"}, "engine.noise: input should be 'bf16' (got 'fp8')"),
        ({"noise": "bf16", "noise_seed": -1}, "engine.noise_seed: input should be greater than or equal to 0"),
        ({"noise_seed": 1}, 'engine.noise_seed: needs "noise": "bf16"'),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    assert refusal(seed_of, options).startswith(message)


def scores_of(windows: list[Window], task: Task, **options: Any) -> list[TokenScores]:
    """SmolLM2 in bf16."""
    engine = TransformersEngine(LoadRequest("x", "transformers_auto_bf16", str(BASE), 512, options))
    engine.load()
    found = list(window_scores.token_scores(engine, windows, task))
    engine.close()
    return found


@pytest.mark.engine
def test_the_noise_floor_of_a_real_model(tmp_path: Path) -> None:
    """SmolLM2: 0.0021 in Transformers; in vLLM, whose noise is the same, it was 0.0019 over four windows."""
    from transformers import AutoTokenizer

    make_models()
    text = (ROOT / "eval" / "spec" / "opticks.txt").read_text(encoding="utf-8")[:8000]
    ids = np.array(AutoTokenizer.from_pretrained(BASE)(text).input_ids, np.int32)
    windows = [Window.scored_from(row, ids[512 * row : 512 * (row + 1)]) for row in range(2)]
    assert len(windows[1].token_ids) == 512
    (tmp_path / "store").mkdir()
    scores_of(windows, Task(record=tmp_path / "store"))
    store.seal(tmp_path / "store", {}, len(windows))
    task = Task(tmp_path / "store", store.Reader(tmp_path / "store").head.vocab_size)
    floor = np.mean([scores.kld for scores in scores_of(windows, task, noise="bf16")])
    assert 0.001 < floor < 0.004
