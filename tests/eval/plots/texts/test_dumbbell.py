"""The plot of several texts: markers, whiskers, bars and numbers at their places, nothing over anything else; files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compare_q.eval.common.files import Outputs
from compare_q.eval.plots import dumbbell, pictures, style
from compare_q.eval.plots.measures import KLD, PPL
from compare_q.eval.results.run_result import Results, TextResult
from tests.support.drawn import artists_of_kind, boxes_of, extents, is_within, smallest_gap
from tests.support.several_texts import KLDS, NAMES, REACH, three, with_failed_text

pytestmark = pytest.mark.slow

ORDER = ("noise", "GGUF Q4_K", "EXL3 4.0")


def test_markers_whiskers_and_bars_are_the_results() -> None:
    """A row a model, the smallest mean first; the smallest of the KLDs is 1 / 80 of the largest: a log axis."""
    figure = dumbbell.dumbbell_plot(three(), KLD)
    axes = figure.axes[0]
    assert axes.get_xscale() == "log"
    assert [text.get_text() for text in artists_of_kind(figure, "label")] == ["noise ≈", *ORDER[1:]]
    assert [text.get_text() for text in artists_of_kind(figure, "size")] == ["16.00 bpw", "4.50 bpw", "4.00 bpw"]
    klds = [kld for label in ORDER for kld in KLDS[label]]
    assert [mark.get_xdata()[0] for mark in artists_of_kind(figure, "point")] == klds
    whiskers = [list(line.get_xdata()) for line in artists_of_kind(figure, "whisker")]
    assert whiskers == [pytest.approx([k - REACH * k / 10, k + REACH * k / 10]) for k in klds if k]
    bars = [list(line.get_xdata()) for line in artists_of_kind(figure, "range")]
    assert bars == [[min(KLDS[label]), max(KLDS[label])] for label in ORDER]  # type: ignore[type-var]
    assert [line.get_xdata()[0] for line in artists_of_kind(figure, "mean")] == pytest.approx([0.002, 0.03, 0.05])
    numbers = [text.get_text() for text in axes.texts if str(text.get_gid()).startswith("number")]
    assert numbers == ["0.0020", "0.030", "0.050"]  # errors: 0.00012, 0.0019, 0.0032
    assert artists_of_kind(figure, "level")[0].get_xdata()[0] == pytest.approx(0.002)


def test_each_text_has_a_shape_of_its_own_and_a_name_in_the_legend() -> None:
    figure = dumbbell.dumbbell_plot(three(), KLD)
    marks = artists_of_kind(figure, "point")
    shapes = [mark.get_marker() for mark in marks]
    assert shapes == shapes[:3] * 3
    assert len(set(shapes)) == 3
    legend = figure.axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == list(NAMES)
    assert [handle.get_marker() for handle in legend.get_lines()] == shapes[:3]


def test_without_a_reference_perplexity_is_drawn() -> None:
    """From 20 to 21.6: a linear axis, the reference among the rows, and no noise floor."""
    figure = dumbbell.dumbbell_plot(three(), PPL)
    axes = figure.axes[0]
    assert (axes.get_xscale(), axes.get_xlabel()) == ("linear", "Perplexity")
    assert len(artists_of_kind(figure, "label")) == 4
    assert artists_of_kind(figure, "level") == []
    assert len(artists_of_kind(figure, "whisker")) == 9


def test_what_failed_is_absent_and_named_below() -> None:
    result = with_failed_text(three(c4={"EXL3 4.0": "out of memory"}), "chat", "no such file")
    figure = dumbbell.dumbbell_plot(result, KLD)
    assert [mark.get_xdata()[0] for mark in artists_of_kind(figure, "point")] == [0.001, 0.002, 0.04, 0.04, 0.05]
    assert figure.get_supxlabel() == "n/a: chat (no such file); EXL3 4.0 on c4 (out of memory)"
    assert artists_of_kind(figure, "number") == []  # no model has a mean of all texts
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["wiki2", "c4"]
    nothing = replace(result, texts=tuple(TextResult(text.name, error="x") for text in result.texts))
    with pytest.raises(ValueError, match="no model has a KLD of any text"):
        dumbbell.dumbbell_plot(nothing, KLD)


def crowd(count: int, names: tuple[str, ...], letters: int) -> Results:
    """So many models of long labels, of texts of these names."""
    texts = []
    for name, text in zip(names, three().texts * 2, strict=False):
        reference, _, model, _ = text.models
        models = [replace(model, label=f"{model.label} {'W' * letters} {i}") for i in range(count)]
        texts.append(replace(text, name=name, models=(reference, *models)))
    return Results(tuple(texts))


@pytest.mark.parametrize("card", [False, True])
@pytest.mark.parametrize(("names", "letters"), [(("a", "b", "c", "d", "e"), 0), (("a" * 80, "b c " * 30, "_c"), 60)])
@pytest.mark.filterwarnings("error")
def test_many_and_long_names_overlap_nothing(names: tuple[str, ...], letters: int, card: bool) -> None:
    figure = dumbbell.dumbbell_plot(crowd(12, names, letters), KLD, card=card, dark=True)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    rows = boxes_of(figure)
    assert len(rows) == (dumbbell.CARD_ROWS if card else 12)
    assert tuple(figure.get_size_inches()) == style.CARD or not card
    legend = axes.get_legend()
    numbers = [text for text in extents(axes.texts) if text.x0 >= axes.bbox.x1]
    everything = [
        *rows,
        legend.get_window_extent(),
        *numbers,
        *boxes_of(figure, "size"),
        axes.xaxis.label.get_window_extent(),
    ]
    assert all(is_within(box, figure.bbox) for box in everything)
    assert is_within(axes._left_title.get_window_extent(), figure.bbox)
    assert smallest_gap(everything) > -1
    assert smallest_gap(extents(axes.get_xticklabels())) > 1
    assert axes.bbox.width > 0.3 * figure.bbox.width
    assert [text.get_text() for text in legend.get_texts()][-1] == names[-1]


def test_values_not_above_zero_are_hollow_at_the_left_edge() -> None:
    result = three()
    model = result.texts[0].models[1]
    assert model.estimates
    assert model.estimates.against
    below = replace(model.estimates.against, kld=replace(model.estimates.against.kld, value=-1e-7))
    models = list(result.texts[0].models)
    models[1] = replace(model, estimates=replace(model.estimates, against=below))
    text = replace(result.texts[0], models=tuple(models))
    figure = dumbbell.dumbbell_plot(replace(result, texts=(text, *result.texts[1:])), KLD)
    mark = artists_of_kind(figure, "point")[0]
    assert (mark.get_xdata()[0], mark.get_markerfacecolor()) == (figure.axes[0].get_xlim()[0], style.LIGHT.paper)
    assert "hollow: not above 0" in figure.axes[0].texts[0].get_text()


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The plot, and a folder a text, whose name is safe and not the plot's."""
    monkeypatch.setattr(style, "DPI", 40)
    seen = []
    monkeypatch.setattr(
        pictures, "write_pictures", lambda run, folder, outputs, **_: seen.append((run.subtitle, folder.name))
    )
    odd = ("a/b", "texts.png", "a b")
    named = Results(tuple(replace(text, name=name) for text, name in zip(three().texts, odd, strict=True)))
    result = with_failed_text(named, "a b", "no such file")
    pictures.write_all(result, tmp_path, Outputs())
    assert seen == [("wiki2, 2 × 50 tokens", "a_b"), ("c4, 2 × 50 tokens", "texts.png-2")]
    files = [tmp_path / "texts.png", tmp_path / "texts.svg"]
    assert all(file.stat().st_size for file in files)
    said = capsys.readouterr().out.splitlines()
    assert said == [*(f"plot: {file}" for file in files), "no pictures of a b: no such file"]
