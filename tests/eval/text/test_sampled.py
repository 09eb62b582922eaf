"""Sampled text: its spec, prompts, tokens and windows; no model is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q.eval.specs.spec_files import parse_data_spec
from compare_q.eval.specs.spec_types import PROMPT_TOKENS, DataSpec
from compare_q.eval.text import sampled, stored_tokens, text_windows
from compare_q.eval.text.eval_data import EvalData
from compare_q.eval.text.text_tokens import Tokens
from tests.support.toy import refusal

KEYS = {
    "dataset": "sampled",
    "path": "book.txt",
    "tokenizer_dir": "model",
    "eval_len": 70,
    "max_rows": 3,
}
BOS = 900


def spec(**keys: Any) -> DataSpec:
    merged = {key: value for key, value in {**KEYS, **keys}.items() if value is not ...}
    return parse_data_spec(merged, Path("data.json"))


def source(n_tokens: int, first: int = 0) -> Tokens:
    """A text of the tokens 0, 1, 2, ..., of which the first one is replaced."""
    ids = np.arange(n_tokens, dtype=np.int32)
    ids[0] = first
    special = np.array([BOS], np.int32)
    return Tokens(ids, ids[:0], 999, "v", special=special, notes=("read",))


def prompts_of(text: Tokens, n_windows: int) -> list[list[int]]:
    prompt_spec = sampled.spec_of_prompts(spec())
    windows = sampled.text_of_prompts(text, prompt_spec, n_windows, Path("model"))
    return sampled.token_ids_of_prompts(windows, n_windows)


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"eval_len": 64}, "eval_len"),
        ({"path": ...}, "path"),
        ({"dataset_path": "wiki2"}, "path"),
        ({"eval_stride": 70}, "eval_stride"),
        ({"method": "gptq"}, "method"),
        ({"sample": "spread"}, "sample"),
        ({"warmup_tokens": 1}, "warmup_tokens"),
        ({"chat_template": True}, "chat_template"),
        ({"score_roles": ["user"]}, "score_roles"),
        ({"seed": -1}, "seed"),
        ({"dataset": "text", "eval_stride": 70, "seed": 1}, "seed"),
    ],
)
def test_a_wrong_key_is_named(keys: dict[str, Any], word: str) -> None:
    assert refusal(spec, **keys).startswith(f"data.json: {word}: ")


def test_the_prompts_have_a_text_of_their_own() -> None:
    of_file = sampled.spec_of_prompts(spec(seed=3, text_column="body", label="x"))
    assert (of_file.dataset, of_file.path, of_file.text_column) == ("text", "book.txt", "body")
    assert (of_file.eval_len, of_file.stride, of_file.sample) == (64, 64, "spread")
    of_name = sampled.spec_of_prompts(spec(path=..., dataset_path="wiki2"))
    assert (of_name.dataset, of_name.dataset_path, of_name.path) == ("wiki2", None, None)


@pytest.mark.parametrize(
    "keys", [{"dataset": "wiki2"}, {"dataset": "text", "path": "book.txt"}], ids=["hub", "file"]
)
def test_a_text_becomes_sampled_and_its_prompts_that_text(keys: dict[str, Any]) -> None:
    """A text of any method."""
    windows = {"tokenizer_dir": "model", "eval_len": 100, "method": "gptq", "max_rows": 9}
    text = parse_data_spec({**windows, **keys}, Path("data.json"))
    made = sampled.spec_of_sampled(text)
    assert (made.is_sampled, made.eval_len, made.max_rows) == (True, 100, 9)
    prompts = sampled.spec_of_prompts(made)
    assert (prompts.dataset, prompts.path) == (text.dataset, text.path)
    assert sampled.spec_of_sampled(made) == made


def test_conversations_are_no_prompts() -> None:
    keys = {"dataset": "chat", "path": "c.jsonl", "tokenizer_dir": "model", "eval_len": 100}
    text = parse_data_spec(keys, Path("data.json"))
    assert "--sampled" in refusal(sampled.spec_of_sampled, text)


def test_prompts_are_spread_over_the_text() -> None:
    prompts = prompts_of(source(64 * 8 + 1), 4)
    assert [prompt[0] for prompt in prompts] == [0, 256, 128, 384]
    assert prompts[1] == list(range(256, 320))


def test_bos_takes_the_first_place_of_every_prompt() -> None:
    prompts = prompts_of(source(64 * 8 + 1, BOS), 4)
    assert [prompt[0] for prompt in prompts] == [BOS] * 4
    assert prompts[1][1:] == list(range(257, 320))
    assert {len(prompt) for prompt in prompts} == {PROMPT_TOKENS}


def test_too_short_texts_are_refused() -> None:
    assert "40 tokens" in refusal(prompts_of, source(40), 1)
    line = refusal(prompts_of, source(64 * 8 + 1), 9)
    assert "max_rows: 9 windows" in line
    assert "has 8" in line


def sampled_tokens(n_windows: int = 3, n_tokens: int = 6) -> Tokens:
    """Windows of prompts of the source, and the tokens 500, 501, ... with -0.5, -1.5, ..."""
    text = source(64 * 8 + 1)
    prompt_spec = sampled.spec_of_prompts(spec())
    windows = sampled.text_of_prompts(text, prompt_spec, n_windows, Path("model"))
    prompts = sampled.token_ids_of_prompts(windows, n_windows)
    numbers = np.arange(n_windows * n_tokens).reshape(n_windows, n_tokens)
    token_ids = (500 + numbers).tolist()
    logprobs = (-0.5 - numbers).tolist()
    return sampled.tokens_of(windows, prompts, token_ids, logprobs, "note")


def test_only_sampled_tokens_are_scored() -> None:
    """Each window is its prompt, and the sampled tokens with their log-probabilities."""
    windows = text_windows.cut(sampled_tokens(), spec(), None, Path("model"))
    assert [window.spans for window in windows.windows] == [((64, 70),)] * 3
    second = windows.windows[1]
    assert second.token_ids.tolist() == [*range(256, 320), *range(506, 512)]
    assert second.targets.tolist() == list(range(506, 512))
    assert second.sampler_logprobs is not None
    assert second.sampler_logprobs.tolist() == [-6.5, -7.5, -8.5, -9.5, -10.5, -11.5]
    assert windows.starts == (0, 70, 140)
    assert windows.text_size is None
    assert "sampled" in windows.text_note
    assert windows.notes == ("read", "note")
    data = EvalData.joined([windows])
    assert data.sampler_logprobs is not None
    assert data.sampler_logprobs.tolist() == (-0.5 - np.arange(18)).tolist()


def test_tokens_of_other_texts_have_no_log_probability() -> None:
    """In a run of several texts, in the order of the windows."""
    cut = text_windows.cut(sampled_tokens(1, 2), spec(eval_len=66), None, Path("model"))
    keys = {"dataset": "wiki2", "tokenizer_dir": "model", "eval_len": 4, "eval_stride": 4}
    book = parse_data_spec(keys, Path("data.json"))
    plain = text_windows.cut(source(9), book, 1, Path("model"))
    logprobs = EvalData.joined([plain, cut]).sampler_logprobs
    assert logprobs is not None
    np.testing.assert_array_equal(logprobs, [np.nan, np.nan, np.nan, -0.5, -1.5])
    assert EvalData.joined([plain]).sampler_logprobs is None


def test_a_shorter_window_is_the_begin_of_a_sample() -> None:
    windows = text_windows.cut(sampled_tokens(), spec(eval_len=66), 2, Path("model"))
    assert [window.spans for window in windows.windows] == [((64, 66),)] * 2
    assert windows.windows[0].sampler_logprobs is not None
    assert windows.windows[0].sampler_logprobs.tolist() == [-0.5, -1.5]


def test_log_probabilities_change_no_digest() -> None:
    """The model's scores of a window are those of the same tokens from anywhere."""
    (window, *_) = text_windows.cut(sampled_tokens(), spec(), None, Path("model")).windows
    assert replace(window, sampler_logprobs=None).digest == window.digest


def test_a_pack_keeps_the_log_probabilities(tmp_path: Path) -> None:
    tokens = sampled_tokens()
    stored_tokens.write_pack(tmp_path, tokens)
    read = stored_tokens.tokens_of_pack(tmp_path)
    assert tokens.sampler_logprobs is not None
    assert read.sampler_logprobs is not None
    np.testing.assert_array_equal(read.sampler_logprobs, tokens.sampler_logprobs)
    assert read.read == tokens.read


@pytest.mark.parametrize(
    "logprobs",
    [np.zeros(209), np.full(210, 0.5), np.full(210, -np.inf), np.zeros(210, np.int64)],
    ids=["too few", "above 1", "minus infinity", "integers"],
)
def test_damaged_log_probabilities_are_refused(tmp_path: Path, logprobs: Any) -> None:
    stored_tokens.write_pack(tmp_path, replace(sampled_tokens(), sampler_logprobs=logprobs))
    assert "damaged" in refusal(stored_tokens.tokens_of_pack, tmp_path)
