"""Rollouts as a text and a row: closed-form engines, planted faults, mistakes."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import compare_q as package
from compare_q.backends.scores_file.rollouts import read_rollouts
from tests.support import ROOT, rollouts, scores_files
from tests.support.comparisons import fake
from tests.support.rollouts import line_of, recorded, write
from tests.support.toy import Run, Specs, assert_refused

VOCAB = 500
"""Logits of the fake engine."""
LN_VOCAB = math.log(VOCAB)
ROLLOUTS = {"dataset": "rollouts", "eval_stride": ..., "eval_len": 100}
COLUMNS = ("k3", "d_mean", "d_max", "d_large", "seq_ratio_median")


def ln_p(boost: float) -> float:
    """Return ln p of every token in a fake model with this boost."""
    return boost - math.log(math.exp(boost) + VOCAB - 1)


def k3(d: float) -> float:
    return math.exp(d) - d - 1


def uniform_lines(n_sequences: int = 8) -> list[dict[str, Any]]:
    """Return sequences of different lengths, recorded by a model without preferences."""
    lines = []
    for number in range(n_sequences):
        sampled = [97 + (number + place) % 20 for place in range(10 + number)]
        lines.append(line_of([256, 97 + number], sampled, [-LN_VOCAB] * len(sampled)))
    return lines


@pytest.fixture
def rows(
    compare_q: Run, write_specs: Specs, tmp_path: Path
) -> Callable[..., dict[str, dict[str, Any]]]:
    """Run fake models on rollouts; return the rows by their labels."""

    def run(
        lines: list[dict[str, Any]], *models: dict[str, Any], flags: tuple[object, ...] = ()
    ) -> dict[str, dict[str, Any]]:
        file = write(tmp_path / "rollouts.jsonl", lines, label="recorded")
        own = {"load_fn": "rollouts", "path": str(file)}
        data, spec = write_specs([own, *models], **ROLLOUTS, path=str(file))
        ran = compare_q("-d", data, "-m", spec, "-o", tmp_path / "r.json", *flags)
        assert ran.status == 0, ran.err
        results = json.loads((tmp_path / "r.json").read_text())
        return {row["label"]: row for row in results["models"]}

    return run


Rows = Callable[..., dict[str, dict[str, Any]]]


def test_columns_in_closed_form(rows: Rows) -> None:
    """Each token has the same d; sequences have 10 to 17 of them."""
    by_label = rows(uniform_lines(), fake("trainer", boost=1.0, reference=True), fake("uniform"))
    d = ln_p(1.0) + LN_VOCAB
    trainer = by_label["trainer"]
    assert trainer["k3"] == pytest.approx(k3(d), rel=1e-5)
    assert trainer["d_mean"] == pytest.approx(d, rel=1e-5)
    assert trainer["d_max"] == pytest.approx(d, rel=1e-5)
    assert trainer["d_large"] == 0
    assert trainer["seq_ratio_median"] == pytest.approx(math.exp(13.5 * d), rel=1e-4)
    uniform = by_label["uniform"]
    assert uniform["k3"] == pytest.approx(0, abs=1e-12)
    assert uniform["kld"] > 0
    own = by_label["recorded"]
    assert own["ppl"] == pytest.approx(VOCAB)
    assert own["is_rollouts"]
    assert own["kld"] is None
    assert own["k3"] is None
    assert [own["tokens"], trainer["tokens"]] == [sum(range(10, 18))] * 2


def test_rollouts_cannot_fail_in_comparisons(rows: Rows, compare_q: Run, tmp_path: Path) -> None:
    rows(uniform_lines(), fake("trainer", boost=1.0, reference=True))
    file = tmp_path / "r.json"
    assert compare_q("show", file, "--fail-if", "kld > 1", "--fail-if", "k3 > 1").status == 0
    ran = compare_q("show", file, "--fail-if", "k3 > 0.1")
    assert ran.status == 4
    assert "trainer" in ran.err
    assert "recorded" not in ran.err


def test_equal_sequences_are_compared_with_their_own_numbers(rows: Rows) -> None:
    lines = uniform_lines(4)
    lines.append({**lines[0], "logprobs": [-LN_VOCAB - 2.0] * 10})
    row = rows(lines, fake("uniform", reference=True))["uniform"]
    assert row["d_max"] == pytest.approx(2.0, rel=1e-5)
    assert row["d_large"] == 10


def test_a_longer_sequence_is_cut_off_with_a_note(
    compare_q: Run, write_specs: Specs, tmp_path: Path
) -> None:
    file = write(tmp_path / "rollouts.jsonl", uniform_lines(), temperature=0.8)
    data, models = write_specs(**{**ROLLOUTS, "path": str(file), "eval_len": 15})
    ran = compare_q("-d", data, "-m", models, "-o", tmp_path / "r.json")
    assert ran.status == 0, ran.err
    results = json.loads((tmp_path / "r.json").read_text())
    (text,) = results["data"]["texts"]
    assert text["scored_tokens"] == 10 + 11 + 12 + 5 * 13
    notes = " ".join(text["notes"])
    assert "4 of 8 sequences" in notes
    assert "temperature 0.8" in notes


def test_tokens_that_were_not_sampled_are_not_scored(rows: Rows) -> None:
    lines = uniform_lines(4)
    for line in lines:
        line["logprobs"][3:6] = [None] * 3
    row = rows(lines, fake("uniform", reference=True))["uniform"]
    assert row["tokens"] == sum(range(10, 14)) - 4 * 3
    assert row["k3"] == pytest.approx(0, abs=1e-12)


def test_no_divergence_is_estimated_from_what_was_recorded(
    rows: Rows, compare_q: Run, tmp_path: Path
) -> None:
    """It may be wrong: a file of scores with the most probable tokens has a bound."""
    lines = uniform_lines(4)
    reference = fake("uniform", reference=True)
    rows(lines, reference)
    target = tmp_path / "windows.jsonl"
    ran = compare_q("windows", "-d", tmp_path / "data.json", "-o", target)
    assert ran.status == 0, ran.err
    _, *windows = map(json.loads, target.read_text().splitlines())
    assert [window["spans"] for window in windows] == [[[2, 12 + n]] for n in range(4)]
    scores = []
    for window in windows:
        ((begin, end),) = window["spans"]
        n_scored = end - begin
        line: dict[str, Any] = {"window": window["window"], "logprob": [-LN_VOCAB] * n_scored}
        line["top_ids"] = [list(range(20))] * n_scored
        line["top_logprobs"] = [[-LN_VOCAB] * 20] * n_scored
        scores.append(line)
    file = scores_files.write(tmp_path / "scores.jsonl", scores)
    spec = {"load_fn": "scores_file", "path": str(file), "label": "other engine"}
    row = rows(lines, reference, spec)["other engine"]
    assert row["kld_kind"] == "bound"
    assert row["k3"] == pytest.approx(0, abs=1e-12)


def test_a_gate_takes_rollouts_as_its_text(
    compare_q: Run, write_specs: Specs, tmp_path: Path
) -> None:
    file = write(tmp_path / "rollouts.jsonl", uniform_lines())
    data, models = write_specs(
        [fake("first", boost=1.0), fake("same", boost=1.0), fake("other", boost=1.5)],
        # A quarter of the longest sequence would have two sampled tokens.
        **{**ROLLOUTS, "eval_len": 19, "path": str(file)},
    )
    ran = compare_q("gate", "-d", data, "-m", models, "-o", tmp_path / "g.json")
    assert ran.status == 1, ran.err
    gate = json.loads((tmp_path / "g.json").read_text())
    outcomes = [variant["outcome"] for variant in gate["variants"]]
    assert outcomes[1] != "differs"
    assert outcomes[2] == "differs"
    # The columns of a row are those of its text, not of both texts.
    full, single = gate["variants"][0]["rows"][:2]
    assert (full["tokens"], single["tokens"]) == (sum(range(10, 18)), 10)
    for row in (full, single):
        assert row["d_mean"] == pytest.approx(ln_p(1.0) + LN_VOCAB, rel=1e-5)
        assert {sequence["tokens"] for sequence in row["worst_sequences"]} <= set(range(10, 18))
    assert len(single["worst_sequences"]) == 1


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"path": ...}, ["path", "rollouts"]),
        ({"eval_stride": 50}, ["eval_stride", "rollouts"]),
        ({"method": "once"}, ["method", "rollouts"]),
        ({"dataset_split": "test"}, ["dataset_split", "rollouts"]),
        ({"score_roles": ["user"]}, ["score_roles"]),
    ],
)
def test_keys_of_other_texts_are_refused(
    compare_q: Run, write_specs: Specs, tmp_path: Path, keys: dict[str, Any], parts: list[str]
) -> None:
    file = write(tmp_path / "rollouts.jsonl", uniform_lines())
    data, models = write_specs(**{**ROLLOUTS, "path": str(file), **keys})
    assert_refused(compare_q("-d", data, "-m", models), *parts)


def test_rollouts_are_not_ranked(rows: Rows, compare_q: Run, tmp_path: Path) -> None:
    """Their perplexity is the lowest, and is no model's."""
    lines = [{**line, "logprobs": [-1.0] * len(line["logprobs"])} for line in uniform_lines(60)]
    models = [fake("a", boost=0.1), fake("b", boost=0.2)]
    rows(lines, *models)
    out = compare_q("show", tmp_path / "r.json").out
    assert "★recorded" not in out
    (sentence,) = re.findall(r"k3 from the rollouts, nats: (.*) ± .*, b ", " ".join(out.split()))
    assert sentence == f"a {k3(ln_p(0.1) + 1):.5f}"
    (best,) = re.findall(r"(\w+) has the lowest PPL", out)
    assert best == "b"


def test_a_file_without_a_kind_is_refused(compare_q: Run, tmp_path: Path) -> None:
    file = tmp_path / "raw.jsonl"
    file.write_text(json.dumps(uniform_lines()[0]) + "\n")
    for content in (json.dumps(uniform_lines()[0]) + "\n", ""):
        file.write_text(content)
        assert_refused(compare_q(file), "raw.jsonl", '"rollouts"')


@pytest.mark.parametrize("word", ["model", "-d"])
def test_a_wrong_line_is_refused_in_one_line(
    compare_q: Run, toy_model: Path, tmp_path: Path, word: str
) -> None:
    lines = uniform_lines()
    del lines[2]["logprobs"]
    file = write(tmp_path / "rollouts.jsonl", lines)
    words: list[object] = [file, f"{toy_model}@transformers_auto"]
    if word == "-d":
        words = [f"{toy_model}@transformers_auto", "-d", file]
    assert_refused(compare_q(*words), "rollouts.jsonl: line 4: logprobs: missing")


def test_packs_and_sampled_text_refuse_rollouts(
    compare_q: Run, toy_model: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "rollouts.jsonl", uniform_lines())
    for flags in ((), ("--sampled",)):
        ran = compare_q("pack", toy_model, "-d", file, "-o", tmp_path / "pack", *flags)
        assert ran.status == 2
        assert "rollouts" in ran.err.splitlines()[-1]
        assert not (tmp_path / "pack").exists()


def script() -> str:
    """The script of docs/rollouts.md."""
    match = re.search(
        r"^```python\n(.*?)^```", (ROOT / "docs/rollouts.md").read_text(), re.M | re.S
    )
    assert match is not None
    return match[1]


def test_the_script_of_the_docs_reads_dumps_of_three_programs(tmp_path: Path) -> None:
    assert len(script().splitlines()) <= 20
    mask = [1, 0, 1, 0]
    logprobs = [-0.5, 0.0, -2.0, 0.0]
    dumps: list[dict[str, Any]] = [
        {
            "prompt_ids": [5, 6],
            "completion_ids": [7, 8, 9, 0],
            "completion_mask": mask,
            "sampling_per_token_logps": logprobs,
        },
        {
            "prompts": [5, 6],
            "responses": [7, 8, 9, 0],
            "response_mask": mask,
            "rollout_log_probs": logprobs,
        },
        {
            "token_ids": [5, 6, 7, 8, 9, 0],
            "token_loss_mask": [0, 0, *mask],
            "generation_logprobs": [0.0, 0.0, *logprobs],
        },
    ]
    dump = tmp_path / "dump.jsonl"
    dump.write_text("".join(json.dumps(line) + "\n" for line in dumps))
    file = tmp_path / "rollouts.jsonl"
    subprocess.run([sys.executable, "-c", script(), str(dump), str(file)], check=True)
    sequences = list(read_rollouts(file))
    assert len(sequences) == 3
    for sequence in sequences:
        assert sequence.token_ids.tolist() == [5, 6, 7, 8, 9]
        expected = [np.nan, np.nan, -0.5, np.nan, -2.0]
        np.testing.assert_array_equal(sequence.logprobs, expected)


@pytest.fixture(scope="module")
def toy_lines(toy_model: Path) -> list[dict[str, Any]]:
    """Sequences of the toy model at temperature 1 in float32."""
    return rollouts.sampled_lines(toy_model)


Faults = Callable[[list[dict[str, Any]]], dict[str, Any]]


@pytest.fixture
def trainer_row(compare_q: Run, toy_model: Path, tmp_path: Path) -> Faults:
    """Return the row of the toy model in float32 in Transformers, compared with a file."""

    def run(lines: list[dict[str, Any]]) -> dict[str, Any]:
        file = write(tmp_path / "rollouts.jsonl", lines, label="recorded")
        trainer = f"trainer={toy_model}@transformers_auto:dtype=float32"
        results = tmp_path / "r.json"
        ran = compare_q(file, trainer, "-o", results, "--html", tmp_path / "r.html")
        assert ran.status == 0, ran.err
        own, row = json.loads(results.read_text())["models"]
        assert own["is_rollouts"]
        assert row["reference"]
        return dict(row)

    return run


@pytest.mark.engine
def test_what_the_columns_say_of_planted_faults(
    toy_lines: list[dict[str, Any]], trainer_row: Faults, toy_model: Path, tmp_path: Path
) -> None:
    healthy = trainer_row(toy_lines)
    assert healthy["k3"] < 1e-10
    assert healthy["d_max"] < 1e-4
    assert healthy["seq_ratio_median"] == pytest.approx(1, abs=1e-3)
    assert healthy["notes"] == []

    # An engine that rounds its logits to bfloat16: small differences everywhere, no ratio far off.
    rounded = []
    for line in toy_lines:
        ids = line["prompt_ids"], line["sampled_ids"]
        logprobs = recorded(toy_model, *ids, dtype=torch.bfloat16)
        rounded.append({**line, "logprobs": logprobs})
    row = trainer_row(rounded)
    assert 1e-7 < row["k3"] < 1e-3
    assert 1e-4 < row["d_mean"] < 0.03
    assert row["d_large"] == 0
    assert 0.8 < row["seq_ratio_p5"] < row["seq_ratio_p95"] < 1.25
    assert row["notes"] == []
    rounding = row

    # Sampled and recorded at another temperature: all columns move, sequences become improbable.
    row = trainer_row(rollouts.sampled_lines(toy_model, temperature=0.6))
    assert row["k3"] > 100 * rounding["k3"]
    assert row["d_mean"] > 10 * rounding["d_mean"]
    assert row["seq_ratio_p95"] < 0.1
    assert any("temperature of about 0.6" in note for note in row["notes"])

    # The trainer's prompt lacks a token that the rollout engine had.
    row = trainer_row([{**line, "prompt_ids": line["prompt_ids"][1:]} for line in toy_lines])
    assert row["k3"] > 10 * rounding["k3"]
    assert row["d_mean"] > 3 * rounding["d_mean"]
    assert not any("shifted" in note for note in row["notes"])

    # One sequence is shifted by one: the mean of all ratios does not show it.
    shifted = [dict(line) for line in toy_lines]
    shifted[5]["logprobs"] = [float(value) for value in np.roll(toy_lines[5]["logprobs"], 1)]
    row = trainer_row(shifted)
    assert row["d_large"] > 5
    assert row["seq_ratio_median"] == pytest.approx(1, abs=1e-3)
    worst, second = row["worst_sequences"][:2]
    assert worst["window"] == 5
    assert worst["d_mean"] > 100 * second["d_mean"]
    assert worst["token"]
    assert any("shifted by one" in note and "window 5" in note for note in row["notes"])
    assert "Worst sequences" in (tmp_path / "r.html").read_text()


@pytest.mark.engine
def test_python_takes_rollouts_and_k3_estimates_the_divergence(
    toy_lines: list[dict[str, Any]], toy_model: Path, quantized: Callable[..., Path], tmp_path: Path
) -> None:
    """The rollouts are of the reference: k3 of another model estimates its KLD."""
    file = write(tmp_path / "rollouts.jsonl", toy_lines, label="recorded")
    compared = package.compare(
        file,
        f"trainer={toy_model}@transformers_auto:dtype=float32",
        f"w8={quantized('W8A8')}@transformers_auto",
    )
    frame = compared.frame().set_index("label")
    assert frame.loc["w8", "k3"] == pytest.approx(frame.loc["w8", "kld"], rel=0.5)
    assert frame.loc["w8", "kld_kind"] == "exact"
    assert math.isnan(frame.loc["recorded", "k3"])
    for column in COLUMNS:
        assert column in frame.columns
