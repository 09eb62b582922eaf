"""The worst tokens of a model, from stored scores made by hand; a byte tokenizer decodes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compare_q.backends.base import TokenScores, Window
from compare_q.backends.scoring import segments
from compare_q.eval.common.cache import Cache
from compare_q.eval.report.worst_tokens import (
    COUNT,
    TOKENS_AFTER,
    TOKENS_BEFORE,
    with_worst_tokens,
)
from compare_q.eval.results import ModelResult, WorstToken
from compare_q.eval.specs.spec_files import parse_data_spec
from compare_q.eval.text import vocabulary
from compare_q.eval.text.eval_data import EvalData
from compare_q.eval.text.text_windows import TextWindows
from tests.support.made import run_of
from tests.support.toy import save_toy_tokenizer

LENGTH, STRIDE, N_WINDOWS = 1025, 512, 4
TEXT = "".join(f"{i:04x} Ünï " for i in range(400)).encode()
INDEX = np.concatenate([window * STRIDE + np.arange(1, LENGTH) for window in range(N_WINDOWS)])
TAG = "0123456789abcdef"
OF_WINDOW = np.repeat(np.arange(N_WINDOWS), LENGTH - 1)


@pytest.fixture
def data(tmp_path: Path) -> EvalData:
    save_toy_tokenizer(tmp_path)
    tokenizer = vocabulary.load_tokenizer(tmp_path, trust_remote_code=False)
    ids = np.asarray(tokenizer(TEXT.decode())["input_ids"], np.int32)
    starts = tuple(window * STRIDE for window in range(N_WINDOWS))
    windows = tuple(
        Window.scored_from(i, ids[start : start + LENGTH], 1) for i, start in enumerate(starts)
    )
    spec = parse_data_spec(
        {"tokenizer_dir": "t", "dataset": "text", "path": "a", "eval_len": 9, "eval_stride": 9},
        tmp_path,
    )
    text = TextWindows(
        "text", spec, windows, len(ids), 256, "", "", "", tmp_path, starts, len(windows), None
    )
    return EvalData.joined([text])


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def worst_of(cache: Cache, data: EvalData, **columns: np.ndarray) -> tuple[WorstToken, ...]:
    """Return the worst tokens of a model with these scores [N] in the cache; logprob is -1 unless
    given.
    """
    named = {"logprob": np.full(len(INDEX), -1.0), **columns}
    scored = [
        (
            window,
            TokenScores(
                window.index,
                **{k: v[window.index == OF_WINDOW].astype(np.float32) for k, v in named.items()},
            ),
        )
        for window in data.windows
    ]
    folder = cache.path("scores", "key", "")
    segments.commit(folder, TAG, scored, "s", 1.0)
    segments.write_record(
        folder, "s", {"known": {}, "provenance": {}, "load_seconds": 0, "reference": {}}
    )
    run = run_of(ModelResult.of("a", "fake", scores_key=f"key/{TAG}"), ModelResult.of("b", "fake"))
    found = with_worst_tokens(run, data, cache)
    assert found.models[1] == run.models[1]  # has no scores
    return found.models[0].worst_tokens


def test_each_token_comes_once_with_its_scores_and_context(data: EvalData, cache: Cache) -> None:
    """Token 594 of the text is scored in two windows."""
    kld = np.full(len(INDEX), 0.01)
    for place, value in {594: 2.0, 704: 3.0, 4: 1.0}.items():
        kld[place == INDEX] = value
    kld[INDEX == 800] = np.inf
    worst = worst_of(cache, data, kld=kld, ref_logprob=np.full(len(INDEX), -0.5))
    assert [(each.window, each.position, each.kld) for each in worst[:3]] == [
        (0, 704, 3.0),
        (0, 594, 2.0),
        (0, 4, 1.0),
    ]
    assert len(worst) == COUNT
    assert (worst[0].logprob, worst[0].ref_logprob) == (-1.0, -0.5)
    for each in worst[:3]:
        first, at = max(each.position - TOKENS_BEFORE, 0), each.position
        shown = (each.before, each.token, each.after)
        gold = (TEXT[first:at], TEXT[at : at + 1], TEXT[at + 1 : at + 1 + TOKENS_AFTER])
        assert tuple(part.strip("\N{REPLACEMENT CHARACTER}") for part in shown) == tuple(
            part.decode(errors="ignore") for part in gold
        )


def test_a_character_of_two_tokens_belongs_to_the_second(data: EvalData, cache: Cache) -> None:
    at = TEXT.index("Ü".encode(), 300)
    logprob = np.full(len(INDEX), -1.0)
    logprob[at == INDEX], logprob[at + 1 == INDEX] = -9.0, -8.0
    first, second = worst_of(cache, data, logprob=logprob)[:2]
    assert (first.token, second.token) == ("", "Ü")
    assert first.after.startswith("Ün")
    assert (first.kld, first.ref_logprob, first.logprob) == (None, None, -9.0)


def test_transformers_decodes_the_same(
    data: EvalData, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers is used for a tokenizer without a tokenizer.json."""
    found = worst_of(cache, data)
    monkeypatch.setattr(vocabulary, "FILE", "none.json")
    assert worst_of(cache, data) == found


def test_tokens_that_cannot_be_decoded_are_left_out(
    data: EvalData, cache: Cache, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows do not change, so that results.json is written."""
    file = data.tokenizer / "tokenizer.json"
    for damage in (
        lambda: file.write_text("{"),
        lambda: [each.unlink() for each in data.tokenizer.glob("*.json")],
    ):
        damage()
        assert worst_of(cache, data) == ()
        assert "no worst tokens: " in capsys.readouterr().err
