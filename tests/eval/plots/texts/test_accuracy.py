"""Plots of the answers to questions: accuracy in per cent, of which more is better, alone and of several texts."""

from __future__ import annotations

import math

import pytest

from compare_q.eval.plots import dumbbell, measures, pictures, points, scatter
from compare_q.eval.plots.measures import ACCURACIES, BPW, KLD, PPL
from compare_q.eval.results.run_result import Results, TextResult
from tests.support.drawn import artists_of_kind
from tests.support.several_texts import NAMES, text_of, three, with_answers, with_failed_text, with_text

ACC = ACCURACIES["acc"]
RIGHT = {"bf16": "1111", "noise": "1111", "EXL3_4.0": "1010", "GGUF_Q4_K": "0111"}
SPREAD = 100 * math.sqrt(1 / 12)
"""Of -1, -1, 0, 0: mean -1/2, squares 1; over 3, over 4."""


def asked(place: int, **changed: str) -> TextResult:
    return with_answers(text_of(NAMES[place], place), **{**RIGHT, **changed})


def run(**changed: str) -> TextResult:
    found = asked(1, **changed)
    assert found
    return found


def test_values_errors_and_the_reference_by_hand() -> None:
    """75 and 50 %; the errors are of the difference from the reference, whose accuracy is a line."""
    drawn, left_out = points.points_of(run(), BPW, ACC)
    assert left_out == []
    assert [(p.y, p.shown) for p in drawn] == [(100, "100"), (100, "100"), (50, "50"), (75, "75")]
    assert [p.error for p in drawn] == [None, 0, pytest.approx(SPREAD), pytest.approx(25)]
    assert [level.name for level in points.levels_of(run(), ACC)] == ["reference 100.0"]
    best = [p.label for p in points.pareto_front(drawn)]
    assert best == ["EXL3 4.0", "GGUF Q4_K"]  # larger files, but more right answers
    worse = points.points_of(run(GGUF_Q4_K="0000"), BPW, ACC)[0]
    assert [p.label for p in points.pareto_front(worse)] == ["EXL3 4.0"]


def test_the_plot_of_a_task_shows_accuracy_on_a_linear_axis() -> None:
    assert measures.chosen(Results((run(),)), None, None) is ACC
    assert measures.chosen(Results((run(),)), "kld", None) is KLD
    assert measures.chosen(Results((run(),)), "acc_norm", None) is ACCURACIES["acc_norm"]
    assert set(pictures.scatter_of(run())) - set(pictures.SCATTER) == {"acc_bpw", "acc_size"}
    figure = scatter.scatter_figure(run(), measure=ACC)
    axes = figure.axes[0]
    assert axes.get_yscale() == "linear"
    assert axes.get_ylabel().startswith("Accuracy / %")
    words = "one standard error of the difference from the reference's"
    assert points.error_note(run(), ["EXL3 4.0"], ACC).endswith(words)
    assert [mark.get_ydata()[0] for mark in artists_of_kind(figure, "point")] == [50, 75, 100, 100]  # all to scale


def test_without_a_reference_an_error_is_the_models_own() -> None:
    alone = with_answers(text_of("c4", 1, reference=False), **RIGHT)
    assert alone
    drawn = points.points_of(alone, BPW, ACC)[0]
    assert drawn[3].error == pytest.approx(25)  # three of four
    assert points.levels_of(alone, ACC) == []
    words = "one standard error of the accuracy (mostly common to all)"
    assert points.error_note(alone, [p.label for p in drawn], ACC).endswith(words)


def test_an_open_question_leaves_a_model_out() -> None:
    drawn, left_out = points.points_of(run(noise="11?1"), BPW, ACC)
    assert "noise ≈" not in [p.label for p in drawn]
    assert left_out == ["noise: not in the plot: acc unknown"]


def test_several_tasks_best_first_with_their_mean() -> None:
    """The means of 50 and 50, and of 75 and 25; the text that is no task has no marker, and is not missed."""
    result = Results((text_of("wiki2", 0), asked(1), asked(2, GGUF_Q4_K="0001")))
    assert measures.chosen(result, None, None) is KLD
    assert measures.chosen(Results(result.texts[1:]), None, None) is ACC
    found = sorted(dumbbell.rows_of(result, ACC, None), key=lambda row: row.place)
    assert [row.label for row in found] == ["bf16", "noise ≈", "EXL3 4.0", "GGUF Q4_K"]
    assert [row.mean.value for row in found] == [100, 100, 50, 50]
    assert found[2].mean.stderr == pytest.approx(SPREAD / math.sqrt(2))
    assert [spot.text for spot in found[3].spots] == [1, 2]
    assert found[2].spots[0].limits == pytest.approx((50 - 1.96 * SPREAD, 50 + 1.96 * SPREAD), abs=0.01)
    assert dumbbell.missing_note(result, ACC) == ""
    failed = with_failed_text(result, "chat", "no such file")
    assert dumbbell.missing_note(failed, ACC) == "n/a: chat (no such file)"
    assert dumbbell.rows_of(failed, ACC, None)[0].mean.value is None  # nobody knows what chat was
    figure = dumbbell.dumbbell_plot(result, ACC)
    assert figure.axes[0].get_xscale() == "linear"
    assert artists_of_kind(figure, "level") == []
    assert dumbbell.rows_of(three(), ACC, None) == []
    assert measures.chosen(with_text(three(), asked(1)), "ppl", None) is PPL
