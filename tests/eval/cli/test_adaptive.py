"""The number of windows that ``--until`` needs, computed by hand; the texts to which it applies; several texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from compare_q.backends.base import Storage
from compare_q.eval.cli import adaptive
from compare_q.eval.cli.adaptive import settled, windows_needed
from compare_q.eval.results import ModelResult
from compare_q.eval.run import runner
from compare_q.eval.run.config import RunConfig
from compare_q.eval.specs.reading import parse_data_spec
from compare_q.eval.specs.types import DataSpec
from compare_q.eval.stats.estimates import Sampled
from compare_q.eval.stats.uncertainty import Mean
from tests.support.made import QUANT, REF, replace, run_of, with_against
from tests.support.toy import refusal

TWO = 0.02


def row(label: str, kld: float, error: float | None, **spec: Any) -> ModelResult:
    """A row with this KLD and its error as an estimate of the whole text's KLD."""
    model = with_against(replace(QUANT, label=label, spec=spec), kld=Mean(kld, 40 * kld, 40, 0, kld / 10, kld / 20))
    assert model.estimates
    return replace(model, estimates=replace(model.estimates, sampled=Sampled(0.01, error)))


def text(name: str = "t", **keys: Any) -> DataSpec:
    base = {"tokenizer_dir": "t", "dataset": "text", "path": name, "eval_len": 4, "eval_stride": 4, "sample": "spread"}
    return parse_data_spec({key: value for key, value in (base | keys).items() if value is not None}, Path("d.json"))


def test_what_is_known_of_klds() -> None:
    """The row with the largest relative error decides; a row whose error is unknown needs the whole text.

    In an endless text, an error of 3 % with 16 windows becomes 2 % with 36.  In a text of 100 windows, 9 = c (1/16 -
    1/100) and 4 = c (1/n - 1/100), so that n = 30.  A tenth is added to both.
    """
    two = run_of(REF, row("a", 0.1, 0.001), row("b", 0.1, 0.003))
    needed, words = windows_needed(two, TWO, 16, 100)
    assert (needed, words) == (33, "the whole text's KLD of every row is known to 3 % or better")
    assert windows_needed(two, TWO, 16, 10**9)[0] == 40
    assert windows_needed(run_of(REF, row("a", 0.1, 0.001)), TWO, 16, 100)[0] == 16
    assert windows_needed(run_of(REF, row("a", 0.1, 0.002)), TWO, 16, 100)[0] == 16
    unknown = run_of(REF, row("a", 0.1, None))
    assert windows_needed(unknown, TWO, 16, 100) == (100, "a has no error of its KLD")
    assert windows_needed(unknown, TWO, 100, 100) == (100, "the whole text was scored")
    assert windows_needed(run_of(REF), TWO, 16, 100) == (16, "no row has a KLD")


def test_a_kld_of_roundings_is_asked_for_no_better_than_roundings_are() -> None:
    """A KLD of 0.0001 ± 0.00001 is known to 10 %, but the error is 1 % of the limit 0.001 (or of 0.008, with a noise
    floor of 0.004)."""

    def is_enough(*rows: ModelResult) -> bool:
        return windows_needed(run_of(REF, *rows), TWO, 16, 100)[0] == 16

    near, floor = row("near", 0.002, 0.00008), row("floor", 0.004, 0.001, noise_floor=True)
    same_weights = replace(row("in another engine", 0.002, 0.0005), storage=Storage(16.0, 16.0, 2.0**30))
    assert is_enough(row("again", 0.0001, 0.00001))
    assert is_enough(row("again", 0.0, 0.0))
    assert not is_enough(near)
    assert is_enough(near, floor)
    assert is_enough(row("a", 0.1, 0.001), same_weights)
    assert not is_enough(same_weights)
    words = windows_needed(run_of(REF, row("a", 0.1, 0.001), same_weights), TWO, 16, 100)[1]
    assert words == "the whole text's KLD of every quantized row is known to 1 % or better"


Staged = Callable[..., tuple[list[Any], list[str]]]


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Staged:
    """Return a function that returns (the windows per text and ``clear`` of each run, the printed lines)."""

    def stages(errors: Mapping[str, float], sizes: Mapping[str, int], signal: int = 0) -> tuple[list[Any], list[str]]:
        asked, lines = [], list[str]()

        def score(config: RunConfig, texts: Mapping[str, DataSpec], _: object) -> Any:
            counts = {name: min(spec.max_rows or 0, sizes[name]) for name, spec in texts.items()}
            asked.append((*counts.values(), config.clear))
            results = [run_of(REF, row("a", 0.1, errors[name])).updated(name=name) for name in texts]
            data = [SimpleNamespace(windows=range(count), available=sizes[name]) for name, count in counts.items()]
            return SimpleNamespace(results=SimpleNamespace(texts=results), data=data, signal=signal)

        monkeypatch.setattr(runner, "run", score)
        config = RunConfig(cast(Any, None), cast(Any, SimpleNamespace(say=lines.append)), clear=True)
        adaptive.run(config, TWO, {name: text(name) for name in errors}, [])
        return asked, lines

    return stages


def test_each_text_has_its_own_number_of_windows_in_two_stages(staged: Staged) -> None:
    """3 % with 16 of 100 windows requires 30 windows plus a tenth; a short text is scored whole; one text is done."""
    errors: dict[str, float | None] = {"long": 0.003, "short": None, "easy": 0.001}
    asked, lines = staged(errors, {"long": 100, "short": 20, "easy": 50})
    assert asked == [(16, 16, 16, True), (33, 20, 16, False)]
    assert [line.split(" windows ")[0] for line in lines] == [
        "long: after 16 of the text's 100", "short: after 16 of the text's 20", "easy: after 16 of the text's 50",
        "long: after 33 of the text's 100", "short: after 20 of the text's 20", "easy: after 16 of the text's 50",
    ]  # fmt: skip
    assert lines[0].endswith("; 33 windows will do")
    assert lines[3].endswith("; it takes about 58 (-r 58)")  # 3 % again: 1 / (4/9/33 + 5/9/100) = 52.6


def test_texts_that_it_decides() -> None:
    """By default, texts without max_rows; with --until, all spread texts; conversations keep their number."""
    chat = text(dataset="chat", eval_stride=None, sample=None, max_rows=7)
    texts = {"own": text(max_rows=5), "free": text(), "chat": chat}
    counts = {asked: [spec.max_rows for spec in settled(asked, texts, reference=True)[1].values()]
              for asked in (None, TWO)}  # fmt: skip
    assert counts == {None: [5, None, 7], TWO: [None, None, 7]}
    assert settled(None, texts, reference=True)[0] == adaptive.DEFAULT
    assert settled(None, {"own": texts["own"], "chat": chat}, reference=True)[0] is None
    asked, sized = settled(None, texts, reference=False)
    assert (asked, [spec.max_rows for spec in sized.values()]) == (None, [5, adaptive.ROWS, 7])
    said = refusal(settled, TWO, {**texts, "third": text(sample="first")}, reference=True)
    assert said.startswith("--until: third: its first windows say little")
