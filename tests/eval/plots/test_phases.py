"""The picture of decode beside prefill: a row for each model that was compared, with its numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compare_q.eval.plots import pictures
from compare_q.eval.plots.measures import BPW, KLD
from compare_q.eval.plots.phases import phases_plot
from compare_q.eval.plots.points import pareto_front, points_of
from compare_q.eval.results.run_result import ModelResult
from compare_q.eval.stats.phases import OwnPrefill
from compare_q.eval.stats.uncertainty import Mean
from tests.support.drawn import artists_of_kind, boxes_of, smallest_gap
from tests.support.made import QUANT, REF, run_of, with_against

pytestmark = pytest.mark.slow


def in_decode(model: ModelResult, own: OwnPrefill | None) -> ModelResult:
    spec = {"load_fn": "fake", "model_dir": model.label, "label": f"{model.label} decode", "phase": "decode"}
    return replace(model, label=f"{model.label} decode", spec=spec, own_prefill=own, is_reference=False)


def in_prefill(model: ModelResult) -> ModelResult:
    return replace(model, spec={"load_fn": "fake", "model_dir": model.label, "label": model.label})


def mean(value: float) -> Mean:
    return Mean(value, 0.0, 40, 0, value / 10)


BETTER = with_against(QUANT, kld=mean(0.001))
TEXT = run_of(
    in_prefill(REF), in_decode(REF, OwnPrefill(mean(0.0014), mean(0.9), mean(0.0017))),
    in_prefill(QUANT), in_decode(BETTER, OwnPrefill(mean(2e-5), mean(0.9), None, "no noise here")),
)  # fmt: skip


def test_rows_have_what_decode_and_noise_make_of_the_prefill() -> None:
    figure = phases_plot(TEXT)
    assert [text.get_text() for text in artists_of_kind(figure, "label")] == ["bf16 decode", "W4A16 decode"]
    assert [float(point.get_xdata()[0]) for point in artists_of_kind(figure, "point")] == [0.0014, 2e-5]
    (bar,) = artists_of_kind(figure, "noise")
    assert bar.get_x() + bar.get_width() == pytest.approx(0.0017)
    numbers = [text.get_text() for text in artists_of_kind(figure, "number")]
    assert numbers == ["0.00140", "0.00170", "2.0e-5", "n/a"]
    assert smallest_gap(boxes_of(figure, "label")) > 1
    assert smallest_gap(boxes_of(figure, "number")) > 1
    ticks = [tick.get_window_extent() for tick in figure.axes[0].get_xticklabels() if tick.get_text()]
    assert smallest_gap(ticks) > 1


def test_only_runs_of_two_phases_have_the_picture() -> None:
    assert "decode_from_prefill" in pictures.all_pictures(TEXT)
    alone = run_of(in_prefill(REF), in_decode(QUANT, None))
    assert "decode_from_prefill" not in pictures.all_pictures(alone)
    with pytest.raises(ValueError, match="no model in decode was compared with its own prefill"):
        phases_plot(alone)


def test_of_a_model_in_two_phases_its_prefill_is_on_the_front() -> None:
    """Decode is no better a quantization, even if its KLD happens to be smaller."""
    points, _ = points_of(replace(TEXT, models=TEXT.models[2:]), BPW, KLD)
    assert [point.label for point in points] == ["W4A16", "W4A16 decode"]
    assert [point.label for point in pareto_front(points)] == ["W4A16"]
