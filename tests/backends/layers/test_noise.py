"""The noise: its size compared with the normal distribution by hand, its draws, and its refusals."""

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


class Returns(nn.Module):
    """A decoder layer that returns its arguments, in a tuple if there are several."""

    def forward(self, *given: Any) -> Any:
        return given if len(given) > 1 else given[0]


def started(noise: Noise, length: int) -> Noise:
    """Return noise at the beginning of a forward pass of ``length`` tokens at positions 0, 1, ..."""
    noise.begin(torch.arange(length, dtype=torch.int32), torch.arange(length))
    return noise


def test_size_in_float32() -> None:
    """A million draws determine the standard deviation to 0.07 %; the fourth moment of a normal
    distribution is 3.
    """
    layer, given = Returns(), torch.full((1000, 1000), 3.0)
    started(Noise({0: layer}, 0), 1000)
    n = (layer(given) / given - 1) / SCALE
    assert abs(n.mean()) < 0.005
    assert abs(n.std() - 1) < 0.004
    assert abs((n**4).mean() - 3) < 0.05


@pytest.mark.parametrize("shape", [(), (1,), (4, 1)])
def test_a_tokens_noise_is_its_own_in_every_batch(shape: tuple[int, ...]) -> None:
    """Two windows are in one step, or the second in two parts, or both in the order of another
    engine or run.
    """
    windows = torch.randint(0, 50_000, (2, 30)), torch.arange(30).repeat(2, 1)
    layer = Returns()
    noise = Noise({7: layer}, 3)

    def of(*rows: int) -> torch.Tensor:
        noise.begin(*(each.flatten()[list(rows)] for each in windows))
        return (
            layer(torch.ones(*shape, len(rows), 64)) if shape else layer(torch.ones(len(rows), 64))
        )

    whole, dim = of(*range(60)), len(shape)
    mixed_up = [*range(40, 60), *range(17), *range(30, 40), *range(17, 30)]
    assert torch.equal(of(*mixed_up), whole.index_select(dim, torch.tensor(mixed_up)))
    assert torch.equal(of(*range(30, 60)), whole.narrow(dim, 30, 30))
    assert len(torch.unique(whole.movedim(dim, 0).flatten(1), dim=0)) == 60
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
    """For example hyper-connections: noise on only some of the streams would have another size."""
    layer = Returns()
    noise = Noise({5: layer}, 0, pairs=True)
    with pytest.raises(ModelError, match=r"layer 5 returns \(.*, not one tensor or two of a shape"):
        layer(*given)
    noise.remove()


def test_a_layer_that_ran_without_noise_is_found() -> None:
    """Code that calls ``forward`` itself, as a compiled graph does, skips the hooks."""
    layers = {4: Returns(), 6: Returns()}
    noise = started(Noise(layers, 0), 3)
    given = torch.ones(3, 3)
    layers[4](given)
    assert torch.equal(layers[6].forward(given), given)
    assert (
        noise.missed()
        == "engine.noise: layer 6 has run without it; this model cannot be given noise"
    )
    layers[6](given)
    assert noise.remove() == ""
    assert layers[4](given) is given


def scores_of(windows: list[Window], task: ScoreRequest, **options: Any) -> list[TokenScores]:
    """Return the scores of SmolLM2 in bf16."""
    engine = TransformersEngine(planned("x", "transformers_auto_bf16", str(BASE), 512, options))
    engine.load()
    found = list(engine.score(windows, task))
    engine.close()
    return found


@pytest.mark.engine
def test_the_noise_floor_of_a_real_model(tmp_path: Path) -> None:
    """SmolLM2's noise floor is 0.0021 in Transformers; in vLLM, with the same noise, 0.0019 over
    four windows.
    """
    from transformers import AutoTokenizer

    make_models()
    text = (ROOT / "eval" / "spec" / "opticks.txt").read_text(encoding="utf-8")[:8000]
    ids = np.array(AutoTokenizer.from_pretrained(BASE)(text).input_ids, np.int32)
    windows = [Window.scored_from(row, ids[512 * row : 512 * (row + 1)]) for row in range(2)]
    assert len(windows[1].token_ids) == 512
    (tmp_path / "store").mkdir()
    scores_of(windows, ScoreRequest(record=tmp_path / "store"))
    store.seal(tmp_path / "store", {}, [window.digest for window in windows])
    task = ScoreRequest(
        reference=tmp_path / "store", vocab_size=store.Reader(tmp_path / "store").head.vocab_size
    )
    floor = np.mean([scores.kld for scores in scores_of(windows, task, noise="bf16")])
    assert 0.001 < floor < 0.004
