"""The worst tokens of a model, from stored scores made by hand; a byte tokenizer decodes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compare_q.backends.base import KldKind, TokenScores, Window
from compare_q.backends.scoring import segments
from compare_q.eval.common.cache import Cache
from compare_q.eval.report import worst_tokens
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

LENGTH = 1025
STRIDE = 512
N_WINDOWS = 4
# Ü and ï have two bytes, and therefore two tokens.
TEXT = "".join(f"{i:04x} Ünï " for i in range(400)).encode()
# Windows overlap by half: most tokens are scored twice.
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


def worst_of(
    cache: Cache, data: EvalData, kind: KldKind = "exact", **columns: np.ndarray
) -> tuple[WorstToken, ...]:
    """Return the worst tokens of a model with these scores [N] in the cache.

    A log-probability is -1 by default.
    """
    all_columns = {"logprob": np.full(len(INDEX), -1.0), **columns}
    scored = []
    for window in data.windows:
        inside = window.index == OF_WINDOW
        scores = {name: column[inside] for name, column in all_columns.items()}
        scores = {name: column.astype(np.float32) for name, column in scores.items()}
        scored.append((window, TokenScores(window.index, **scores, kld_kind=kind)))
    folder = cache.path("scores", "key", "")
    segments.commit(folder, TAG, scored, "s", 1.0)
    segments.write_record(
        folder, "s", {"known": {}, "provenance": {}, "load_seconds": 0, "reference": {}}
    )
    run = run_of(ModelResult.of("a", "fake", scores_key=f"key/{TAG}"), ModelResult.of("b", "fake"))
    scored_model, without_scores = with_worst_tokens(run, data, cache).models
    assert without_scores == run.models[1]
    return scored_model.worst_tokens


def test_each_token_comes_once_with_its_scores_and_context(data: EvalData, cache: Cache) -> None:
    """Token 594 of the text is scored in two windows."""
    kld = np.full(len(INDEX), 0.01)
    for place, value in {594: 2.0, 704: 3.0, 4: 1.0}.items():
        kld[place == INDEX] = value
    # A KLD that is not finite has no place among the worst.
    kld[INDEX == 800] = np.inf
    worst = worst_of(cache, data, kld=kld, ref_logprob=np.full(len(INDEX), -0.5))
    assert [(token.window, token.position, token.kld) for token in worst[:3]] == [
        (0, 704, 3.0),
        (0, 594, 2.0),
        (0, 4, 1.0),
    ]
    assert len(worst) == COUNT
    assert (worst[0].logprob, worst[0].ref_logprob) == (-1.0, -0.5)
    for token in worst[:3]:
        at = token.position
        first = max(at - TOKENS_BEFORE, 0)
        for text, content in (
            (token.before, TEXT[first:at]),
            (token.token, TEXT[at : at + 1]),
            (token.after, TEXT[at + 1 : at + 1 + TOKENS_AFTER]),
        ):
            # Incomplete characters are U+FFFD in one, and left out of the other.
            assert text.strip("\N{REPLACEMENT CHARACTER}") == content.decode(errors="ignore")


@pytest.mark.parametrize("length", [0, 1, 1280, 5000])
def test_the_largest_of_a_long_text_are_those_of_a_full_sort(length: int) -> None:
    """Also among equal numbers."""
    values = np.random.default_rng(0).integers(0, 300, length).astype(np.float64)
    gold = np.argsort(-values, kind="stable")
    assert list(worst_tokens.largest_first(values)) == gold.tolist()


def test_a_character_of_two_tokens_belongs_to_the_second(data: EvalData, cache: Cache) -> None:
    at = TEXT.index("Ü".encode(), 300)
    logprob = np.full(len(INDEX), -1.0)
    logprob[at == INDEX] = -9.0
    logprob[at + 1 == INDEX] = -8.0
    first, second = worst_of(cache, data, logprob=logprob)[:2]
    assert (first.token, second.token) == ("", "Ü")
    assert first.after.startswith("Ün")
    assert (first.kld, first.ref_logprob, first.logprob) == (None, None, -9.0)


@pytest.mark.parametrize(("kind", "place"), [("bound", 704), ("estimate", 4)])
def test_an_estimate_says_nothing_about_a_single_token(
    data: EvalData, cache: Cache, kind: KldKind, place: int
) -> None:
    """The largest bound is at 704, and the largest loss, which counts for an estimate, at 4."""
    kld = np.full(len(INDEX), 0.01)
    kld[INDEX == 704] = 3.0
    logprob = np.full(len(INDEX), -1.0)
    logprob[INDEX == 4] = -9.0
    worst = worst_of(cache, data, kind, kld=kld, logprob=logprob)
    assert worst[0].position == place
    assert (worst[0].kld is None) == (kind == "estimate")


def test_transformers_decodes_the_same(
    data: EvalData, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers is used for a tokenizer without a tokenizer.json."""
    worst = worst_of(cache, data)
    monkeypatch.setattr(worst_tokens, "TOKENIZER_FILE", "none.json")
    assert worst_of(cache, data) == worst


def test_tokens_that_cannot_be_decoded_are_left_out(
    data: EvalData, cache: Cache, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows do not change, so that results.json is written."""
    file = data.tokenizer / "tokenizer.json"
    file.write_text("{")
    assert worst_of(cache, data) == ()
    assert "no worst tokens: " in capsys.readouterr().err
    for json_file in data.tokenizer.glob("*.json"):
        json_file.unlink()
    assert worst_of(cache, data) == ()
    assert "no worst tokens: " in capsys.readouterr().err
