"""How many windows an answer takes, worked out by hand; which texts it is asked of; and runs of several texts."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.base import Storage
from compare_q.backends.common.errors import InputError
from compare_q.eval.cli import until
from compare_q.eval.cli.until import Known, Target, klds, order, settled, windows_for
from compare_q.eval.results.run_result import ModelResult
from compare_q.eval.specs.reading import parse_data_spec
from compare_q.eval.specs.types import DataSpec
from compare_q.eval.stats.estimates import Sampled
from compare_q.eval.stats.uncertainty import Mean
from tests.support.command_line import Run
from tests.support.comparisons import fake
from tests.support.made import QUANT, REF, run_of, with_against, with_sums
from tests.support.toy import assert_refused

TWO = Target("kld", 0.02)


def row(label: str, kld: float, error: float | None, **spec: Any) -> ModelResult:
    """A row with this KLD, whose error as the whole text's is known."""
    model = with_against(replace(QUANT, label=label, spec=spec), kld=Mean(kld, 40 * kld, 40, 0, kld / 10, kld / 20))
    assert model.estimates
    return replace(model, estimates=replace(model.estimates, sampled=Sampled(0.01, error)))


def text(name: str = "t", **keys: Any) -> DataSpec:
    """A data spec."""
    base = {"tokenizer_dir": "t", "dataset": "text", "path": name, "eval_len": 4, "eval_stride": 4, "sample": "spread"}
    return parse_data_spec({key: value for key, value in (base | keys).items() if value is not None}, Path("d.json"))


def test_windows_that_an_error_asks_for() -> None:
    """3 % of 16 windows is 2 % of 36 of an endless text.  Of 100: 9 = c (1/16 - 1/100), 4 = c (1/n - 1/100) for n =
    30."""
    assert windows_for(0.03, 0.02, 16, 10**9) == pytest.approx(36, rel=1e-6)
    assert windows_for(0.03, 0.02, 16, 100) == pytest.approx(30)
    assert windows_for(0.02, 0.02, 16, 100) == 16
    assert windows_for(math.inf, 0.02, 16, 100) == pytest.approx(100)


def test_what_is_known_of_klds() -> None:
    """The row with the largest relative error counts; one without a KLD or an error that is known does not pass."""
    known = klds(TWO, run_of(REF, row("a", 0.1, 0.001), row("b", 0.1, 0.003)), 16, 100)
    assert (known.takes, known.is_enough, known.next_count) == (pytest.approx(30), False, 33)
    assert known.words == "the whole text's KLD of every row is known to 3 % or better"
    assert klds(TWO, run_of(REF, row("a", 0.1, 0.001)), 16, 100).is_enough
    unknown = klds(TWO, run_of(REF, row("a", 0.1, None)), 16, 100)
    assert (unknown.next_count, unknown.words) == (100, "a has no error of its KLD")
    assert klds(TWO, run_of(REF, row("a", 0.1, None)), 100, 100).words == "the whole text was scored"
    assert klds(TWO, run_of(REF), 16, 100).words == "no row has a KLD"


def test_a_kld_of_roundings_is_asked_for_no_better_than_roundings_are() -> None:
    """0.0001 ± 0.00001 is known to 10 %, but to 1 % of 0.001; beside a noise floor of 0.004 to 1 % of 0.008."""
    assert klds(TWO, run_of(REF, row("again", 0.0001, 0.00001)), 16, 100).is_enough
    assert klds(TWO, run_of(REF, row("again", 0.0, 0.0)), 16, 100).is_enough
    near = row("near", 0.002, 0.00008)
    assert not klds(TWO, run_of(REF, near), 16, 100).is_enough
    assert klds(TWO, run_of(REF, near, row("floor", 0.004, 0.001, noise_floor=True)), 16, 100).is_enough
    same_weights = replace(row("in another engine", 0.002, 0.0005), storage=Storage(16.0, 16.0, 2.0**30))
    beside = klds(TWO, run_of(REF, row("a", 0.1, 0.001), same_weights), 16, 100)
    assert (beside.is_enough, beside.words) == (
        True, "the whole text's KLD of every quantized row is known to 1 % or better"
    )  # fmt: skip
    assert not klds(TWO, run_of(REF, same_weights), 16, 100).is_enough


def test_what_is_known_of_the_order() -> None:
    """The blocks' differences 0.1, 0.1, 0.1, 0.3 of 10 tokens each have a mean of 0.015; equal rows have no order."""
    other = with_sums(replace(QUANT, label="other"), kld=(1.1, 1.1, 1.1, 1.3))
    other = with_against(other, kld=Mean(0.02, 0.8, 40, 0, 0.001, 0.001))
    assert 0 < order(Target("ranked"), run_of(REF, QUANT, other), 16, 100).takes < math.inf
    same = with_against(replace(QUANT, label="same"), kld=Mean(0.012, 0.5, 40, 0, 0.001, 0.001))
    found = order(Target("ranked"), run_of(REF, QUANT, same), 16, 100)
    assert (found.takes, found.next_count, found.words) == (math.inf, 100, "same and W4A16 are not told apart by KLD")
    holes = with_sums(other, whole=("nll",))
    why = "W4A16 and other cannot be compared (other has positions without a finite KL divergence)"
    assert order(Target("ranked"), run_of(REF, QUANT, holes), 16, 100).words == why
    floor = with_against(replace(same, label="floor", spec={"noise_floor": True}))
    assert order(Target("ranked"), run_of(REF, floor, QUANT, same), 16, 100).is_enough  # all within twice the floor


@pytest.mark.parametrize("given", ["kld", "kld:2", "kld:0%", "kld:100%", "kld:nan%", "ppl:2%", "rank", ""])
def test_answers_that_nobody_knows(given: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="neither kld:PERCENT%"):
        until.target(given)
    assert until.target("kld:0.5%") == Target("kld", 0.005)


def test_each_text_has_its_own_number_of_windows() -> None:
    """A long text that takes 40 of 100 windows, a short one of 20 that is used up, one that 16 are enough for."""
    asked = []

    def score(counts: Mapping[str, int]) -> dict[str, Known]:
        asked.append(dict(counts))
        return {name: Known(min(count, size), size, takes) for (name, count), (size, takes) in zip(
            counts.items(), ((100, 40.0), (20, math.inf), (50, 3.0)), strict=True)}  # fmt: skip

    until.in_stages(["long", "short", "easy"], score)
    assert asked == [{"long": 16, "short": 16, "easy": 16}, {"long": 44, "short": 20, "easy": 16}]


def test_it_ends_after_three_stages() -> None:
    asked = []

    def score(counts: Mapping[str, int]) -> dict[str, Known]:
        asked.append(counts["t"])
        return {"t": Known(counts["t"], 10**6, 2.0 * counts["t"])}

    until.in_stages(["t"], score)
    assert asked == [16, 36, 80]  # 16 * 2 * 1.1 = 35.2; 36 * 2 * 1.1 = 79.2
    known = Known(80, 500, 120.0, "it is", "; the rest")
    assert until.in_words(known, is_last=False) == "after 80 of the text's 500 windows it is; 132 windows will do"
    assert (
        until.in_words(known, is_last=True) == "after 80 of the text's 500 windows it is; it takes about 132 (-r 132)"
    )
    assert until.in_words(replace(known, takes=70), is_last=True).endswith(" it is; the rest")


def test_texts_that_it_decides() -> None:
    """By default texts without a number of windows; if asked for, all spread ones; conversations keep theirs."""
    chat = text(dataset="chat", eval_stride=None, sample=None, max_rows=7)
    texts = {"own": text(max_rows=5), "free": text(), "chat": chat}
    counts = {asked: [spec.max_rows for spec in settled(asked, texts, reference=True)[1].values()]
              for asked in (None, TWO)}  # fmt: skip
    assert counts == {None: [5, None, 7], TWO: [None, None, 7]}
    assert settled(None, texts, reference=True)[0] == until.DEFAULT
    assert settled(None, {"own": texts["own"], "chat": chat}, reference=True)[0] is None
    asked, sized = settled(None, texts, reference=False)
    assert (asked, [spec.max_rows for spec in sized.values()]) == (None, [5, until.ROWS, 7])


def test_texts_of_which_it_cannot_be_asked() -> None:
    first, chat = text(sample="first"), text(dataset="chat", eval_stride=None, sample=None)
    for texts, reference, part in (
        ({"t": text()}, False, "--until: is about KL divergence from a reference, and there is none; give -r"),
        ({"t": text(), "book": first, "chat": chat}, True, '--until: book: a run takes the first windows, .* "spread"'),
        ({"chat": chat}, True, "--until: is for texts that are cut into windows; of conversations and questions"),
    ):
        with pytest.raises(InputError, match=part):
            settled(TWO, texts, reference=reference)
    assert settled(None, {"book": first}, reference=True) == (None, {"book": first})


def test_several_texts_of_different_lengths(compare_q: Run, toy_model: Path, tmp_path: Path) -> None:
    """40 windows of one text, 18 of the other, all scored since the error of a KLD with a nan is not known."""
    specs = []
    for name, letters in (("long", 2001), ("short", 901), ("third", 1001)):
        (tmp_path / f"{name}.txt").write_text("abcdefgh " * (letters // 9 + 1), encoding="utf-8")
        specs.append({
            "label": name, "tokenizer_dir": str(toy_model), "dataset": "text", "path": f"{name}.txt", "eval_len": 50,
            "eval_stride": 50, "sample": "spread",
        })  # fmt: skip
    (tmp_path / "texts.json").write_text(json.dumps(specs[:2]))
    (tmp_path / "models.json").write_text(
        json.dumps([fake("ref", boost=3.0, reference=True), fake("a", nan_windows=[0])])
    )
    words = ("-d", tmp_path / "texts.json", "-m", tmp_path / "models.json", "-o", tmp_path / "r.json")
    ran = compare_q(*words, "--until", "kld:2%")
    assert ran.status == 0, ran.err
    counts = [each["data"]["windows"] for each in json.loads((tmp_path / "r.json").read_text())["texts"]]
    assert counts == [40, 18]
    for name, count in (("long", 40), ("short", 18)):
        assert f"{name}: after 16 of the text's {count} windows a has no error of its KLD; {count} windows" in ran.err
    assert "short: after 18 of the text's 18 windows the whole text was scored" in ran.err
    (tmp_path / "texts.json").write_text(json.dumps([specs[0], {**specs[2], "sample": "first", "max_rows": 3}]))
    assert_refused(compare_q(*words, "--until", "kld:2%"), "--until: third: a run takes the first windows")
