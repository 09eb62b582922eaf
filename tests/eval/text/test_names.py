"""Names of texts and roles that already mean something else in ``kld:NAME`` or ``memory:NAME``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compare_q.eval.specs.spec_files import parse_data_spec
from compare_q.eval.specs.spec_types import DataSpec
from compare_q.eval.text.corpus import names_of
from tests.support.toy import refusal


def text(path: str = "a.txt", **keys: Any) -> DataSpec:
    base = {"tokenizer_dir": "t", "dataset": "text", "path": path, "eval_len": 8, "eval_stride": 8}
    return parse_data_spec({**base, **keys}, Path("d.json"))


def chat(*roles: str, **keys: Any) -> DataSpec:
    base = {"tokenizer_dir": "t", "dataset": "chat", "path": "talks.jsonl", "eval_len": 8}
    return parse_data_spec({**base, "score_roles": list(roles), **keys}, Path("c.json"))


@pytest.mark.parametrize(
    "name", ["sure", "unsure", "begin", "rest", "special", "32k", "8192", "4K"]
)
def test_a_text_with_the_name_of_a_slice_or_a_number_of_tokens_is_refused(name: str) -> None:
    for spec in (text(label=name), text(f"{name}.txt"), chat("assistant", label=name)):
        message = refusal(names_of, [text("b.txt"), spec])
        assert repr(name) in message
        assert '"label"' in message


def test_a_text_with_a_role_that_is_in_use_is_refused() -> None:
    assert "'user'" in refusal(names_of, [text("user.txt"), chat("user", "assistant")])
    assert "'bot'" in refusal(names_of, [chat("bot"), text(label="bot")])
    assert names_of([text("user.txt"), chat("assistant")]) == ["user", "talks"]
    assert names_of([text("user.txt"), text("assistant.txt")]) == ["user", "assistant"]


def test_other_names_are_accepted() -> None:
    # Almost names of slices or numbers of tokens.
    names = ["Sure", "special (2)", "32 k", "k", "wiki2", "32kb"]
    assert names_of([text(label=name) for name in names]) == names


def test_the_only_text_of_a_run_may_have_any_name() -> None:
    assert names_of([text("1984.txt")]) == ["1984"]
    assert names_of([chat("user", label="user")]) == ["user"]


@pytest.mark.parametrize("role", ["sure", "special", "32k"])
def test_a_role_with_the_name_of_a_slice_is_refused(role: str) -> None:
    message = refusal(names_of, [chat("assistant", role)])
    assert "score_roles: " in message
    assert repr(role) in message
