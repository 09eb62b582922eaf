"""The place that a gate names, from differences that are given: layers of two modules, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from compare_q.backends.base import ModuleDifference, ModulePlace
from compare_q.eval.gate.floor import Floor, VariantTokens
from compare_q.eval.gate.places import NOT_KNOWN, where_in_words
from compare_q.eval.gate.shown_outputs import worst_row
from compare_q.eval.gate.verdicts import Row
from compare_q.eval.results import ModelResult

ROUNDING = 2.0**-9
PARTS = ("self_attn.k_proj", "self_attn.o_proj", "self_attn", "mlp.down_proj", "")
N_LAYERS = 6


def places() -> list[ModulePlace]:
    """Return the places of a model in the order in which it runs."""
    order = [ModulePlace("embed_tokens", "output")]
    for number in range(N_LAYERS):
        for part in PARTS:
            name = f"layers.{number}.{part}".rstrip(".")
            if part == "self_attn.o_proj":
                order.append(ModulePlace(name, "input"))
            order.append(ModulePlace(name, "output", 0, is_layer=not part))
    return [*order, ModulePlace("norm", "output"), ModulePlace("lm_head", "output")]


def roundings() -> list[ModuleDifference]:
    """Return the differences of a copy: 0 in layer 0, and growing after it."""
    differences = []
    for place in places():
        size = 0.0
        if place.name.startswith("layers."):
            number = int(place.name.split(".")[1])
            size = ROUNDING * (number + 1)
            if number == 0 and not place.is_layer:
                size = 0.0
        elif place.name != "embed_tokens":
            size = ROUNDING * 8
        differences.append(ModuleDifference(place, size))
    return differences


def faulty(name: str, side: str, size: float, before: float = 0.0) -> list[ModuleDifference]:
    """Return the differences of a variant with a fault of ``size`` from a place on.

    ``before``: its differences before the fault, in units of the copy's.
    """
    differences = []
    is_faulty = False
    for place, rounding in roundings():
        is_faulty = is_faulty or (place.name == name and place.side == side)
        difference = before * rounding
        if is_faulty:
            difference = size
        differences.append(ModuleDifference(place, difference))
    return differences


@pytest.mark.parametrize(
    ("name", "side", "words"),
    [
        ("embed_tokens", "output", "the output of embed_tokens"),
        ("layers.0.self_attn.k_proj", "output", "the output of layers.0.self_attn.k_proj"),
        ("layers.2.mlp.down_proj", "output", "the output of layers.2.mlp.down_proj"),
        # What enters the projection is what attention has computed.
        (
            "layers.3.self_attn.o_proj",
            "input",
            "the attention in layers.3.self_attn, before o_proj,",
        ),
        ("layers.3.self_attn.o_proj", "output", "the output of layers.3.self_attn.o_proj"),
        ("layers.4", "output", "the output of layers.4"),
        ("lm_head", "output", "the output of lm_head"),
    ],
)
@pytest.mark.parametrize("before", [0.0, 1.5])
def test_the_first_module_above_rounding_is_named(
    name: str, side: str, words: str, before: float
) -> None:
    where = where_in_words(faulty(name, side, 0.5, before), roundings())
    assert where.startswith(f"from {words} on (")


def test_a_module_after_right_ones_is_compared_with_the_effect_of_one_rounding() -> None:
    """In layer 4 roundings change 5/512, in layer 1 2/512: 8/512 is 1.6 times the one and 4 times
    the other.
    """
    size = 8 * ROUNDING
    where = where_in_words(faulty("layers.4.self_attn.k_proj", "output", size), roundings())
    assert where.startswith("from the output of layers.4.self_attn.k_proj on")
    # Other kernels in float32 round far less than bf16.
    where = where_in_words(faulty("layers.4.self_attn.k_proj", "output", size, 1e-3), roundings())
    assert where.startswith("from the output of layers.4.self_attn.k_proj on")
    where = where_in_words(faulty("layers.4.self_attn.k_proj", "output", size, 1.0), roundings())
    assert where.startswith("not reproduced")
    assert "1.6 times" in where
    # Below three times the roundings of layer 1, though five roundings of a value.
    small = faulty("layers.4.self_attn.k_proj", "output", 5 * ROUNDING)
    assert where_in_words(small, roundings()).startswith("not reproduced")


def test_three_times_the_roundings_is_the_limit() -> None:
    name = "layers.1.mlp.down_proj"
    below = faulty(name, "output", 3 * 2 * ROUNDING * 0.99, 1.0)
    assert where_in_words(below, roundings()).startswith("not reproduced")
    above = faulty(name, "output", 3 * 2 * ROUNDING * 1.01, 1.0)
    assert where_in_words(above, roundings()).startswith(f"from the output of {name} on")


def test_an_unchanged_variant_names_nothing() -> None:
    same = [ModuleDifference(place, 0.0) for place in places()]
    where = where_in_words(same, roundings())
    assert where.startswith("not reproduced")
    assert "equal to the bit" in where
    assert where_in_words([], roundings()).startswith(NOT_KNOWN)


def test_values_that_are_not_finite_are_above_rounding() -> None:
    where = where_in_words(faulty("layers.2", "output", math.inf), roundings())
    assert where.startswith("from the output of layers.2 on")


def test_two_engines_compare_whole_layers_only() -> None:
    """Modules of one name may compute something else, and the layers as well, if the first already
    differs.
    """
    fault = faulty("layers.2.self_attn.k_proj", "output", 0.5, 1.0)
    where = where_in_words(fault, roundings(), same_engine=False)
    assert where.startswith("from the output of layers.2 on")
    first = faulty("embed_tokens", "output", 0.5)
    assert where_in_words(first, roundings(), same_engine=False).startswith(NOT_KNOWN)


def row_of(pass_name: str, text: str, kld: float) -> Row:
    tokens = VariantTokens(np.arange(4, dtype=np.int32), *([np.full(4, kld)] * 3))
    return Row(pass_name, text, ModelResult(label="new", engine="fake", kld=kld), tokens)


def test_the_row_furthest_above_its_floor_is_run_again() -> None:
    """The floors are 1.25 times 1e-3 and 1e-2: copies with equal KLDs have no spread."""
    floors = {}
    for text, kld in (("full batch", 1e-3), ("batch 1", 1e-2)):
        tokens = VariantTokens(np.arange(4, dtype=np.int32), *([np.full(4, kld)] * 3))
        floors[text] = Floor([tokens] * 3, 1)
    full = row_of("prefill", "full batch", 0.02)
    alone = row_of("prefill", "batch 1", 0.03)
    assert worst_row([full, alone], floors) is full
    decode = row_of("decode", "full batch", 0.5)
    assert worst_row([alone, full, decode], floors) is full
    right = [row_of("prefill", "full batch", 1e-4), row_of("prefill", "batch 1", 1e-4)]
    assert worst_row([*right, decode], floors) is None
    assert worst_row([decode], floors) is None
    # Only its log-probabilities at batch 1 differ.
    assert worst_row(right, floors) is right[0]
