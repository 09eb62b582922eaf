"""Notes on rows whose files compute another function or other tokens than the reference's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest

from compare_q.backends.base import Storage
from compare_q.eval.results import ModelResult
from compare_q.eval.run import checkpoint_notes
from tests.support.checkpoints import finish_gguf
from tests.support.comparisons import Measured, toy
from tests.support.run_models import run_model
from tests.support.toy import planned, with_config


def test_another_function_is_a_note_of_the_row_and_wrong_in_check(
    measured: Callable[..., Measured],
    compare_q: Callable[..., Any],
    toy_model: Path,
    tmp_path: Path,
) -> None:
    """The copy's weights are the reference's; its numbers, and those of the cache, are not."""
    copy = with_config(toy_model, tmp_path / "copy", rms_norm_eps=0.01)
    models = [
        toy(toy_model, "ref", reference=True),
        toy(copy, "copy"),
        toy(toy_model, "same", dtype="bfloat16"),
    ]
    # The notes must not be lost with rows from the cache.
    for _ in ("scored", "from the cache"):
        ran = measured(models)
        assert ran.models["copy"]["kld"] > 1e-4
        (note,) = (note for note in ran.models["copy"]["notes"] if "differs" in note)
        assert note == "config differs from the reference's: rms_norm_eps 0.01 for 1e-06"
        assert f"copy: {note}" in ran.out
        assert not [
            note
            for label in ("ref", "same")
            for note in ran.models[label]["notes"]
            if "differs" in note
        ]
    checked = compare_q("check", "-d", tmp_path / "data.json", "-m", tmp_path / "models.json")
    assert checked.status == 1, checked.out
    assert f"copy: wrong: config.json: {note}" in checked.out


def row(
    bits: float,
    kld: float,
    activations: str = "unknown",
    weights: Sequence[str] = ("q8_0",),
    **fields: Any,
) -> ModelResult:
    layer = {"layers": "*", "count": 1, "activations": activations, "kernel": "k"}
    layers = [{**layer, "weights": name_of_weights} for name_of_weights in weights]
    provenance = {"layers": layers, **fields.pop("provenance", {})}
    return ModelResult.of(
        "row", "fake", Storage(bits, bits, 1), kld=kld, provenance=provenance, **fields
    )


def notes_of(
    found: ModelResult, tokenizer: Path, model: Sequence[str] = ("fake", "none")
) -> list[str]:
    load_fn, model_dir = model
    run_model_of_row = run_model(planned("row", load_fn, model_dir, 10))
    return list(checkpoint_notes.notes(found, run_model_of_row, None, tokenizer))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            row(8.5, 2.2),
            "a KLD of 2.2 at 8.5 bits per weight is more than 8 bits can cost: "
            "wrongly converted, or ",
        ),
        (row(16.0, 0.5), "a KLD of 0.5 at 16 bits"),
        (row(8.0, 0.5, "int8 token"), "another model, or the loss of its activations or KV cache"),
        # The note begins at 0.3; the measured losses of eight bits are below 0.1.
        (row(8.5, 0.29), None),
        # Four bits can cost as much.
        (row(4.5, 2.2), None),
        # Nine bits are a mean: the layers of two bits explain the loss.
        (row(9.0, 0.5, weights=("bfloat16", "int2 g16")), None),
        (row(9.0, 0.5, weights=("bfloat16", "iq2_xxs")), None),
        # Neither the 1 of bfloat16 nor that of 128x128 is a number of bits.
        (row(12.0, 0.5, weights=("bfloat16", "fp8 block 128x128")), "a KLD of 0.5 at 12 bits"),
        (row(16.0, 2.2, spec={"noise_floor": True}), None),
    ],
)
def test_more_than_eight_bits_can_cost(
    found: ModelResult, said: str | None, tmp_path: Path
) -> None:
    notes = notes_of(found, tmp_path)
    assert len(notes) == (said is not None)
    assert all(str(said) in note for note in notes)


def test_tokens_of_a_gguf(toy_model: Path, tmp_path: Path) -> None:
    """The toy's tokenizer has no merges; llama.cpp's record of an earlier version has no tokens."""
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_add_bos_token(True)
    finish_gguf(writer, tensors=False)
    (note,) = notes_of(row(8.5, 0.01), toy_model, ("llamacpp", str(file)))
    assert note == (
        "it adds a BOS token before the text, and the reference does not: "
        "a server of this file gives the model other tokens"
    )
    made = {"sample_tokens": {"adds_bos": False, "ids": {}}}
    assert notes_of(row(8.5, 0.01, provenance=made), toy_model, ("llamacpp", str(file))) == []


def test_options_that_change_the_config_explain_a_loss(toy_model: Path) -> None:
    overrides = {"hf_overrides": {"rope_theta": 5.0}}
    changed = run_model(planned("row", "vllm_score", str(toy_model), 10, overrides))
    assert list(checkpoint_notes.notes(row(16.0, 0.5), changed, None, toy_model)) == []
