"""Tasks of lm-eval -> windows: the tokens that lm-eval itself computes and scores, and every task that is refused."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs.reading import parse_data_spec
from compare_q.eval.text import windows
from compare_q.eval.text.windows import EvalData
from tests.support.questions import model_class
from tests.support.toy import refusal, save_toy_tokenizer

ROWS: list[dict[str, Any]] = [
    {"q": "Two and two?", "c": ["four", "five", "twenty-two"], "a": 0},
    {"q": "The sky is ", "c": ["green", "blue"], "a": 1},
    {"q": "", "c": ["An empty context", "is a prefix token"], "a": 1},
    {"q": "Größe  \n", "c": ["é", "ß", "ü"], "a": 2},
    {"q": "<|end|>Already begun", "c": ["yes", "no"], "a": 0},
    {"q": "Long. " * 30, "c": ["short", "l" * 40], "a": 1},
]
"""Unusual questions: white space at the end of the context, no context, a special token, too long for a window."""


def write_task(folder: Path, rows: list[dict[str, Any]] | None = None, text: str = "", **keys: Any) -> Path:
    """Write a task's YAML file and its data file; ``text`` is appended unchanged; ``keys`` of None are omitted."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in (ROWS if rows is None else rows)]
    (folder / "rows.jsonl").write_text("".join(lines))
    config = {
        "task": "odd", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "c",
        "doc_to_target": "a", "metric_list": [{"metric": each, "aggregation": "mean", "higher_is_better": True}
                                              for each in ("acc", "acc_norm")],
    } | keys  # fmt: skip
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "odd.yaml").write_text(yaml.safe_dump(kept, sort_keys=False) + text)
    return folder / "odd.yaml"


def asked(folder: Path, task: Path | str, tokenizer: Path | None = None, **keys: Any) -> EvalData:
    """Return the windows of a task; the default tokenizer is the toy's."""
    if tokenizer is None:
        tokenizer = folder / "tokenizer"
        tokenizer.mkdir(exist_ok=True)
        save_toy_tokenizer(tokenizer)
    spec = {"tokenizer_dir": str(tokenizer), "dataset": "lm_eval", "task": str(task), "eval_len": 250,
            "trust_remote_code": True, **keys}  # fmt: skip
    return windows.build(
        parse_data_spec(spec, folder / "data.json"), None, Cache(folder / "cache"), Progress(quiet=True)
    )


SHOTS = {"num_fewshot": 2, "fewshot_config": {"sampler": "first_n", "samples": [
    {"q": "One?", "c": ["1", "2"], "a": 0}, {"q": "Two?", "c": ["1", "2"], "a": 1}]}}  # fmt: skip


def fed_by_lm_eval(kind: str, folder: Path, task: Path, max_length: int) -> list[tuple[list[int], list[int]]]:
    """Return (context, answer) of each request as lm-eval's own class encodes it, without loading the model."""
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    model: Any = model_class(kind)
    found: list[tuple[list[int], list[int]]] = []

    class Silent(model):
        def __init__(self) -> None:
            self.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
            self.add_bos_token = self.custom_prefix_token_id = self.enable_thinking = None
            self.backend = "causal"

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False) -> Any:
            found.extend((context, answer) for _, context, answer in requests)
            return [(0.0, False)] * len(requests)

    (built,) = TaskManager(include_defaults=False).load([str(task)])["tasks"].values()
    built.set_fewshot_seed(1234)
    if built.get_config("num_fewshot") is None:
        built.set_config("num_fewshot", 0)
    built.build_all_requests()
    Silent().loglikelihood(built.instances, disable_tqdm=True)
    return found


@pytest.mark.parametrize("kind", ["hf", "vllm"])
@pytest.mark.parametrize("keys", [{}, SHOTS], ids=["no example", "two examples"])
@pytest.mark.parametrize("eval_len", [250, 45])
def test_windows_are_what_lm_eval_feeds(tmp_path: Path, kind: str, keys: dict[str, Any], eval_len: int) -> None:
    """``HFLM`` feeds ``(context + answer)[-(max_length + 1):][:-1]`` and scores the answer."""
    task = write_task(tmp_path / "task", **keys)
    data = asked(tmp_path, task, eval_len=eval_len)
    gold = fed_by_lm_eval(kind, tmp_path, task, eval_len)
    assert len(data.windows) == len(gold) == sum(len(row["c"]) for row in ROWS)
    for window, (context, answer) in zip(data.windows, gold, strict=True):
        assert window.token_ids.tolist() == (context + answer)[-(eval_len + 1) :]
        assert window.targets.tolist() == answer
    cut_off = data.documents.facts["longer_than_eval_len"]
    assert cut_off == sum(len(context + answer) > eval_len + 1 for context, answer in gold)
    assert (cut_off > 0) == (eval_len == 45)


def test_what_is_known_of_the_answers(tmp_path: Path) -> None:
    data = asked(tmp_path, write_task(tmp_path / "task"))
    answers = data.requests
    question, right, chars = (column.tolist() for column in (answers.question, answers.right, answers.chars))
    assert question == [0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 5, 5]
    assert np.flatnonzero(right).tolist() == [0, 4, 6, 9, 10, 13]
    assert chars == [len(choice) for row in ROWS for choice in row["c"]]
    # A question's windows follow one another in the text, but all have the start of the first one.
    lengths = [len(window.token_ids) for window in data.windows]
    firsts = [question.index(number) for number in question]
    assert data.documents.begins == tuple(sum(lengths[:first]) for first in firsts)
    assert data.begins(np.array([2, 5])).tolist() == [0, sum(lengths[:5])]
    assert windows.subtitle(data) == "odd, 6 questions, 0-shot, 14 answers"
    known = windows.data_json(data)
    assert known["method"] == "answers"
    key = hashlib.sha256(json.dumps([question, right, chars]).encode()).hexdigest()
    assert known["answers"].pop("key_sha256") == key
    assert known["answers"] == {
        "task": "odd", "num_fewshot": 0, "questions": 6, "questions_of_the_task": 6, "longer_than_eval_len": 0
    }  # fmt: skip


def test_several_right_answers_none_and_choices_in_the_context(tmp_path: Path) -> None:
    """As in lm-eval's process_results: several right answers, an index beyond the choices, and winogrande's form."""
    several = [{"q": "Even?", "c": ["2", "3", "4"], "a": [0, 2]}, {"q": "Odd?", "c": ["2", "3", "4"], "a": [1]}]
    data = asked(tmp_path, write_task(tmp_path / "several", several))
    assert data.requests.right.tolist() == [True, False, True, False, True, False]
    rows = [{"q": "?", "c": ["a", "b"], "a": 1}, {"q": "?", "c": ["a", "b"], "a": 7}]
    beyond = asked(tmp_path, write_task(tmp_path / "beyond", rows))
    assert beyond.requests.right.tolist() == [False, True, False, False]
    rows = [{"c": ["Ann said that Ann", "Ann said that Bob"], "a": "slept.", "n": 1}]
    swapped = asked(tmp_path, write_task(tmp_path / "swapped", rows, doc_to_text="{{n}}"))
    assert swapped.requests.right.tolist() == [False, True]
    assert [window.n_scored for window in swapped.windows] == [len(" slept.")] * 2


@pytest.mark.parametrize(
    ("keys", "text", "reason"),
    [
        ({"output_type": "generate_until"}, "", "is generate_until; only multiple_choice"),
        ({"metric_list": [{"metric": "acc_mutual_info"}]}, "", "measures acc_mutual_info; only the means of acc and "),
        ({"repeats": 2}, "", "has filter_list or repeats"),
        ({"doc_to_text": "{{nothing}}"}, "", "lm-eval cannot build it: UndefinedError: 'nothing' is undefined"),
        ({"task": None}, "", "is a group, or has no task; name a file with one task"),
        ({}, "process_docs: !!python/name:os.system ''\n", "could not determine a constructor for the tag "),
        ({"include": "odd.yaml"}, "", "includes itself"),
    ],
)
def test_refused_tasks(tmp_path: Path, keys: dict[str, Any], text: str, reason: str) -> None:
    task = write_task(tmp_path / "task", text=text, **keys)
    message = refusal(asked, tmp_path, task)
    assert message.startswith("task: ")
    assert reason in message


def test_a_file_that_the_spec_does_not_trust(tmp_path: Path) -> None:
    """Whether it is named or found in a folder, none of its code runs, and only its name is read."""
    task = write_task(tmp_path / "task", text="process_docs: !function code.run\n")
    (tmp_path / "task" / "code.py").write_text("raise SystemExit('run')\n")
    for keys in ({"task": task}, {"task": "odd", "include_path": str(task.parent)}):
        message = refusal(asked, tmp_path, **keys, trust_remote_code=False)
        assert message.startswith(f"task: {task}: ")
        assert '"trust_remote_code": true' in message


def test_changed_files_are_read_again(tmp_path: Path) -> None:
    """The cache key is the content of YAML and data files; ``datasets`` itself only compares paths and times."""
    task = write_task(tmp_path / "task")
    os.utime(tmp_path / "task" / "rows.jsonl", (1, 1))
    first = asked(tmp_path, task)
    write_task(tmp_path / "task", [{**ROWS[0], "a": 1}, *ROWS[1:]])
    os.utime(tmp_path / "task" / "rows.jsonl", (1, 1))
    second = asked(tmp_path, task)
    assert second.digest == first.digest
    assert second.requests.right[:3].tolist() == [False, True, False]
    write_task(tmp_path / "task", doc_to_text="Q: {{q}}")
    assert asked(tmp_path, task).digest != first.digest


def test_files_that_only_an_include_names_are_read_again(tmp_path: Path) -> None:
    """A task gets its prompt and its data from a YAML file in another folder."""
    write_task(tmp_path / "common", task=None)
    task = tmp_path / "own" / "task.yaml"
    task.parent.mkdir()
    task.write_text("include: ../common/odd.yaml\ntask: own\n")
    first = asked(tmp_path, task)
    write_task(tmp_path / "common", [{**ROWS[0], "a": 1}, *ROWS[1:]], task=None)
    second = asked(tmp_path, task)
    assert second.requests.right[:3].tolist() != first.requests.right[:3].tolist()
    write_task(tmp_path / "common", task=None, doc_to_text="Q: {{q}}")
    assert asked(tmp_path, task).digest != first.digest
