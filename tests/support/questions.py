"""Small tasks of lm-eval in local files, and the windows that their questions become."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs.reading import parse_data_spec
from compare_q.eval.text import windows
from compare_q.eval.text.tokens import Requests
from compare_q.eval.text.windows import EvalData
from tests.support.toy import save_toy_tokenizer

ROWS: list[dict[str, Any]] = [
    {"q": "Two and two?", "c": ["four", "five", "twenty-two"], "a": 0},
    {"q": "The sky is ", "c": ["green", "blue"], "a": 1},
    {"q": "", "c": ["An empty context", "is a prefix token"], "a": 1},
    {"q": "Größe  \n", "c": ["é", "ß", "ü"], "a": 2},
    {"q": "<|end|>Already begun", "c": ["yes", "no"], "a": 0},
    {"q": "Long. " * 30, "c": ["short", "l" * 40], "a": 1},
]
"""Odd questions: white space at the end of the context, no context, a special token, more than fits."""


def write_task(folder: Path, rows: list[dict[str, Any]] | None = None, text: str = "", **keys: Any) -> Path:
    """A task's YAML with its data beside it; ``text`` is added to it as it is, ``keys`` that are None are left out."""
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


def model_class(kind: str) -> Any:
    """lm-eval's class for models in Transformers ("hf") or in vLLM.

    It asks for the version of the distribution ``vllm``, which vLLM's CPU build does not have.
    """
    if kind == "hf":
        from lm_eval.models.huggingface import HFLM

        return HFLM
    import vllm
    from vllm.platforms import current_platform  # vLLM looks at its own version to find the platform, once

    assert current_platform.device_type
    known = metadata.version
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "version", lambda name: vllm.__version__ if name == "vllm" else known(name))
        from lm_eval.models.vllm_causallms import VLLM

        return VLLM


@dataclass(frozen=True)
class Own:
    """lm-eval's own results of a task, and its sum of log-probabilities of every answer in order."""

    results: dict[str, Any]
    sums: list[float]


def evaluated(model: Any, task: Path, questions: int) -> Own:
    """What lm-eval itself finds, by its ``simple_evaluate`` with its defaults."""
    import lm_eval

    found = lm_eval.simple_evaluate(model=model, tasks=[str(task)], limit=questions, log_samples=True)
    (name,) = found["results"]
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    return Own(found["results"][name], [answer[0] for sample in samples for answer in sample["filtered_resps"]])


def requests(question: Any, right: Any, chars: Any) -> Requests:
    """Requests of which only these columns count: all [W]."""
    return Requests(question, np.zeros(len(question), np.int32), right, chars, "odd", 0)


def asked(folder: Path, task: Path | str, tokenizer: Path | None = None, **keys: Any) -> EvalData:
    """The windows of a task; without a tokenizer the toy's."""
    if tokenizer is None:
        tokenizer = folder / "tokenizer"
        tokenizer.mkdir(exist_ok=True)
        save_toy_tokenizer(tokenizer)
    spec = {"tokenizer_dir": str(tokenizer), "dataset": "lm_eval", "task": str(task), "eval_len": 250, **keys}
    return windows.build(
        parse_data_spec(spec, folder / "data.json"), None, Cache(folder / "cache"), Progress(quiet=True)
    )
