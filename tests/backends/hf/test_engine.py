"""The Transformers engine on a toy model, compared with brute force."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module

from compare_q.backends.base import ScoreRequest, Window
from compare_q.backends.common.errors import ModelError
from compare_q.backends.hf import transformers_engine as hf
from compare_q.backends.hf.transformers_engine import TransformersEngine
from compare_q.backends.reference.head import Head, head_logits
from tests.support.long_window import LOGITS, LONG, VOCAB, growth
from tests.support.toy import TOY_VOCAB, brute_force, save_llama, toy_windows, with_gaps
from tests.support.transformers_models import loaded

pytestmark = pytest.mark.engine


def test_scores_against_float64(toy_model: Path) -> None:
    engine = loaded(toy_model, dtype="float32")
    windows = [with_gaps(window) for window in toy_windows(3, 60)]
    for scores, window in zip(engine.score(windows, ScoreRequest()), windows, strict=True):
        gold = brute_force(engine.logits(window), window)
        assert scores.window == window.index
        np.testing.assert_allclose(scores.logprob, gold, atol=1e-5)
    engine.close()


def test_states_and_head_give_the_logits(toy_model: Path) -> None:
    engine = loaded(toy_model, dtype="bfloat16")
    head = engine.head()
    weight, bias, facts = head
    assert (tuple(weight.shape), bias, facts) == ((320, 64), None, Head(320, "bfloat16"))
    (window,) = toy_windows(1, 40)
    logits = engine.logits(window)
    assert tuple(engine.states().shape) == (40, 64)
    # The largest relative spacing of bfloat16, which has 8 significant bits.
    torch.testing.assert_close(
        head_logits(facts, engine.states(), weight, bias), logits, atol=0, rtol=2**-7
    )
    engine.close()


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.7}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    # Each head has 64 / 2 = 32 dimensions, which make 16 pairs.
    "short_factor": [1.0] * 16,
    "long_factor": [2.0 + 0.1 * index for index in range(16)],
}
LAYER_TYPES = ["sliding_attention", "full_attention"]
ROTARY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("Llama", {"rope_parameters": DYNAMIC}),
    "longrope": ("Llama", {"rope_parameters": LONG_ROPE}),
    "a type per kind of layer": (
        "Gemma3",
        {
            "rope_parameters": dict(zip(LAYER_TYPES, (DYNAMIC, LONG_ROPE), strict=True)),
            "layer_types": LAYER_TYPES,
            "head_dim": 32,
            "sliding_window": 16,
            "pad_token_id": 0,
        },
    ),
}
"""Models with 32 positions of training, whose rotary factors change with a window's length."""


@pytest.mark.parametrize(
    "options", [{}, {"streaming": True, "streaming_windows": 4}], ids=["whole", "streamed"]
)
@pytest.mark.parametrize("kind", ROTARY_MODELS)
def test_a_windows_logits_do_not_depend_on_other_windows(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    """Windows in any order give the logits that Transformers gives in a new process.

    24 and 32 tokens have the original factors, 40 and 100 tokens others.
    """
    family, keys = ROTARY_MODELS[kind]
    folder = save_llama(tmp_path, family, max_position_embeddings=32, dtype="float32", **keys)
    windows = [toy_windows(1, length)[0] for length in (24, 32, 40, 100)]
    expected = []
    for window in windows:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        token_ids = torch.from_numpy(window.token_ids).long()[None]
        with torch.inference_mode():
            expected.append(model(token_ids, use_cache=False).logits[0])
    engine = loaded(folder, dtype="float32", **options)
    for order in ((0, 1, 2, 3), (3, 0, 2, 1), (3, 3, 2, 2, 0, 0, 1)):
        engine.prepare([windows[index] for index in order])
        for index in order:
            assert torch.equal(engine.logits(windows[index]), expected[index])
    engine.close()


def test_dynamic_factors_are_reported(toy_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(toy_model, tmp_path / "dynamic"))
    config = json.loads((folder / "config.json").read_text())
    rope = {**DYNAMIC, "factor": 4.0}
    (folder / "config.json").write_text(
        json.dumps(config | {"rope_parameters": rope, "max_position_embeddings": 32})
    )
    engine = loaded(folder, dtype="float32")
    assert engine.provenance()["rope"] == {"type": "dynamic", "factor": 4.0, "original_context": 32}
    engine.close()


def test_noise_is_the_seeds(toy_model: Path) -> None:
    """Noise depends on the seed alone, not on earlier windows.

    Without its hooks, the model's logits are as before.
    """
    windows = toy_windows(3, 60)
    plain = loaded(toy_model, "transformers_auto_bf16")
    first = loaded(toy_model, "transformers_auto_bf16", noise="bf16")
    again = loaded(toy_model, "transformers_auto_bf16", noise="bf16", noise_seed=0)
    other = loaded(toy_model, "transformers_auto_bf16", noise="bf16", noise_seed=1)
    for window in windows:
        logits = first.logits(window)
        assert torch.equal(logits, again.logits(window))
        assert not torch.equal(logits, other.logits(window))
        assert not torch.equal(logits, plain.logits(window))
    # An earlier window again, as in a run that resumes after a crash.
    assert torch.equal(first.logits(windows[1]), again.logits(windows[1]))
    noise = first.provenance()["noise"]
    assert (noise["scale"], noise["seed"]) == (2**-9, 0)
    assert len(first.provenance()["notes"]) == 1
    assert not {"noise", "notes"} & plain.provenance().keys()
    assert "noise_seed" not in plain.provenance()["options"]
    first.noise.remove()
    assert torch.equal(first.logits(windows[0]), plain.logits(windows[0]))


def in_pieces(
    engine: TransformersEngine, window: Window
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(logits, engine.states()) for logits in engine.pieces(window)]


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16", "noise": "bf16"}])
def test_a_long_window_in_pieces(
    toy_model: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    """The layers run once, and the rest of the model for 30 positions at a time.

    The second time with accelerate's hooks.
    """
    engine = loaded(toy_model, **options)
    (window,) = toy_windows(1, 100)
    weight, bias, facts = engine.head()
    whole = engine.logits(window)
    # 30 rows and a part of another one, which must not count.
    monkeypatch.setattr(hf, "PIECE_ELEMENTS", 30 * TOY_VOCAB + 7)
    runs: list[int] = []
    engine.model.model.layers[0].register_forward_hook(lambda *_: runs.append(1))
    tolerance = 2**-6
    if options["dtype"] == "float32":
        tolerance = 1e-5
    for _ in range(2):
        all_logits = []
        for logits, states in in_pieces(engine, window):
            all_logits.append(logits)
            recomputed = head_logits(facts, states, weight, bias)
            torch.testing.assert_close(recomputed, logits, atol=tolerance, rtol=tolerance)
        assert [len(logits) for logits in all_logits] == [30, 30, 30, 10]
        torch.testing.assert_close(torch.cat(all_logits), whole, atol=tolerance, rtol=tolerance)
        add_hook_to_module(engine.model.model, ModelHook())
    # The first layer runs once for each of two windows, not for each piece.
    assert len(runs) == 2
    engine.close()


def test_a_head_that_depends_on_the_window_is_found(
    toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If logits depend on the number of positions, they would differ when computed in chunks."""
    engine = loaded(toy_model, dtype="float32")
    (window,) = toy_windows(1, 100)
    monkeypatch.setattr(hf, "PIECE_ELEMENTS", 30 * TOY_VOCAB)

    def scaled(_module: Any, inputs: tuple[torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
        return logits * inputs[0].shape[1]

    engine.model.lm_head.register_forward_hook(scaled)
    with pytest.raises(
        ModelError, match=r"LlamaForCausalLM: the last token's logits differ by .* shorter windows"
    ):
        in_pieces(engine, window)
    engine.close()


def test_memory_does_not_grow_with_a_windows_logits(tmp_path: Path) -> None:
    """A window's logits are never complete in memory.

    This holds for the scored model, its reference, and a recorded reference.
    """
    save_llama(tmp_path, vocab_size=VOCAB, max_position_embeddings=LONG)
    # One whole copy of the additional logits would take ``LOGITS`` bytes.
    assert growth("transformers", tmp_path) < LOGITS / 2


@pytest.mark.parametrize("pickled", [False, True])
def test_damaged_and_pickled_weights_are_refused_in_one_line(
    toy_model: Path, tmp_path: Path, pickled: bool
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(toy_model, broken)
    if pickled:
        torch.save({}, broken / "pytorch_model.bin")
        (broken / "model.safetensors").unlink()
    else:
        # The first eight bytes are the length of the header.
        (broken / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not a header at all")
    with pytest.raises(ModelError, match="Transformers could not load") as failure:
        loaded(broken)
    assert "\n" not in str(failure.value)


@pytest.mark.engine
def test_gemma_2_has_its_soft_cap(tmp_path: Path) -> None:
    """Transformers chooses torch's attention, which has no soft caps; a spec with it is refused."""
    keys: dict[str, Any] = {"pad_token_id": 256, "head_dim": 32}
    folder = save_llama(tmp_path, "Gemma2", **keys, attn_logit_softcapping=2.0)
    engine = loaded(folder, dtype="float32")
    assert engine.provenance()["attention"] == "eager"
    (scores,) = engine.score(toy_windows(1), ScoreRequest())
    eager = loaded(folder, dtype="float32", attn_implementation="eager")
    (expected,) = eager.score(toy_windows(1), ScoreRequest())
    np.testing.assert_array_equal(scores.logprob, expected.logprob)
    with pytest.raises(ModelError, match="softcap"):
        loaded(folder, dtype="float32", attn_implementation="sdpa")
    folder = save_llama(tmp_path / "none", "Gemma2", **keys, attn_logit_softcapping=None)
    assert loaded(folder, dtype="float32").provenance()["attention"] == "sdpa"


@pytest.mark.engine
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_auto_is_the_dtype_of_the_checkpoint(tmp_path: Path, stored: str) -> None:
    assert loaded(save_llama(tmp_path, dtype=stored), dtype="auto").provenance()["dtype"] == stored


def test_auto_is_the_dtype_that_a_quantized_checkpoint_states(
    quantized: Callable[[str], Path],
) -> None:
    assert loaded(quantized("W8A8"), dtype="auto").provenance()["dtype"] == "bfloat16"
    (note,) = loaded(quantized("W8A8")).provenance()["notes"]
    assert " bfloat16" in note
    assert " float16" in note


def test_a_dtype_that_loses_digits_is_said(toy_model: Path) -> None:
    """The toy is stored in bfloat16, and float16 loses digits."""
    assert len(loaded(toy_model, dtype="float16").provenance()["notes"]) == 1
    assert "notes" not in loaded(toy_model, dtype="float32").provenance()


@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path, is_decoder: bool) -> None:
    """BERT is an encoder unless its config has ``is_decoder``.

    Transformers only warns before it scores an encoder.
    """
    config = transformers.BertConfig(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
        is_decoder=is_decoder,
    )
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
    if is_decoder:
        loaded(tmp_path, dtype="float32").close()
    else:
        with pytest.raises(ModelError, match="what follows"):
            loaded(tmp_path, dtype="float32")
