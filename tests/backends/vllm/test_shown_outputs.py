"""What modules return in a real vLLM: equal runs, a wrong weight, noise, and whole layers."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from compare_q.backends.base import ModuleDifference
from compare_q.backends.common.errors import ModelError
from compare_q.backends.hf.transformers_engine import TransformersEngine
from compare_q.backends.vllm.vllm_engine import VllmEngine
from tests.support.toy import ATOL_LOGIT, planned, toy_windows, with_changed_weight
from tests.support.vllm_engine import engine, scores_of

pytestmark = pytest.mark.engine
(WINDOW,) = toy_windows(1, 100)
"""Longer than a step of ``toy_engine``."""


@pytest.fixture
def outputs(toy_engine: VllmEngine, tmp_path: Path) -> Path:
    """The outputs of the toy in steps of 64 tokens."""
    toy_engine.record_outputs(WINDOW, tmp_path / "outputs")
    return tmp_path / "outputs"


def first_change(differences: list[ModuleDifference]) -> tuple[str, str]:
    """Return name and side of the first place that is not equal."""
    for place, difference in differences:
        if difference:
            return place.name, place.side
    return "", ""


def test_a_second_run_is_equal_and_scores_are_as_before(
    toy_engine: VllmEngine, outputs: Path
) -> None:
    before = scores_of(toy_engine, [WINDOW])[WINDOW.index].logprob
    differences = toy_engine.compare_outputs(WINDOW, outputs)
    names = {place.name for place, _ in differences}
    assert {
        "embed_tokens",
        "layers.0.self_attn.qkv_proj",
        "layers.1.self_attn.attn",
        "layers.1.mlp.down_proj",
        "layers.1",
        "norm",
    } <= names
    assert first_change(differences) == ("", "")
    after = scores_of(toy_engine, [WINDOW])[WINDOW.index].logprob
    assert (before == after).all()


def test_a_wrong_weight_and_noise_show_where_they_are(
    toy_model: Path, outputs: Path, tmp_path: Path, logs: Path
) -> None:
    """Noise is added to the output of each decoder layer."""
    folder = with_changed_weight(toy_model, tmp_path / "wrong", "model.layers.1.mlp.down_proj")
    steps = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    with engine(folder, logs / "wrong.log", **steps) as wrong:
        differences = wrong.compare_outputs(WINDOW, outputs)
    assert first_change(differences) == ("layers.1.mlp.down_proj", "output")
    with engine(toy_model, logs / "noisy.log", noise="bf16", noise_seed=3, **steps) as noisy:
        differences = noisy.compare_outputs(WINDOW, outputs)
    assert first_change(differences) == ("layers.0", "output")
    # One rounding is about 2^-9 of the state.
    size = next(difference for _, difference in differences if difference)
    assert size == pytest.approx(2**-9, rel=0.1)


def test_states_are_those_of_transformers(toy_model: Path, tmp_path: Path, logs: Path) -> None:
    """The sum of a layer's hidden states and residual in vLLM, the output in Transformers."""
    file = tmp_path / "outputs"
    reference = TransformersEngine(
        planned("toy", "transformers", str(toy_model), 100, {"dtype": "float32"})
    )
    reference.load()
    with closing(reference):
        reference.record_outputs(WINDOW, file)
    with engine(toy_model, logs / "whole.log") as whole:
        differences = whole.compare_outputs(WINDOW, file)
    sizes = {place.name: difference for place, difference in differences if place.is_layer}
    assert list(sizes) == ["layers.0", "layers.1"]
    assert max(sizes.values()) < ATOL_LOGIT
    logits = [difference for place, difference in differences if place.name == "lm_head"]
    assert logits
    assert max(logits) < ATOL_LOGIT


def test_other_steps_are_refused(toy_model: Path, outputs: Path, logs: Path) -> None:
    with engine(toy_model, logs / "steps.log") as whole, pytest.raises(ModelError, match="steps"):
        whole.compare_outputs(WINDOW, outputs)
