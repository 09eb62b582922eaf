"""Results -> the columns of the table, for the terminal and for Markdown; and the order of the rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from backends.layers import groups
from eval.results.differences import best_labels
from eval.results.digits import KLD_DIGITS, PPL_DIGITS, error_text, number_text
from eval.results.run_result import ModelResult, RunResult

BEST = "\N{BLACK STAR}"
"""Before the best value of a column."""
FLOOR = "\N{ALMOST EQUAL TO}"
"""Beside the label of a noise floor."""
RATIO, HEAD, TOP_ERROR, P99, SECONDS = "ratio", "head", "top error", "p99", "seconds"
EXTRAS = (RATIO, HEAD, TOP_ERROR, P99, SECONDS)
"""Columns that a narrow table leaves out, the last one first.  The ratio has a paired error, PPL mostly the text's."""
ORDERS: dict[str, Callable[[ModelResult], float | str | None]] = {
    "kld": lambda model: model.mean_kld,
    "bpw": lambda model: model.storage.bpw_layer,
    "vram": lambda model: model.storage.vram_gib,
    "ppl": lambda model: model.ppl.value if model.ppl else None,
    "label": lambda model: model.label.casefold(),
}
"""``--sort``: the values that it can sort by, the smallest first."""


@dataclass(frozen=True)
class Cell:
    """A number and its standard error as they are written; both may be empty."""

    value: str
    error: str = ""
    is_best: bool = False

    @property
    def shown(self) -> str:
        """The value, with its mark if it is the best."""
        return f"{BEST}{self.value}" if self.is_best else self.value


@dataclass(frozen=True)
class Column:
    """A column of numbers: its header, two lines at most, and a cell a model."""

    header: str
    cells: tuple[Cell, ...]


def ordered(run: RunResult, key: str | None) -> RunResult:
    """The run with its models sorted by a key of ``ORDERS`` (None: as they are), unknown values and failures last."""
    if key is None:
        return run

    def place(model: ModelResult) -> tuple[bool, bool, float | str]:
        value = ORDERS[key](model)
        return bool(model.error), value is None, 0.0 if value is None else value

    return replace(run, models=tuple(sorted(run.models, key=place)))


def possible_extras(run: RunResult) -> tuple[str, ...]:
    """The ``EXTRAS`` that a run can have."""
    return EXTRAS if run.reference is not None else (HEAD, SECONDS)


def number_columns(run: RunResult, chosen: Collection[str]) -> list[Column]:
    """The columns of numbers with the chosen ``EXTRAS``; one counts non-finite positions, where there are any."""
    letters = machine_letters(run)
    marks = {name: best_labels(run.models, name) for name in ("nll", "kld", "same_top")}
    found: list[tuple[str, Callable[[ModelResult], Cell], bool]] = [
        ("where", lambda m: Cell(letters.get(m.where, "n/a")), bool(letters)),
        ("layer\nbpw", lambda m: Cell(number_text(m.storage.bpw_layer, 2)), True),
        ("head\nbpw", lambda m: Cell(number_text(m.storage.bpw_head, 2)), HEAD in chosen),
        ("VRAM\nGiB", lambda m: Cell(number_text(m.storage.vram_gib, 2)), True),
        ("PPL", lambda m: ppl_cell(m, marks["nll"]), True),
        ("PPL vs\nref %", ratio_cell, RATIO in chosen),
        ("KLD", lambda m: kld_cell(m, marks["kld"]), run.reference is not None),
        ("KLD\np99", p99_cell, P99 in chosen),
        ("same\ntop %", lambda m: same_top_cell(m, marks["same_top"], TOP_ERROR in chosen), run.reference is not None),
        ("non-\nfinite", non_finite_cell, any(m.ppl and m.ppl.non_finite for m in run.models)),
        ("seconds", lambda m: Cell(number_text(m.score_seconds, 1) + ("*" if m.cached else "")), SECONDS in chosen),
    ]
    return [
        Column(header, tuple(failed_cell(header) if m.error or m.ppl is None else of(m) for m in run.models))
        for header, of, wanted in found if wanted
    ]  # fmt: skip


def machine_letters(run: RunResult) -> dict[str, str]:
    """Machine -> the letter that stands for it, in the order of the rows; empty if all rows ran on one."""
    found = dict.fromkeys(model.where for model in run.models if model.where)
    return dict(zip(found, map(chr, itertools.count(ord("A"))), strict=False)) if len(found) > 1 else {}


def failed_cell(header: str) -> Cell:
    """A failed model's cell: one text in its row."""
    return Cell("failed" if header == "PPL" else "")


def ppl_cell(model: ModelResult, marked: Collection[str]) -> Cell:
    """Perplexity; its error is mostly the text's."""
    ppl = model.ppl
    value, stderr = (ppl.value, ppl.stderr) if ppl else (None, None)
    return Cell(number_text(value, PPL_DIGITS), "" if value is None else error_text(stderr), model.label in marked)


def ratio_cell(model: ModelResult) -> Cell:
    """By how many percent the perplexity is above the reference's, with the paired error."""
    against = model.estimates.against if model.estimates else None
    if model.is_reference:
        return Cell("ref")
    if against is None or against.ppl_ratio.value is None:
        return Cell("n/a")
    stderr = against.ppl_ratio.stderr
    return Cell(f"{100 * (against.ppl_ratio.value - 1):+,.2f}", error_text(None if stderr is None else 100 * stderr))


def kld_cell(model: ModelResult, marked: Collection[str]) -> Cell:
    """Mean KLD."""
    if model.is_reference:
        return Cell("ref")
    if model.kld is None or model.kld.value is None:
        return Cell("n/a")
    return Cell(number_text(model.kld.value, KLD_DIGITS), error_text(model.kld.stderr), model.label in marked)


def p99_cell(model: ModelResult) -> Cell:
    """The KLD that one token in a hundred exceeds."""
    against = model.estimates.against if model.estimates else None
    return Cell("ref" if model.is_reference else number_text(against.kld_percentiles.get("99") if against else None, 4))


def same_top_cell(model: ModelResult, marked: Collection[str], with_error: bool) -> Cell:
    """Same top token, percent."""
    if model.is_reference:
        return Cell("ref")
    if model.same_top is None or model.same_top.value is None:
        return Cell("n/a")
    stderr = model.same_top.stderr
    shown = error_text(None if stderr is None else 100 * stderr) if with_error else ""
    return Cell(number_text(100 * model.same_top.value, 2), shown, model.label in marked)


def non_finite_cell(model: ModelResult) -> Cell:
    """Positions without a finite log-probability."""
    return Cell(f"{model.ppl.non_finite:,}" if model.ppl else "")


def label_of(model: ModelResult) -> str:
    """The label as the table shows it, with its marks."""
    return f"{model.marked_label} {FLOOR}" if model.is_noise_floor else model.marked_label


def kernel_of(model: ModelResult) -> str:
    """The kernel as the table shows it."""
    return "" if model.error else groups.kernel_of(model.layers) or "n/a"
