"""What is said below a table, to the letter."""

from __future__ import annotations

from compare_q.eval.results import ModelResult
from compare_q.eval.stats.estimates import Sampled
from compare_q.eval.table.footnotes import footnotes, legend
from tests.support.made import BASE, QUANT, REF, replace, run_of, with_sums
from tests.support.several_texts import with_answers

WINDOWS = "2 windows, 40 scored tokens"


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


def test_rows_that_ran_otherwise_than_asked() -> None:
    layers = [{"layers": "h.*.q", "count": 2, "weights": "nvfp4 g16", "activations": "bfloat16",
               "kernel": "MarlinNvFp4LinearKernel", "asked": "nvfp4 g16"}]  # fmt: skip
    marked = replace(QUANT, provenance={"layers": layers, "gpus": ["H200"]})
    sentence = "the checkpoint asks for nvfp4 activations, but MarlinNvFp4 left them unquantized (bfloat16, 2 layers)"
    found = footnotes(run_of(REF, marked))
    assert found[0] == f"† W4A16: {sentence} on H200"
    assert sum("†" in note for note in found) == 1


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
