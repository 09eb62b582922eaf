"""The table of several texts: beside each other, narrow, below each other; its order, footnotes and Markdown."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from compare_q.eval.results import ModelResult, RunResult
from compare_q.eval.table import columns, footnotes, markdown, terminal
from tests.support.made import FAILED, QUANT, REF, replace, run_of, run_result, text_result, with_against, with_ppl

OTHER = replace(QUANT, label="NVFP4")


def measured(model: ModelResult, ppl: float, kld: float) -> ModelResult:
    changed = with_against(
        with_ppl(model, replace(model.estimates.ppl, value=ppl)), kld=replace(model.estimates.kld, value=kld)
    )
    return changed


TEXTS = run_result(
    (
        replace(run_of(REF, measured(QUANT, 8.0, 0.01), measured(OTHER, 9.0, 0.03)), name="prose"),
        replace(run_of(REF, measured(QUANT, 4.5, 0.06), measured(OTHER, 4.0, 0.02)), name="code"),
    )
)
BROKEN = replace(
    TEXTS,
    texts=(
        TEXTS.texts[0],
        replace(TEXTS.texts[1], models=(*TEXTS.texts[1].models[:2], replace(FAILED, label="NVFP4"))),
        text_result("chat", error="data.jsonl: no such file"),
    ),
)


def shown(result: RunResult, width: int, **keys: object) -> list[str]:
    """The lines of the table, of which only the first word stands where the label is cut."""
    stream = io.StringIO()
    terminal.show(result, Console(file=stream, width=width), **keys)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_wide_table() -> None:
    lines = shown(TEXTS, 160)
    assert lines[0] == "2 texts: prose, code"
    above, below = lines[2:4]
    assert above.split() == ["layer", "VRAM", "prose", "prose", "code", "code", "mean", "mean"]
    assert below.split() == ["label", "kernel", "bpw", "GiB", "PPL", "KLD", "PPL", "KLD", "PPL", "KLD"]
    bf16, quant, nvfp4 = (line.split() for line in lines[5:8])
    assert bf16[-5:] == ["ref", "7.5000±0.85", "ref", "7.5000±0.60", "ref"]
    assert quant[-6:] == ["★8.0000±0.85", "★0.01000±0.00045", "★4.5000±0.85", "★0.06000±0.00045", "6.0000±0.65",
                          "0.03500±0.00032"]  # fmt: skip
    assert nvfp4[-2:] == ["6.0000±0.70", "0.02500±0.00032"]  # sqrt(9 * 4), and the mean of 0.03 and 0.02


def test_failures_are_na_with_a_reason() -> None:
    lines = shown(BROKEN, 200)
    rows = {line.split()[0]: line.split() for line in lines[5:8]}
    assert rows["NVFP4"][-6:] == ["n/a"] * 6
    assert rows["W4A16"][-4:] == ["n/a"] * 4  # chat, and no mean over some of the texts
    assert "chat: failed: data.jsonl: no such file" in lines
    assert "code: NVFP4: failed: told to fail" in lines


def test_footnotes_of_every_text_stand_once() -> None:
    notes = [*footnotes.notes_of_texts(TEXTS), *footnotes.legend_of_texts(TEXTS)]
    assert len(notes) == len(set(notes))
    assert not any(note.startswith(("prose: KLD (mean", "code: KLD (mean", "prose: ±", "code: ±")) for note in notes)
    assert [note for note in notes if note in (footnotes.MEANS, footnotes.COMMON_ERROR)] == [
        footnotes.MEANS, footnotes.COMMON_ERROR,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "order"),
    [
        (None, ["bf16", "W4A16", "NVFP4"]),
        ("kld", ["bf16", "NVFP4", "W4A16"]),
        ("kld:prose", ["bf16", "W4A16", "NVFP4"]),
        ("kld:code", ["bf16", "NVFP4", "W4A16"]),
        ("ppl:code", ["NVFP4", "W4A16", "bf16"]),
        ("label", ["bf16", "NVFP4", "W4A16"]),
        ("top1", ["bf16", "W4A16", "NVFP4"]),
    ],
)
def test_order_of_the_rows(key: str | None, order: list[str]) -> None:
    found = columns.ordered(TEXTS, key)
    assert all([model.label for model in run.models] == order for run in found.texts)


def test_a_model_that_failed_on_a_text_comes_last() -> None:
    assert columns.ordered(BROKEN, "kld:code").labels[-1] == "NVFP4"
    assert columns.ordered(BROKEN, "ppl:prose").labels == ("bf16", "W4A16", "NVFP4")


def test_chosen_columns() -> None:
    lines = shown(TEXTS, 60, names=("label", "same_top", "kld", "bpw_layer"))
    assert "".join(lines).count("same top %") == 2
    assert "mean" in "".join(lines)
    found = columns.columns_of_texts(TEXTS, ("label", "size", "same_top"))
    assert [each.column.name for each in found] == ["label", "size", "same_top", "same_top"]
    assert found[-1].column.title == "code same top %"


def test_markdown() -> None:
    text = markdown.markdown_text(BROKEN)
    assert text.startswith("**3 texts: prose, code, chat**\n\n| label | kernel |")
    assert "| prose PPL | prose KLD | code PPL | code KLD | chat PPL | chat KLD | mean PPL | mean KLD |" in text
    by_text = markdown.markdown_text(BROKEN, by_text=True)
    assert [line for line in by_text.splitlines() if line.startswith("#")] == ["### prose", "### code", "### chat"]
    assert "failed: data.jsonl: no such file" in by_text


def test_by_text_is_the_table_of_each() -> None:
    stream = io.StringIO()
    terminal.show(BROKEN, Console(file=stream, width=120), by_text=True)
    out = stream.getvalue()
    assert out.index("== prose ==") < out.index("== code ==") < out.index("== chat ==\nfailed: data.jsonl")
    assert out.count("label") == 2
