"""Trials with Transformers: their scores, shared prefixes, and both models afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compare_q.backends.base import ScoreRequest, Trial, Window
from compare_q.backends.hf.exchange import Exchange
from compare_q.backends.hf.model_pair import ModelPair
from compare_q.backends.hf.transformers_engine import TransformersEngine
from compare_q.backends.restoring import TrialScore
from tests.support.mixed import save_mixed
from tests.support.stores import recorded
from tests.support.toy import log_softmax, toy_windows, with_gaps
from tests.support.transformers_models import loaded

pytestmark = pytest.mark.engine

WINDOWS = [with_gaps(toy_windows(1, 60)[0]), *toy_windows(2, 40)[1:]]
DTYPES = {"W4A16": "float32", "NVFP4": "bfloat16"}
"""The dtype of the trials of each preset; NVFP4 also rounds activations, and needs bfloat16."""
MODULES = ("layers.0.self_attn.v_proj", "layers.1.mlp.down_proj")
BY_LAYER = [
    Trial(()),
    Trial(("layers.1.mlp.down_proj",)),
    Trial(("layers.1.self_attn.q_proj", "layers.1.mlp.up_proj")),
    Trial(("layers.0.mlp.gate_proj",)),
    Trial(("layers.1",)),
    Trial((), "reference"),
    Trial(("layers.1.mlp.down_proj",), "reference"),
    Trial(MODULES, "reference"),
]


@pytest.fixture(scope="module", params=DTYPES)
def models(
    request: pytest.FixtureRequest, quantized: Callable[[str], Path], toy_model: Path
) -> tuple[TransformersEngine, TransformersEngine]:
    """A quantized toy and its reference, loaded in one dtype."""
    dtype = DTYPES[request.param]
    return loaded(quantized(request.param), dtype=dtype), loaded(toy_model, dtype=dtype)


@pytest.fixture(scope="module")
def int4(
    quantized: Callable[[str], Path], toy_model: Path
) -> tuple[TransformersEngine, TransformersEngine]:
    """The toy in W4A16, and its reference."""
    return loaded(quantized("W4A16"), dtype="float32"), loaded(toy_model, dtype="float32")


def by_trial(scores: Iterator[TrialScore]) -> dict[tuple[int, int], TrialScore]:
    """Return scores by trial and window."""
    return {(score.trial, score.window): score for score in scores}


def all_names(engine: TransformersEngine, reference: TransformersEngine) -> tuple[str, ...]:
    """Return the names of all modules that can be exchanged."""
    return tuple(module.name for module in engine.exchangeable(reference))


def exact_kld(reference: torch.Tensor, logits: torch.Tensor, window: Window) -> float:
    """Return the sum of the KL divergences of a window's scored tokens in float64."""
    total = 0.0
    for position in window.positions.tolist():
        ref_row = log_softmax(reference[position - 1].double().tolist())
        row = log_softmax(logits[position - 1].double().tolist())
        for ref_logprob, logprob in zip(ref_row, row, strict=True):
            total += np.exp(ref_logprob) * (ref_logprob - logprob)
    return total


def ordinary_klds(
    engine: TransformersEngine, reference: TransformersEngine, folder: Path
) -> list[float]:
    """Return the sums of the KL divergences of an ordinary run with a reference store."""
    store = recorded(reference, WINDOWS, folder)
    sums = []
    for scores in engine.score(WINDOWS, ScoreRequest(reference=store)):
        assert scores.kld is not None
        sums.append(float(scores.kld.astype(np.float64).sum()))
    return sums


def test_the_whole_kld_is_that_of_an_ordinary_run(
    int4: tuple[TransformersEngine, TransformersEngine], tmp_path: Path
) -> None:
    engine, reference = int4
    scores = list(engine.trials(reference, WINDOWS, [Trial(())]))
    assert [score.window for score in scores] == [window.index for window in WINDOWS]
    assert [score.tokens for score in scores] == [window.n_scored for window in WINDOWS]
    assert all(score.is_known for score in scores)
    klds = [score.kld for score in scores]
    assert klds == pytest.approx(ordinary_klds(engine, reference, tmp_path), rel=1e-6)
    exact = []
    for window in WINDOWS:
        exact.append(exact_kld(reference.logits(window), engine.logits(window), window))
    assert klds == pytest.approx(exact, rel=1e-6)
    assert min(exact) > 1.0


def test_nothing_is_left_if_everything_is_restored(
    models: tuple[TransformersEngine, TransformersEngine],
) -> None:
    """The reference with all modules quantized has the whole divergence."""
    engine, reference = models
    names = all_names(engine, reference)
    assert len(names) == 14
    trials = [
        Trial(()),
        Trial(names),
        Trial((), "reference"),
        Trial(names, "reference"),
        Trial(("layers.0", "layers.1")),
    ]
    scores = by_trial(engine.trials(reference, WINDOWS, trials))
    for window in WINDOWS:
        klds = [scores[index, window.index].kld for index in range(len(trials))]
        assert klds[0] > 1.0
        assert klds == [klds[0], 0.0, 0.0, klds[0], 0.0]


def test_a_trial_is_a_checkpoint_that_ignores_its_modules(
    models: tuple[TransformersEngine, TransformersEngine], toy_model: Path, tmp_path: Path
) -> None:
    """Weights and activations of a restored module are the reference's."""
    engine, reference = models
    mixed_folder = save_mixed(
        engine.checkpoint.folder,
        toy_model,
        tmp_path / "mixed",
        [f"model.{name}" for name in MODULES],
    )
    mixed = loaded(mixed_folder, dtype=engine.options.dtype)
    names = all_names(engine, reference)
    others = tuple(name for name in names if name not in MODULES)
    trials = [Trial(MODULES), Trial(others, "reference"), Trial(())]
    scores = by_trial(engine.trials(reference, WINDOWS, trials))
    expected = [score.kld for score in mixed.trials(reference, WINDOWS, [Trial(())])]
    for index in (0, 1):
        klds = [scores[index, window.index].kld for window in WINDOWS]
        assert klds == pytest.approx(expected, rel=1e-6)
    whole = np.array([scores[2, window.index].kld for window in WINDOWS])
    # Equal sums would prove nothing if the modules did not matter.
    assert (np.abs(whole - expected) > 0.01 * whole).all()


def scored(
    engine: TransformersEngine, reference: TransformersEngine, *, shares_prefix: bool
) -> dict[tuple[int, int], TrialScore]:
    """Return the scores of ``BY_LAYER``."""
    exchange = Exchange(ModelPair(engine, reference), BY_LAYER, shares_prefix=shares_prefix)
    scores: dict[tuple[int, int], TrialScore] = {}
    for window in WINDOWS:
        scores |= by_trial(exchange.scores(window))
    return scores


def test_shared_prefixes_change_no_bit(
    models: tuple[TransformersEngine, TransformersEngine],
) -> None:
    engine, reference = models
    n_runs = 0

    def count(*_: Any) -> None:
        nonlocal n_runs
        n_runs += 1

    # It runs only if the layer is computed.
    handle = engine.model.model.layers[0].mlp.register_forward_hook(count)
    shared = scored(engine, reference, shares_prefix=True)
    n_runs_shared = n_runs
    n_runs = 0
    alone = scored(engine, reference, shares_prefix=False)
    handle.remove()
    assert shared == alone
    assert len(alone) == len(BY_LAYER) * len(WINDOWS)
    # One pass and the trial that begins in layer 0; without sharing, all five trials.
    assert (n_runs_shared, n_runs) == (2 * len(WINDOWS), 5 * len(WINDOWS))


def test_layers_that_share_numbers_are_all_computed(
    int4: tuple[TransformersEngine, TransformersEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some models pass keys and values of a layer to later ones."""
    box: list[torch.Tensor] = []
    for engine in int4:
        first, second = engine.model.model.layers

        def giving(*args: Any, inner: Any = first.forward, **keys: Any) -> Any:
            output = inner(*args, **keys)
            box.append(output.mean())
            return output

        def taking(*args: Any, inner: Any = second.forward, **keys: Any) -> Any:
            return inner(*args, **keys) + box.pop()

        monkeypatch.setitem(vars(first), "forward", giving)
        monkeypatch.setitem(vars(second), "forward", taking)
    shared = scored(*int4, shares_prefix=True)
    assert shared == scored(*int4, shares_prefix=False)


def state_of(engine: TransformersEngine) -> list[tuple[str, int, Any, Any]]:
    """Return every module's path and identity, its own ``forward``, and its hooks."""
    state = []
    for path, module in engine.model.named_modules():
        forward = vars(module).get("forward")
        state.append((path, id(module), forward, dict(module._forward_hooks)))
    return state


@pytest.mark.parametrize("end", ["complete", "error", "closed"])
def test_both_models_are_as_before(
    int4: tuple[TransformersEngine, TransformersEngine],
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> None:
    engine, reference = int4
    first_layer = engine.model.model.layers[0]
    n_calls = 0

    # As accelerate sets it.
    def own_forward(*args: Any, inner: Any = first_layer.forward, **keys: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        return inner(*args, **keys)

    monkeypatch.setitem(vars(first_layer), "forward", own_forward)
    logits = [engine.logits(WINDOWS[0]), reference.logits(WINDOWS[0])]
    states = [state_of(engine), state_of(reference)]
    n_calls = 0
    scores = engine.trials(reference, WINDOWS, BY_LAYER)
    if end == "complete":
        list(scores)
    elif end == "closed":
        # Two of base "reference", and two with restored modules.
        for _ in range(5):
            next(scores)
        scores.close()  # type: ignore[attr-defined]
    else:
        module = reference.model.model.layers[1].mlp.down_proj

        def fail_if_exchanged(*args: Any, inner: Any = module.forward, **keys: Any) -> Any:
            if engine.model.model.layers[1].mlp.down_proj is module:
                raise RuntimeError("told to fail")
            return inner(*args, **keys)

        with monkeypatch.context() as in_this_block:
            in_this_block.setitem(vars(module), "forward", fail_if_exchanged)
            with pytest.raises(RuntimeError, match="told to fail"):
                list(scores)
    assert n_calls > 0
    assert [state_of(engine), state_of(reference)] == states
    assert torch.equal(engine.logits(WINDOWS[0]), logits[0])
    assert torch.equal(reference.logits(WINDOWS[0]), logits[1])
