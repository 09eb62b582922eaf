"""Conversations: rows, malformed rows, and the scored tokens by hand and by Transformers' mask."""

from __future__ import annotations

import hashlib
import itertools
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs.spec_files import parse_data_spec
from compare_q.eval.specs.spec_types import DataSpec
from compare_q.eval.text import (
    conversations,
    text_tokens,
    text_windows,
    vocabulary,
    windows_in_words,
)
from compare_q.eval.text.conversations import Conversation
from compare_q.eval.text.text_tokens import Tokens
from compare_q.eval.text.text_windows import TextWindows
from tests.support.chats import MARKED, QUESTION, SUMS, WEATHER, save_chat_tokenizer, write_lines
from tests.support.toy import refusal

UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
THINKING = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.last -%}
{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}
{{- m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""A template that keeps only the last turn's reasoning, as Qwen3's does."""


def encoded(folder: Path, text: str) -> list[int]:
    """Return the token ids of a text with special tokens, from the tokenizer in ``folder``."""
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return ids


ASK = {"role": "user", "content": "Hello"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Bern"}}}


def spec(folder: Path, **keys: Any) -> DataSpec:
    base = {"tokenizer_dir": "tokenizer", "dataset": "chat", "path": "a.jsonl", "eval_len": 512}
    return parse_data_spec({**base, **keys}, folder / "d.json")


def rows_of(file: Path, **keys: Any) -> list[Conversation]:
    return conversations.read(spec(file.parent, path=file.name, **keys), Progress(quiet=True))


def tokenized(folder: Path, template: str, *rows: Any, **keys: Any) -> Tokens:
    write_lines(folder / "a.jsonl", *(rows or (WEATHER, SUMS, QUESTION)))
    tokenizer = save_chat_tokenizer(folder / "tokenizer", template)
    data = spec(folder, **keys)
    progress = Progress(quiet=True)
    return conversations.tokenize(conversations.read(data, progress), tokenizer, data, progress)


def built(folder: Path, **keys: Any) -> TextWindows:
    return text_windows.build(
        spec(folder, **keys), None, Cache(folder / "cache"), Progress(quiet=True)
    )


def test_a_tool_call_from_lines_and_from_parquet_is_the_same(tmp_path: Path) -> None:
    """Parquet adds every key to every message; a null key counts as absent."""
    lines = write_lines(tmp_path / "a.jsonl", WEATHER, {"messages": [ASK]})
    table = tmp_path / "a.parquet"
    columns = {
        "messages": [WEATHER["messages"], [ASK]],
        "tools": [json.dumps(WEATHER["tools"]), None],
        "id": [1, 2],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), table)
    of_lines = rows_of(lines)
    of_table = rows_of(table)
    for one, other in zip(of_lines, of_table, strict=True):
        assert (one.messages, one.tools) == (other.messages, other.tools)
    # The call's arguments were JSON in a string.
    assert of_lines[0].messages[1] == {"role": "assistant", "tool_calls": [CALL]}
    assert of_lines[0].tools == tuple(WEATHER["tools"])
    assert of_lines[1] == Conversation((ASK,), (), f"path: {lines}: line 2")
    assert of_table[1].where == f"path: {table}: row 2"


def test_sharegpt_and_other_columns(tmp_path: Path) -> None:
    talk = [
        {"from": "human", "value": "Hello", "weight": None},
        {"from": "gpt", "value": "Hi", "weight": 1},
    ]
    file = write_lines(
        tmp_path / "a.jsonl",
        {"conversations": talk, "talk": [ASK]},
        {"conversations": [], "talk": []},
    )
    assert rows_of(file)[0].messages == (ASK, {"role": "assistant", "content": "Hi", "weight": 1})
    with_column = rows_of(file, text_column="talk")
    assert [conversation.messages for conversation in with_column] == [(ASK,), ()]
    assert len(rows_of(file, max_text_rows=1)) == 1
    # No 64-bit integer holds 10^39.
    assert rows_of(file, max_text_rows=10**39) == rows_of(file)


@pytest.mark.parametrize(
    ("row", "gold"),
    [
        ("{", "column 2: not valid JSON"),
        (
            {"text": "a"},
            "no key messages or conversations; there are: text; name it in text_column",
        ),
        (
            {"messages": [{"role": 1, "content": "a"}]},
            "messages[0].role: must be a name such as user",
        ),
        (
            {"messages": [{"from": "bot", "value": "a"}]},
            "messages[0].from: 'bot': unknown speaker; there are",
        ),
    ],
)
def test_malformed_rows(tmp_path: Path, row: Any, gold: str) -> None:
    file = write_lines(tmp_path / "a.jsonl", {"messages": [ASK]})
    line = row
    if not isinstance(row, str):
        line = json.dumps(row)
    with file.open("a") as stream:
        stream.write(line)
    message = refusal(rows_of, file)
    assert message.startswith(f"path: {file}: line 2")
    assert gold in message


SCORED = [
    '<call>{"name": "weather", "arguments": {"town": "Bern"}}</call><|im_end|>',
    "No, it is dry ☀<|im_end|>",
    "4<|im_end|>",
    "It is 6.<|im_end|>",
]


def scored_texts(folder: Path, tokens: Tokens) -> list[str]:
    """Return each run of scored tokens as text, across documents.

    No document here begins with a scored token.
    """
    tokenizer = vocabulary.load_tokenizer(folder / "tokenizer", trust_remote_code=False)
    # Without the padding, scored tokens at either end would have only one edge.
    padded = np.concatenate(([False], tokens.chat.scored, [False])).astype(int)
    edges = np.flatnonzero(np.diff(padded))
    return [tokenizer.decode(tokens.ids[begin:end]) for begin, end in edges.reshape(-1, 2)]


def test_both_ways_and_transformers_own_mask_agree(tmp_path: Path) -> None:
    """Scored: the assistant's content, calls and ends of turns.

    Not scored: headers, other roles, a turn's newline.
    """
    marked = tokenized(tmp_path / "a", MARKED)
    unmarked = tokenized(tmp_path / "b", UNMARKED)
    assert (marked.chat.turn_method, marked.chat.tokens_beyond_turns) == ("generation mask", 0)
    assert unmarked.chat.turn_method == "rendered prefixes"
    assert unmarked.chat.tokens_beyond_turns == 0
    assert scored_texts(tmp_path / "a", marked) == SCORED
    np.testing.assert_array_equal(marked.ids, unmarked.ids)
    np.testing.assert_array_equal(marked.chat.scored, unmarked.chat.scored)
    assert marked.chat.template != unmarked.chat.template
    tokenizer = vocabulary.load_tokenizer(tmp_path / "a" / "tokenizer", trust_remote_code=False)
    mask = []
    ids = []
    for conversation in conversations.read(spec(tmp_path / "a"), Progress(quiet=True)):
        encoded = tokenizer.apply_chat_template(
            list(conversation.messages),
            tools=list(conversation.tools) or None,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        # Without an answer, no token is scored.
        if any(encoded["assistant_masks"]):
            mask += encoded["assistant_masks"]
            ids += encoded["input_ids"]
    assert marked.ids.tolist() == ids
    assert marked.chat.scored.tolist() == [bool(number) for number in mask]


def test_other_roles_and_the_last_turn(tmp_path: Path) -> None:
    both = tokenized(tmp_path, MARKED, SUMS, score_roles=["user", "assistant"])
    assert both.chat.turn_method == "rendered prefixes"
    questions = ["2+2?<|im_end|>", "And 3+3?<|im_end|>"]
    assert scored_texts(tmp_path, both) == [questions[0], SCORED[2], questions[1], SCORED[3]]
    last = tokenized(tmp_path, MARKED, SUMS, WEATHER, score_turns="last")
    assert scored_texts(tmp_path, last) == [SCORED[3], SCORED[1]]
    # A question without an answer comes after the last turn that is scored.
    longer = {"messages": [*SUMS["messages"], QUESTION["messages"][0]]}
    np.testing.assert_array_equal(
        tokenized(tmp_path, MARKED, longer, score_turns="last").ids, last.ids[: last.ends[0]]
    )


def texts_by_role(folder: Path, tokens: Tokens) -> list[tuple[str, str]]:
    """Return (role, text) of each run of tokens of one role."""
    tokenizer = vocabulary.load_tokenizer(folder / "tokenizer", trust_remote_code=False)
    edges = [0, *(np.flatnonzero(np.diff(tokens.chat.roles)) + 1), len(tokens.ids)]
    texts = []
    for begin, end in itertools.pairwise(edges):
        role = tokens.chat.roles[begin]
        if role != -1:
            name = tokens.chat.role_names[role]
            texts.append((name, tokenizer.decode(tokens.ids[begin:end])))
    return texts


def test_each_scored_token_has_the_role_of_its_message(tmp_path: Path) -> None:
    one = tokenized(tmp_path / "a", MARKED)
    assert (one.chat.turn_method, one.chat.role_names) == ("generation mask", ("assistant",))
    assert texts_by_role(tmp_path / "a", one) == [("assistant", text) for text in SCORED]
    # A role that is named twice counts once.
    roles = ["user", "tool", "assistant", "user"]
    several = tokenized(tmp_path / "b", MARKED, WEATHER, score_roles=roles)
    assert several.chat.turn_method == "rendered prefixes"
    assert several.chat.role_names == ("assistant", "tool", "user")
    assert several.chat.roles.dtype == np.int8
    assert texts_by_role(tmp_path / "b", several) == [
        ("user", "Rain in Bern?<|im_end|>"),
        ("assistant", SCORED[0]),
        ("tool", "dry<|im_end|>"),
        ("assistant", SCORED[1]),
    ]


def test_a_token_of_two_turns_belongs_to_the_first() -> None:
    turns = [conversations.Turn(2, 5, "user"), conversations.Turn(5, 9, "assistant")]
    offsets = [(0, 2), (1, 3), (3, 4), (4, 6), (6, 6), (6, 9), (9, 12)]
    roles, n_beyond = conversations.roles_in(turns, offsets, ("assistant", "user"))
    assert roles.tolist() == [-1, 1, 1, 1, 0, 0, -1]
    # (1, 3) reaches beyond once, and (4, 6) in both turns.
    assert n_beyond == 3


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    message = refusal(tokenized, tmp_path, THINKING, SUMS)
    assert message.startswith(
        f"path: {tmp_path / 'a.jsonl'}: line 1: message 3 (assistant): the chat template renders"
    )
    assert 'use "score_turns": "last", or chat_template_kwargs such as' in message
    reasoned = {
        "messages": [*SUMS["messages"][:-1], {**SUMS["messages"][-1], "reasoning_content": "3+3"}]
    }
    last = tokenized(tmp_path, THINKING, reasoned, score_turns="last")
    assert scored_texts(tmp_path, last) == ["<think>3+3</think>It is 6.<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "row", "gold"),
    [
        (
            UNMARKED,
            {"messages": SUMS["messages"][2:]},
            "message 1 (assistant): an assistant who speaks first",
        ),
        (
            "{{ raise_exception('no\nsystem') }}",
            SUMS,
            "the chat template refuses these messages: no",
        ),
        (
            MARKED.replace("== 'assistant'", "== 'assistant' and loop.last"),
            SUMS,
            "message 3: the chat template does",
        ),
    ],
)
def test_refusals_name_the_conversation(tmp_path: Path, template: str, row: Any, gold: str) -> None:
    assert refusal(tokenized, tmp_path, template, row).startswith(
        f"path: {tmp_path / 'a.jsonl'}: line 1: {gold}"
    )


def test_a_template_without_end_is_stopped(tmp_path: Path) -> None:
    # 10^15 rounds.
    endless = "{% for i in range(99999) %}" * 3 + "x" + "{% endfor %}" * 3
    folder = save_chat_tokenizer(tmp_path / "tokenizer", endless)
    tokenizer = vocabulary.load_tokenizer(folder, trust_remote_code=False)
    template = conversations.Template(tokenizer, {}, 0.2)
    reason = "did not end within 0.2 s"
    assert reason in refusal(text_tokens.chat_prefix, tokenizer, 0.2)
    assert reason in refusal(template.render, [], conversations.Conversation((), (), "row 1"))
    # A timer that is left would interrupt the tests later.
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_windows_from_the_cache_and_what_is_said_of_them(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", WEATHER, QUESTION, SUMS)
    save_chat_tokenizer(tmp_path / "tokenizer", MARKED)
    data = built(tmp_path)
    again = built(tmp_path)
    assert len(list((tmp_path / "cache" / "tokens").glob("*.npz"))) == 1
    assert (again.digest, again.text_digest, again.documents) == (
        data.digest,
        data.text_digest,
        data.documents,
    )
    plain = vocabulary.plain_tokens(
        vocabulary.load_tokenizer(tmp_path / "tokenizer", trust_remote_code=False)
    )
    # As of a text without conversations.
    assert data.vocabulary == vocabulary.digest(plain)
    assert {257, 258} <= data.ids_in_chats < {*range(259)}
    assert data.starts == data.documents.begins == (0, 220)
    # The template without tools, and with.
    template = hashlib.sha256("\0".join((MARKED, MARKED)).encode()).hexdigest()
    assert [window.spans for window in data.windows] == [
        ((114, 178), (201, 219)),
        ((42, 44), (72, 81)),
    ]
    subtitle = "a, 2 conversations, 93 scored tokens of the assistant"
    assert windows_in_words.subtitle(data) == subtitle
    assert data.text_size[0] == sum(len(text.encode()) for text in SCORED)
    assert windows_in_words.data_json(data)["method"] == "chat"
    assert windows_in_words.data_json(data)["conversations"] == {
        "conversations": 3,
        "scored": 2,
        "without_scored_tokens": 1,
        "longer_than_eval_len": 0,
        "turns_told_by": "generation mask",
        "tokens_across_edges": 0,
        "chat_template_sha256": template,
    }


def test_the_key_of_the_tokens_holds_template_and_roles(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", WEATHER, SUMS)
    folder = save_chat_tokenizer(tmp_path / "tokenizer", MARKED)
    digests = set()
    for keys in (
        {},
        {"score_roles": ["user"]},
        {"score_turns": "last"},
        {"chat_template_kwargs": {"bos_token": "b"}},
    ):
        digests.add(built(tmp_path, **keys).digest)
    # A variable that the template does not use changes the key, and no token.
    assert len(digests) == 3
    (folder / "chat_template.jinja").write_text(UNMARKED.replace("im_start", "im_end"))
    digests.add(built(tmp_path).digest)
    assert len(digests) == 4
    # Four keys of the spec, and the other template.
    assert len(list((tmp_path / "cache" / "tokens").glob("*.npz"))) == 5


@pytest.mark.parametrize(
    ("keys", "count", "scored", "lengths", "begins"),
    [
        # The first conversation has 220 tokens and 82 scored ones, of which 46 are in its first
        # 160.
        ({"long": "truncate"}, 2, 46 + 11, [160, 82], [0, 220]),
        ({"long": "skip"}, 1, 11, [82], [220]),
        # 160 + 61 = 220 + 1: the second window repeats a token, from which its first one is scored.
        ({"long": "split"}, 3, 93, [160, 61, 82], [0, 0, 220]),
        ({"long": "split", "eval_len": 2}, 93, 93, [2] * 93, [0] * 82 + [220] * 11),
    ],
)
def test_long_conversations(
    tmp_path: Path,
    keys: dict[str, Any],
    count: int,
    scored: int,
    lengths: list[int],
    begins: list[int],
) -> None:
    write_lines(tmp_path / "a.jsonl", WEATHER, SUMS)
    save_chat_tokenizer(tmp_path / "tokenizer", MARKED)
    data = built(tmp_path, **{"eval_len": 160, **keys})
    assert (len(data.windows), data.n_scored) == (count, scored)
    assert [len(window.token_ids) for window in data.windows] == lengths
    assert list(data.documents.begins) == begins
    indices = []
    for window in data.windows:
        numbers = np.full(window.n_scored, window.index)
        indices += data.text_index(numbers, window.positions).tolist()
    # No token twice.
    assert len(set(indices)) == scored
