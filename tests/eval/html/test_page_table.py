"""The page's table and its last section, in a real browser: the numbers, marks and order that Python gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eval.results import differences
from eval.results.run_result import ModelResult, Part, Results
from eval.table import columns
from tests.support.report_page import (
    FAILED,
    MODELS,
    REFERENCE,
    SIZELESS,
    N,
    ShowPage,
    inspection_of,
    measured,
    needs_browser,
    plain,
    run_of,
)

pytestmark = needs_browser


def test_the_table_is_the_terminals(show: ShowPage) -> None:
    """Every number, error and star; a row a model, failed ones too."""
    run = run_of(*MODELS, SIZELESS, FAILED)
    opened = show(*run.models)
    found = {each.column.name: each for each in columns.table_columns(run)}
    assert opened.page.locator("#table th[data-column]").evaluate_all("all => all.map(th => th.dataset.column)") == [
        *found
    ]
    numbers = {name: each.cells for name, each in found.items() if each.column.digits is not None}
    assert {
        "bpw_layer",
        "vram_gib",
        "ppl",
        "ratio",
        "kld",
        "kld_p99.9",
        "same_top",
        "speed",
        "bpw_head",
    } == numbers.keys()
    for key, cells in numbers.items():
        assert [plain(text) for text in opened.cells(key)] == [cell.shown for cell in cells], key
    for key in (key for key in numbers if found[key].column.error):
        errors = [plain(text).removeprefix("± ") for text in opened.texts(f"[data-cell='{key}'] + .error")]
        assert errors == [cell.error for cell in numbers[key][:-1]], key
    assert opened.labels() == [columns.label_of(model) for model in run.models]
    starred = opened.texts("tr:has([data-cell='kld'] .best) .label span")
    assert set(starred) == differences.best_labels(run.models, "kld")
    assert starred


def test_sorting(show: ShowPage) -> None:
    """A click sorts, a second one reverses; what is not known stays last; the keyboard does the same."""
    opened = show(*MODELS, SIZELESS, FAILED)
    header = opened.page.locator("th[data-column='bpw_layer']")
    known = sorted([m for m in MODELS if m.storage.bpw_layer], key=lambda m: m.storage.bpw_layer or 0)
    expected = [f"{m.storage.bpw_layer:.2f}" for m in known]
    header.locator("button").click()
    assert opened.cells("bpw_layer") == [*expected, "n/a", ""]
    assert header.get_attribute("aria-sort") == "ascending"
    header.locator("button").click()
    assert opened.cells("bpw_layer") == [*expected[::-1], "n/a", ""]
    assert header.get_attribute("aria-sort") == "descending"
    opened.page.locator("th[data-column='label'] button").focus()
    opened.page.keyboard.press("Enter")
    names = opened.labels()
    assert names[:2] == ["bf16 base", "bf16 other ≈"]
    assert names.index("EXL3 3.0") < names.index("EXL3 4.0") < names.index("GGUF Q2_K")
    assert header.get_attribute("aria-sort") == "none"
    assert opened.page.evaluate("document.activeElement.dataset.key") == "sort-label"
    opened.page.locator("th[data-column='ppl'] button").click()
    ppl = sorted(m.ppl.value for m in (*MODELS, SIZELESS) if m.ppl and m.ppl.value)
    assert [plain(text).strip("★") for text in opened.cells("ppl")] == [*(f"{v:,.4f}" for v in ppl), "failed"]


@pytest.mark.parametrize(
    ("case", "count"),
    [("as it is", 1), ("a coarse floor", 2), ("too short", 0), ("the best left some out", 0), ("two machines", 0)],
)
def test_stars_are_pythons(show: ShowPage, case: str, count: int) -> None:
    """None where it cannot be told what is best, and all that KLD cannot rank where the best is one of them."""

    def changed(model: ModelResult) -> ModelResult:
        assert model.estimates
        found = model.estimates.blocks
        if case == "too short":
            sums = {name: each and (sum(each),) for name, each in vars(found).items() if name in differences.SCORES}
            found = replace(found, tokens=(N,), **sums)
        elif case in ("the best left some out", "two machines") and model.label == "EXL3 4.0":
            found = replace(found, whole=())
        key = model.label[:4] if case == "two machines" else ""
        return replace(model, estimates=replace(model.estimates, blocks=found), reference_key=key)

    floor = [measured("noise", 0.093, 16.0, seed=9, spec={"noise_floor": True})] if case == "a coarse floor" else []
    models = [changed(model) for model in (REFERENCE, *MODELS[2:6], *floor)]
    opened = show(*models)
    starred = set(opened.texts("tr:has([data-cell='kld'] .best) .label span"))
    assert starred == differences.best_labels(models, "kld")
    assert len(starred) == count


def test_what_ran(show: ShowPage) -> None:
    opened = show(*MODELS, FAILED)
    details = opened.page.locator("#ran details[data-model='3']")
    details.locator("summary").click()
    details.locator("pre").wait_for()  # a details element tells of its opening a moment later
    text = details.text_content()
    for expected in ("Marlin", "0.26.0", "fp8", "float16"):
        assert expected in text
    assert opened.texts("#ran .command") == ["python eval/compare_q.py -d '<d>'"]
    failed = opened.page.locator(f"#ran details[data-model='{len(MODELS)}']")
    failed.locator("summary").click()
    failed.locator("pre").wait_for()
    assert "told to fail" in failed.text_content()
    opened.page.locator("#table .group[data-group='EXL3']").click()
    assert opened.page.locator("#ran details[open]").count() == 2


def test_a_merged_run(show: ShowPage) -> None:
    """Where each row ran, which runs it was made of, which pairs have no KLD, and excerpts of those that have some."""
    machines = {"a": {"cpu": "AMD EPYC"}, "b": {"gpus": ["NVIDIA H200"], "driver": "580.1"}}
    models = [
        replace(model, reference_key=key, provenance={**model.provenance, **machines[key]})
        for model, key in zip((REFERENCE, *MODELS[2:5]), "abab", strict=True)
    ]
    plain_run, labels = run_of(*models), [model.label for model in models]
    origin = {"created": "2026", "command": ["one"], "commit": None, "versions": {"torch": "2"}, "hardware": {}}
    parts = tuple(
        Part(f"{key}.json", tuple(labels[i::2]), {**origin, "hardware": machines[key]}, {"key": key}, 7.5)
        for i, key in enumerate("ab")
    )
    merged = Results((plain_run,), origin=origin, parts=parts)
    excerpts = inspection_of(plain_run)
    worst = (None, excerpts.worst[1], None, excerpts.worst[3])
    opened = show(run=merged, inspect=replace(excerpts, worst=worst))
    assert opened.cells("where") == ["AMD EPYC", "NVIDIA H200, driver 580.1"] * 2
    assert opened.texts("#parts h3") == ["Merged: a.json", "Merged: b.json"]
    assert "AMD EPYC" in opened.texts("#parts dd")
    notes = opened.texts("#table .notes li")
    assert not any(note.startswith("where ") for note in notes)
    assert any(note.startswith("KLD and same top of each row are against the reference as") for note in notes)
    opened.pick("differences", "KLD")
    cells = opened.page.evaluate(
        "[...document.querySelectorAll('.cell[data-value]')].map(c => [c.dataset.a, c.dataset.b])"
    )
    assert {(a, b) for a, b in cells if a != b} == {("1", "3"), ("3", "1")}
    without = ", ".join(models[i].marked_label for i in (0, 2))
    assert opened.texts("#tokens > .hint") == [
        f"Not here, as no report with excerpts was given for their run: {without}."
    ]
