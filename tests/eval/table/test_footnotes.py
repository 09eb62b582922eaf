"""What is said below a table, to the letter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compare_q.eval.results.run_result import ModelResult, TextResult
from compare_q.eval.stats.estimates import Sampled
from compare_q.eval.stats.uncertainty import Mean
from compare_q.eval.table.footnotes import COMMON_ERROR, footnotes, legend
from tests.support.made import BASE, FAILED, PPL, QUANT, REF, run_of, with_against, with_ppl, with_sums
from tests.support.several_texts import with_answers

WINDOWS = "2 windows, 40 scored tokens"
ERRORS = (
    "±: one standard error, from 4 blocks of the text; it is too small if documents of the text are longer than about "
    "10,000 tokens"
)
AGAINST = "KLD (mean over tokens, in nats) and same top compare each model with bf16"
RATES = "bf16: 1.2500 bits per byte, byte perplexity 2.3780, word perplexity 55.5000"


ALONE = run_of(BASE, reference=None)


@pytest.mark.parametrize(
    ("run", "notes"),
    [
        (run_of(REF, QUANT, FAILED), [WINDOWS, RATES, "broken: failed: told to fail"]),
        (run_of(QUANT), [WINDOWS, "the reference, bf16, has a PPL of 7.2500 on these tokens"]),
        (ALONE, [WINDOWS]),
        (replace(ALONE, data={"method": "llamacpp"}), [f"method llamacpp: {WINDOWS}"]),
        (run_of(replace(BASE, cached=True), reference=None),
         [WINDOWS, "1 of 1 rows come from the cache: an earlier run measured their speed (*)"]),
    ],
)  # fmt: skip
def test_all_notes(run: TextResult, notes: list[str]) -> None:
    assert footnotes(run) == notes
    assert legend(run) == [ERRORS, COMMON_ERROR, *([AGAINST] if run.reference else [])]


def test_short_texts_are_said_to_be_short() -> None:
    short = run_of(with_sums(BASE, length=1000), reference=None)
    about = "with less than 20,000, errors (±) may be far too small"
    assert legend(short)[0] == "±: one standard error, from 4 blocks of the text"
    assert footnotes(short)[1:] == [f"the scored part spans 1,000 tokens: {about}; take a longer text"]
    part = replace(short, data={"windows": 2, "text_tokens": 27_324})
    assert footnotes(part)[1:] == [
        f"the scored part spans 1,000 tokens of a text of 27,324: {about}; score more windows (-r, max_rows)"
    ]
    one = with_sums(BASE, tokens=(10,), nll=(5.0,))
    assert legend(run_of(one, reference=None)) == []
    assert footnotes(run_of(one, reference=None))[1] == "errors n/a: the text is too short to tell any"


def test_what_spread_windows_know_of_the_text() -> None:
    """Errors of 0.02 of ln PPL, and of 0.0006 of a KLD of 0.01235; 2 of 12 windows took 2 s in each row."""

    def row(model: ModelResult, *errors: float | None) -> ModelResult:
        assert model.estimates
        return replace(model, score_seconds=2.0, estimates=replace(model.estimates, sampled=Sampled(*errors)))

    data = {"windows": 2, "windows_of_the_text": 12, "method": "gptq"}
    run = replace(run_of(row(REF, 0.01), row(QUANT, 0.02, 0.0006)), data=data)
    within = (
        "PPL within 2 %, KLD of every row within 4.9 % (one standard error; the table's ± is about other texts, too)"
    )
    assert footnotes(run)[:2] == [
        "method gptq: 2 windows of 12, spread over the text, 40 scored tokens",
        f"what all 12 windows of the text would give: {within}; the other 10 would take about 20 s of scoring",
    ]
    unknown = replace(run, models=(row(QUANT, None, None),))
    assert (
        footnotes(unknown)[1]
        == "what all 12 windows of the text would give: n/a; the other 10 would take about 10 s of scoring"
    )
    whole = replace(run, data={"windows": 2, "method": "gptq"})
    assert footnotes(whole)[0] == f"method gptq: {WINDOWS}"
    assert not any("of all" in note for note in footnotes(whole))


def test_flips_that_the_reference_leaves_open_have_a_reason() -> None:
    why = "the reference's own scores leave the answer to a question open (no finite log-probability)"
    open_one, none_open = (with_answers(run_of(REF, QUANT), bf16=answers, W4A16="10") for answers in ("1?", "11"))
    assert f"flips of W4A16 n/a: {why}" in footnotes(open_one)
    assert not any(" n/a: " in note for note in footnotes(none_open))


def test_the_mark_of_the_best_is_explained() -> None:
    note = (
        "★: the best quantized model (below 16 bpw) of its column, and those that cannot be told apart from it "
        "(95 %, paired differences)"
    )
    assert note in legend(run_of(REF, QUANT, replace(QUANT, label="same")))
    assert not any("★" in found for found in legend(run_of(REF, QUANT)))
    short = with_sums(QUANT, length=510)
    why = (
        "no ★: on 510 tokens of text even a KLD twice as large often cannot be told apart; from 2,000 tokens on it "
        "mostly can"
    )
    assert why in footnotes(run_of(REF, short, replace(short, label="same")))
    assert not any("★" in found for found in footnotes(run_of(REF, short)))


def test_the_noise_floor_is_explained() -> None:
    note = "≈: a noise floor, the reference's weights with other roundings"
    floor = replace(QUANT, spec={"noise_floor": True})
    known = f"{note}; a KLD near or below its 0.01235 says nothing about a quantization"
    assert known in legend(run_of(REF, floor))
    assert note in legend(run_of(replace(BASE, spec={"noise_floor": True}), reference=None))
    assert not any("≈" in found for found in legend(run_of(REF, QUANT)))


def test_rows_that_ran_otherwise_than_asked() -> None:
    layers = [{"layers": "h.*.q", "count": 2, "weights": "nvfp4 g16", "activations": "bfloat16",
               "kernel": "MarlinNvFp4LinearKernel", "asked": "nvfp4 g16"}]  # fmt: skip
    marked = replace(QUANT, provenance={"layers": layers, "gpus": ["H200"]})
    sentence = "the checkpoint asks for nvfp4 activations, but MarlinNvFp4 left them unquantized (bfloat16, 2 layers)"
    found = footnotes(run_of(REF, marked))
    assert found[0] == f"† W4A16: {sentence} on H200"
    assert sum("†" in note for note in found) == 1


def test_what_is_missing_is_explained() -> None:
    noted, silent = replace(BASE, label="noted", notes=("KLD n/a: x",)), replace(BASE, label="silent", provenance={})
    assert footnotes(run_of(REF, noted, silent))[2:] == [
        "noted: KLD n/a: x",
        "silent: kernel n/a: this engine does not say what it runs",
        "silent: KLD n/a: this engine measured none",
    ]
    holes = with_ppl(with_against(QUANT, kld=Mean(0.5, 4.0, 38, 2)), replace(PPL, tokens=37, non_finite=3))
    assert footnotes(run_of(REF, holes))[2:] == [
        "W4A16: 3 positions had no finite log-probability; PPL leaves them out",
        "W4A16: 2 positions had no finite KL divergence; KLD leaves them out",
    ]


def test_what_decode_is_stands_below_a_table_with_it() -> None:
    said = (
        "decode SxB: S tokens of each of B windows a step, as generation computes them, with what came before in the "
    )
    said += "KV cache"
    decoded = replace(QUANT, label="decoded", provenance={"phase": "decode 1x32"})
    assert said in footnotes(run_of(REF, QUANT, decoded))
    assert f"all rows: decode 1x32; {said}" in footnotes(run_of(decoded, FAILED))
    other = replace(decoded, label="other", provenance={"phase": "decode 4x32"})
    assert said in footnotes(run_of(decoded, other))
    assert not [note for note in footnotes(run_of(REF, QUANT)) if "decode" in note]
    deep = replace(decoded, provenance={"phase": "decode 1x1 behind prompts"})
    said += "; behind prompts: what no score needs was computed as a prompt"
    assert said in footnotes(run_of(REF, decoded, deep))


def test_windows_beyond_the_original_context_are_told_once_for_all_rows_alike() -> None:
    """Rows without scaling, of unknown scaling, and windows within the original context need no line."""
    yarn = {"rope": {"type": "yarn", "factor": 4.0, "original_context": 1024}}
    models = [replace(QUANT, label=label, provenance=yarn) for label in ("a", "b")]
    models += [replace(QUANT, label="c", provenance={"rope": {}}), replace(QUANT, label="d")]
    run = run_of(REF, *models)
    said = "a, b: windows of 2,048 tokens reach beyond the original context of 1,024 (positions by yarn, factor 4)"
    assert said in footnotes(replace(run, data={"window_length": 2048}))
    for data in ({"window_length": 1024}, {}):
        assert not [note for note in footnotes(replace(run, data=data)) if "original context" in note]
