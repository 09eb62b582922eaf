"""The slices of a run, against loops in plain Python and float64 over the scores of its tokens.

The run has a text of words, conversations with two scored roles, and a second text; the tokenizer
has added special tokens.  Which slice a token is in follows from the tokens of its window alone,
without the masks under test.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from compare_q.eval.api import Comparison, compare
from compare_q.eval.results import ModelResult, RunResult
from compare_q.eval.run import stored_scores
from compare_q.eval.text.eval_data import EvalData
from tests.eval.stats.test_plain_loops import loop_mean
from tests.support.chats import MARKED, SPECIAL, save_chat_tokenizer, write_lines
from tests.support.comparisons import toy
from tests.support.toy import needs_accelerate, save_llama

pytestmark = needs_accelerate
EOS = 256
STARTS = EOS + 1 + SPECIAL.index("<|im_start|>")
SPECIAL_IDS = {EOS, EOS + 1, EOS + 2}
FIXED = {"special", "sure", "unsure", "begin", "rest"}
NAMES = {"words", "talks", "digits"}
ROLES = {"user", "assistant"}
SURE = float(np.float32(math.log(0.9)))
UNSURE = float(np.float32(math.log(0.5)))
"""Thresholds are in float32, as the scores are."""
LEAST_BLOCKS = 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """A run of three texts: the toy in float32, as the reference, and in bfloat16."""
    folder = tmp_path_factory.mktemp("slices")
    model = save_llama(folder / "model", max_position_embeddings=512, initializer_range=0.5)
    save_chat_tokenizer(model, MARKED)
    draw = np.random.default_rng(3)
    (folder / "words.txt").write_text("".join(draw.choice(list("abcdefgh \n"), 4000)))
    (folder / "digits.txt").write_text("".join(draw.choice(list("0123456789"), 900)))
    talks = []
    for _ in range(12):
        turns = []
        for role in ("user", "assistant", "user", "assistant"):
            letters = draw.choice(list("xyz ."), draw.integers(5, 40))
            turns.append({"role": role, "content": "".join(letters)})
        talks.append({"messages": turns})
    write_lines(folder / "talks.jsonl", *talks)
    shared = {"tokenizer_dir": str(model)}
    texts = [
        {
            **shared,
            "dataset": "text",
            "path": str(folder / "words.txt"),
            "eval_len": 400,
            "eval_stride": 400,
        },
        {**shared, "dataset": "chat", "path": str(folder / "talks.jsonl"), "eval_len": 500},
        {
            **shared,
            "dataset": "text",
            "path": str(folder / "digits.txt"),
            "eval_len": 100,
            "eval_stride": 100,
        },
    ]
    texts[1] |= {"score_roles": sorted(ROLES)}
    for name, text in zip(("words", "talks", "digits"), texts, strict=True):
        text["label"] = name
    models = [toy(model, "float32", reference=True), toy(model, "bfloat16", dtype="bfloat16")]
    return compare(data=texts, models=models, cache_dir=folder / "cache", quiet=True)


def role_of(data: EvalData, window: int, position: int) -> str:
    """Return the role whose turn has the token: the word after the last start of a turn."""
    ids = data.windows[window].token_ids.tolist()
    start = max(place for place in range(position) if ids[place] == STARTS)
    tokenizer = Tokenizer.from_file(str(data.tokenizer / "tokenizer.json"))
    turn: str = tokenizer.decode(ids[start + 1 : position])
    return turn.partition("\n")[0]


def slices_of_token(row: dict[str, Any], data: EvalData, highest: float) -> set[str]:
    """Return the names of the slices that a token is in."""
    names = {row["text"]}
    if row["position"] < 256:
        names.add("begin")
    else:
        names.add("rest")
    if row["text"] == "talks":
        names.add(role_of(data, row["window"], row["position"]))
    if row["token_id"] in SPECIAL_IDS:
        names.add("special")
    if math.isfinite(highest) and highest >= SURE:
        names.add("sure")
    if math.isfinite(highest) and highest < UNSURE:
        names.add("unsure")
    return names


def row_of(run: Comparison, label: str) -> ModelResult:
    (row,) = [model for model in run.results.models if model.label == label]
    return row


@pytest.mark.parametrize("label", ["float32", "bfloat16"])
def test_every_slice_is_the_mean_over_its_tokens(run: Comparison, label: str) -> None:
    model = row_of(run, label)
    assert model.error is None
    assert run.data is not None
    assert run.cache is not None
    stored = stored_scores.scores_of_row(run.cache, model.scores_key, run.data)
    assert stored is not None
    blocks = stored_scores.block_assignment(run.data, stored).block.tolist()
    rows = run.tokens(label).to_dict("records")
    entries: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        highest = row["top1_logprob"]
        if not model.reference:
            highest = row["ref_top1_logprob"]
        for name in slices_of_token(row, run.data, float(highest)):
            entries.setdefault(name, []).append(number)
    assert entries.keys() == NAMES | ROLES | FIXED
    assert set(model.slices) == set(entries)
    for name, numbers in entries.items():
        of_slice = [rows[number] for number in numbers]
        at = [blocks[number] for number in numbers]
        part = model.slices[name]
        loss, loss_error = mean_of([-float(row["logprob"]) for row in of_slice], at)
        assert part.tokens == len(of_slice)
        assert part.ppl == pytest.approx(math.exp(loss), rel=1e-9)
        assert part.ppl_stderr == expected_error(math.exp(loss) * loss_error, at)
        if model.reference:
            assert (part.kld, part.same_top) == (None, None)
            continue
        kld, kld_error = mean_of([float(row["kld"]) for row in of_slice], at)
        same, same_error = mean_of([float(row["same_top"]) for row in of_slice], at)
        assert part.kld == pytest.approx(kld, rel=1e-9)
        assert part.same_top == pytest.approx(same, rel=1e-9)
        assert part.kld_stderr == expected_error(kld_error, at)
        assert part.same_top_stderr == expected_error(same_error, at)


def expected_error(error: float, block: list[int]) -> Any:
    """Return what an error must be; None if too few blocks have tokens of the slice."""
    if len(set(block)) < LEAST_BLOCKS:
        return None
    return pytest.approx(error, rel=1e-7)


def mean_of(values: list[float], block: list[int]) -> tuple[float, float]:
    """Return (mean, error by blocks); all values are finite."""
    assert all(math.isfinite(value) for value in values)
    if len(set(block)) < 2:
        return math.fsum(values) / len(values), math.nan
    mean, error, _ = loop_mean(values, block)
    return mean, error


def test_texts_are_all_tokens_and_roles_are_all_of_the_conversations(
    run: Comparison, tmp_path: Path
) -> None:
    model = row_of(run, "bfloat16")
    tokens = {name: part.tokens for name, part in model.slices.items()}
    assert sum(tokens[name] for name in NAMES) == tokens["begin"] + tokens["rest"] == model.tokens
    assert sum(tokens[role] for role in ROLES) == tokens["talks"]
    klds = [model.slices[name].kld for name in ("words", "talks", "digits")]
    weights = [tokens[name] for name in ("words", "talks", "digits")]
    assert np.average(np.array(klds, np.float64), weights=weights) == pytest.approx(
        model.kld, rel=1e-12
    )
    run.save(tmp_path / "r.json")
    assert RunResult.read(tmp_path / "r.json").models[1].slices == model.slices
