"""The contract with engines, and the shift by one on the logits that an engine returns.

The definitions are tested in tests/backends/scoring/test_statistics.py.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compare_q.backends import logits_engine
from compare_q.backends.base import ScoreRequest, TokenScores, Window
from compare_q.backends.logits_engine import LogitsEngine
from compare_q.backends.reference import comparison, head
from compare_q.backends.reference import store as reference
from tests.support.toy import brute_force, planned, toy_windows, with_gaps

REQUEST = planned("given", "given", "none", 100)


class Given(LogitsEngine):
    """An engine that returns given logits, some rows at a time; it does not provide a head."""

    def load(self) -> None: ...

    def __init__(self, logits: Mapping[int, torch.Tensor], rows: int = 1000) -> None:
        super().__init__(REQUEST)
        self.given, self.rows = logits, rows

    def pieces(self, window: Window) -> Iterator[torch.Tensor]:
        yield from self.given[window.index].split(self.rows)


def scores_of(
    logits: torch.Tensor, window: Window, task: ScoreRequest | None = None
) -> TokenScores:
    (scores,) = Given({window.index: logits}).score([window], task or ScoreRequest())
    return scores


def random_logits(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 8


SCORED = [toy_windows(1, 40)[0], toy_windows(1, 40, 7)[0], with_gaps(toy_windows(1, 40)[0])]
"""Windows that are scored from the first position on, from a later one, and in ranges."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", SCORED)
def test_against_float64(dtype: torch.dtype, window: Window) -> None:
    logits = random_logits(40, 300).to(dtype)
    found = scores_of(logits, window)
    assert found.logprob.dtype == np.float32
    assert len(found.logprob) == window.n_scored
    np.testing.assert_allclose(found.logprob, brute_force(logits, window), atol=1e-5)
    assert found.kld is None


@pytest.mark.parametrize("rows", [1, 7, 39])
@pytest.mark.parametrize("window", SCORED)
def test_logits_in_pieces_score_and_are_kept_as_whole_ones(
    tmp_path: Path, window: Window, rows: int
) -> None:
    """Chunks give the same bits, even if a chunk has no scored token, or several ranges of scored
    tokens.
    """
    logits, kept = random_logits(40, 300), {}
    for name, at_a_time in (("whole", 40), ("pieces", rows)):
        folder = tmp_path / name / "store"  # files contain the name of their folder
        folder.mkdir(parents=True)
        engine = Given({window.index: logits}, at_a_time)
        (alone,) = engine.score([window], ScoreRequest(record=folder))
        reference.seal(folder, {}, [window.digest])
        (beside,) = engine.score([window], ScoreRequest(reference=tmp_path / "whole" / "store"))
        kept[name] = (
            [each for scores in (alone, beside) for each in vars(scores).values()],
            sorted(folder.glob("row*")),
        )
    np.testing.assert_equal(kept["pieces"][0], kept["whole"][0])
    assert [file.name for file in kept["pieces"][1]] == [
        file.name for file in kept["whole"][1]
    ]  # with their checksums


@pytest.mark.parametrize("window", SCORED)
def test_divergence_of_whole_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: Window
) -> None:
    """Compare with float64 on the scored positions; chunks of 5 rows give the same result."""
    before, after = (
        random_logits(40, 300).half(),
        (random_logits(40, 300) + random_logits(40, 300, 2) / 8).half(),
    )
    (tmp_path / "store").mkdir()
    scores_of(before, window, ScoreRequest(record=tmp_path / "store"))
    reference.seal(tmp_path / "store", {}, [window.digest])
    assert reference.Reader(tmp_path / "store").reason == "this engine does not show its head"
    task = ScoreRequest(reference=tmp_path / "store", vocab_size=300)
    found = scores_of(after, window, task)
    p, q = (logits[window.positions - 1].double().log_softmax(-1) for logits in (before, after))
    assert found.kld is not None
    assert found.ref_logprob is not None
    np.testing.assert_allclose(found.kld, (p.exp() * (p - q)).sum(-1), atol=1e-5)
    np.testing.assert_allclose(found.ref_logprob, brute_force(before, window), atol=1e-5)
    np.testing.assert_array_equal(found.same_top, p.argmax(-1) == q.argmax(-1))
    monkeypatch.setattr(comparison, "CHUNK_ELEMENTS", 300 * 5)
    np.testing.assert_array_equal(scores_of(after, window, task).kld, found.kld)
    assert not np.any(scores_of(before, window, task).kld)


class Masked(Given):
    """An engine that masks a token after its head."""

    def head(self) -> tuple[torch.Tensor, None, head.Head]:
        return torch.eye(300), None, head.Head(300, "float32")

    def states(self) -> torch.Tensor:
        return self.kept

    def pieces(self, window: Window) -> Iterator[torch.Tensor]:
        for self.kept in super().pieces(window):
            yield self.kept.index_fill(1, torch.tensor([5]), -torch.inf)


def test_logits_that_are_masked_after_the_head_are_kept_as_logits(tmp_path: Path) -> None:
    """From states, the head would compute a probability for the masked token."""
    (window,) = (
        replace(window, token_ids=window.token_ids.clip(6)) for window in toy_windows(1, 40)
    )
    (tmp_path / "store").mkdir()
    (scores,) = Masked({0: random_logits(40, 300)}).score(
        [window], ScoreRequest(record=tmp_path / "store")
    )
    reference.seal(tmp_path / "store", {}, [window.digest])
    store = reference.Reader(tmp_path / "store")
    assert (store.contents, store.reason) == (
        "logits",
        "its head's product differs from its logits by inf",
    )
    assert torch.isneginf(store.window(window.digest)[:, 5]).all()
    assert np.isfinite(scores.logprob).all()


def test_the_engine_in_the_docstring_is_whole() -> None:
    """Each of its 49,152 tokens has the probability 1 / 49,152."""
    assert logits_engine.__doc__ is not None
    shown = logits_engine.__doc__[logits_engine.__doc__.index("    import ") :]
    names: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{textwrap.dedent(shown)}", names)
    request = planned("uniform", "uniform", "none", 100)
    engine = names["UniformEngine"](request)
    engine.check(request)
    engine.load()
    windows = toy_windows(2, 50)
    for scores in engine.score(windows, ScoreRequest()):
        np.testing.assert_allclose(scores.logprob, -np.log(49_152), rtol=1e-6)
    engine.close()
    assert engine.files(request).storage().vram_bits is None
    assert "torch" in engine.versions()


def test_a_planned_model_is_changed_in_a_copy_and_only_in_fields_that_it_has() -> None:
    model = planned("m", "transformers", "folder", 100)
    assert (model.updated(stamp="s").stamp, model.stamp) == ("s", "")
    with pytest.raises(TypeError, match="stmp"):
        model.updated(stmp="s")
