"""Bars of the KLD by slice: lengths, errors, which models and slices have them, odd names."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.legend import Legend

from compare_q.eval.plots import picture_style, slice_bars
from compare_q.eval.results import ModelResult, RunResult
from compare_q.eval.stats.slices import Slice
from compare_q.eval.stats.uncertainty import Mean
from tests.support.figures import artists_of_kind, boxes_of, legend_of, smallest_gap, texts_of
from tests.support.made import BASE, QUANT, REF, replace, run_of, with_against
from tests.support.several_texts import three

pytestmark = pytest.mark.slow


def model_of(label: str, kld: float = 0.01, **slices: float | None) -> ModelResult:
    """Return a quantized row with a KLD for each slice (error: a tenth)."""
    parts = {}
    for name, value in slices.items():
        error = None
        if value is not None:
            error = abs(value) / 10
        parts[name] = Slice(100, 7.5, 0.5, value, error)
    model = replace(QUANT, label=label, slices=parts)
    return with_against(model, kld=Mean(kld, 0.4, 40, 0, kld / 10))


def bars_of(run: RunResult, **keys: Any) -> dict[str, tuple[float, float]]:
    """Return "model.slice" (their numbers) -> where its bar begins and ends."""
    figure = slice_bars.slice_bars(run, **keys)
    bars = {}
    for bar in artists_of_kind(figure, "bar"):
        bars[bar.get_gid().removeprefix("bar-")] = (bar.get_x(), bar.get_x() + bar.get_width())
    return bars


def lines_of(run: RunResult, kind: str) -> list[str]:
    """Return the first line of each text of a kind."""
    texts = artists_of_kind(slice_bars.slice_bars(run), kind)
    return [text.get_text().splitlines()[0] for text in texts]


def heading_of(run: RunResult) -> str:
    """Return the lines below the title."""
    heading: str = slice_bars.slice_bars(run).axes[0].texts[0].get_text()
    return heading


def test_bars_are_the_klds_of_the_slices() -> None:
    """The quantized rows of three texts, 2 and 3, have bars from 0.

    The reference and the noise floor do not have bars.
    """
    assert bars_of(three()) == {
        "2.0": (0.0, 0.05),
        "2.1": (0.0, 0.02),
        "2.2": (0.0, 0.08),
        "3.0": (0.0, 0.04),
        "3.1": (0.0, 0.04),
        "3.2": (0.0, 0.01),
    }
    figure = slice_bars.slice_bars(three())
    errors = {}
    for bar in artists_of_kind(figure, "error"):
        errors[bar.get_gid()] = tuple(bar.get_xdata())
    assert errors["error-2.0"] == pytest.approx((0.045, 0.055))
    assert errors["error-3.2"] == pytest.approx((0.009, 0.011))
    assert len(errors) == 6
    slices = texts_of(figure, "slice")
    assert slices == ["wiki2\n50 tokens", "c4\n50 tokens", "chat\n50 tokens"]
    # Their KLDs are 0.03 and 0.05.
    assert legend_of(figure) == ["GGUF Q4_K", "EXL3 4.0"]


def test_texts_and_roles_come_before_the_slices_of_every_run() -> None:
    first = model_of("a", rest=0.1, special=0.1, wiki2=0.1)
    second = model_of("b", begin=0.1, unsure=0.1, assistant=0.1, sure=0.1)
    names = ["wiki2", "assistant", "special", "sure", "unsure", "begin", "rest"]
    assert lines_of(run_of(REF, first, second), "slice") == names


def test_values_of_more_than_a_decade_and_a_half_have_a_logarithmic_axis() -> None:
    """There, what is not above 0 is a number and not a bar.

    A slice that a row does not have is n/a.
    """
    # 0.4 / 0.01 = 40 is more than a decade and a half, 31.6.
    run = run_of(REF, model_of("a", x=0.01, y=0.4, z=-1e-7), model_of("b", x=0.02, y=None))
    assert bars_of(run) == {
        # The axis begins 1.6 times below the smallest value above 0.
        "1.0": (pytest.approx(0.01 / 1.6), pytest.approx(0.01)),
        "1.1": (pytest.approx(0.01 / 1.6), pytest.approx(0.4)),
        "2.0": (pytest.approx(0.01 / 1.6), pytest.approx(0.02)),
    }
    figure = slice_bars.slice_bars(run)
    assert figure.axes[0].get_xscale() == "log"
    missing = {}
    for text in artists_of_kind(figure, "missing"):
        missing[text.get_gid()] = text.get_text()
    assert missing == {"missing-1.2": "-1e-07", "missing-2.1": "n/a", "missing-2.2": "n/a"}


def test_other_values_have_a_linear_axis_from_zero() -> None:
    # 0.3 / 0.01 = 30 is less than 31.6.
    figure = slice_bars.slice_bars(run_of(REF, model_of("a", x=0.01, y=0.3)))
    assert figure.axes[0].get_xscale() == "linear"
    assert figure.axes[0].get_xlim()[0] == 0.0
    assert bars_of(run_of(REF, model_of("a", x=0.0))) == {"1.0": (0.0, 0.0)}


def test_the_eight_models_with_the_lowest_kld_have_bars() -> None:
    """The heading names the other models."""
    models = [model_of(f"m{number}", 0.01 * (20 - number), x=0.1) for number in range(10)]
    run = run_of(REF, *models)
    assert list(bars_of(run)) == [f"{number}.0" for number in range(10, 2, -1)]
    assert "left out: m1, m0" in heading_of(run)
    many = [model_of(f"m{number}", 0.01, x=0.1) for number in range(20)]
    assert "12 others" in heading_of(run_of(REF, *many))


def test_models_of_a_family_share_a_colour_and_differ_by_their_hatches() -> None:
    figure = slice_bars.slice_bars(
        run_of(REF, model_of("GGUF a", x=0.1), model_of("GGUF b", x=0.2))
    )
    first, second = artists_of_kind(figure, "bar")
    assert first.get_facecolor() == second.get_facecolor()
    assert first.get_hatch() != second.get_hatch()


@pytest.mark.parametrize("count", [2, 5, 12])
def test_names_of_strangers_overlap_nothing(count: int) -> None:
    # Matplotlib leaves out names with _ at the beginning, and reads $...$ as mathematics.
    labels = ["_x $a$ b$", "</text><script>", "L" * 90, "m " * 60, "\u202eright", "[a]"]
    labels += [f"GGUF Q4_K_M number {number}" for number in range(6)]
    names = [
        "_hidden",
        "$x$ \\frac",
        "w" * 60,
        "two\nlines",
        "<b>",
        "special",
        "sure",
        "begin",
        "rest",
    ]
    models = [model_of(label, **dict.fromkeys(names, 0.1)) for label in labels[:count]]
    figure = slice_bars.slice_bars(run_of(REF, *models))
    figure.draw_without_rendering()
    slices = boxes_of(figure, "slice")
    (drawn_legend,) = figure.findobj(Legend)
    legend = [text.get_window_extent() for text in drawn_legend.get_texts()]
    assert (len(slices), len(legend)) == (9, min(count, slice_bars.MOST_MODELS))
    assert smallest_gap(slices) > 0
    assert smallest_gap(legend) > 0
    assert smallest_gap(slices, legend) > 0
    assert min(box.x0 for box in (*slices, *legend)) > 0
    assert max(box.x1 for box in (*slices, *legend)) < figure.bbox.x1


def test_without_the_kld_of_a_slice_there_is_no_picture() -> None:
    for run in (run_of(REF, QUANT), three(reference=False), run_of(BASE, reference=None)):
        with pytest.raises(ValueError, match="slice"):
            slice_bars.slice_bars(run)


@pytest.mark.parametrize("dark", [False, True])
def test_the_colours_are_those_of_the_theme(dark: bool) -> None:
    theme = picture_style.DARK if dark else picture_style.LIGHT
    figure = slice_bars.slice_bars(three(), dark=dark)
    (bar, *_) = artists_of_kind(figure, "bar")
    look = picture_style.looks_of(three().models)[3]
    assert picture_style.to_hex(bar.get_facecolor()) == theme.families[look.colour]


def test_bars_of_a_bound_end_in_an_arrow() -> None:
    """KLDs 0.04, 0.04 and 0.01 of the slices, of which the first model has bounds."""
    run = three()
    models = []
    for model in run.models:
        if model.label == "GGUF Q4_K":
            model = replace(model, kld_kind="bound")
        models.append(model)
    figure = slice_bars.slice_bars(run.updated(models=tuple(models)))
    ends = [float(arrow.xy[0]) for arrow in artists_of_kind(figure, "bound")]
    assert ends == pytest.approx([0.04, 0.04, 0.01])
    assert not artists_of_kind(slice_bars.slice_bars(run), "bound")
