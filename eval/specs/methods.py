"""The methods by which a text can be cut into windows, and the keys of a data spec that go with each method.

``eval/text/cutting.py`` explains the methods and cuts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

Method = Literal["exllamav3", "llamacpp", "lm_eval", "gptq", "once"]
Windows = Literal["exllamav3", "llamacpp", "lm_eval", "gptq", "once", "chat", "answers"]
"""What windows are: cut by a method, or conversations, or the possible answers to questions."""
Long = Literal["truncate", "split", "skip"]
"""What becomes of a conversation of more than ``eval_len`` tokens."""
Turns = Literal["all", "last"]
Detokenizer = Literal["wikitext"]
"""The detokenizers of ``eval/text/detokenizers.py``."""


def default_stride(method: Method, eval_len: int) -> int:
    """Tokens between the starts of two windows where the spec has no ``eval_stride``."""
    return eval_len // 2 if method == "once" else eval_len


def check(method: Method, eval_len: int, eval_stride: int | None, *, warmup: bool, chat: bool) -> None:
    """ValueError that names the key which does not go with the method."""
    fixed, where = method in ("llamacpp", "lm_eval", "gptq"), f'with method "{method}"'
    if method == "exllamav3" and eval_stride is None:
        raise ValueError("eval_stride: missing")
    if fixed and eval_stride not in (None, eval_len):
        raise ValueError(f"eval_stride: {where} windows follow one another; leave it out")
    if method == "once" and eval_stride is not None and eval_stride >= eval_len:
        raise ValueError(f"eval_stride: must be below eval_len {where}, or tokens between windows are left out")
    if method == "llamacpp" and eval_len < 3:
        raise ValueError(f"eval_len: must be at least 3 {where}, which scores the second half of a window")
    if method != "exllamav3" and warmup:
        raise ValueError(f"warmup_tokens: cannot go {where}; leave it out")
    if fixed and chat:
        raise ValueError(f"chat_template: cannot go {where}; leave it out")


def check_chat(given: Collection[str], variables: Collection[str], path: str | None, dataset_path: str | None) -> None:
    """ValueError that names what does not go with dataset "chat".

    ``given``: the keys of the spec that are set; ``variables``: names in ``chat_template_kwargs``.
    """
    for key in NOT_WITH_CHAT:
        if key in given:
            raise ValueError(f'{key}: cannot go with dataset "chat"; leave it out')
    if (path is None) == (dataset_path is None):
        raise ValueError(
            'path: dataset "chat" needs either path, a .jsonl or .parquet file, or dataset_path, a data set of the hub'
        )
    if taken := sorted(TAKEN & set(variables)):
        raise ValueError(f"chat_template_kwargs: {taken[0]} is not yours to set; leave it out")


def check_answers(given: Collection[str], task: str | None) -> None:
    """ValueError that names what does not go with dataset "lm_eval"; ``given``: the keys of the spec that are set."""
    if other := [key for key in given if key not in WITH_ANSWERS]:
        raise ValueError(f'{sorted(other)[0]}: cannot go with dataset "lm_eval"; leave it out')
    if not (task or "").strip():
        raise ValueError('task: missing; dataset "lm_eval" needs the name of a task of lm-eval, or a .yaml file')


TAKEN = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations", "documents",
    "kwargs", "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "self", "strftime_now", "tokenize", "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip
"""What Transformers itself takes by these names, and the date (``eval/text/chat_template.py``)."""
NOT_WITH_CHAT = (
    "method", "eval_stride", "warmup_tokens", "chat_template", "detokenize", "display_rows", "display_eval_len",
)  # fmt: skip
ONLY_WITH_CHAT = ("score_roles", "score_turns", "long", "chat_template_kwargs")
ONLY_WITH_ANSWERS = ("task", "include_path", "num_fewshot")
WITH_ANSWERS = (
    "tokenize_fn", "tokenizer_dir", "tokenizer_revision", "trust_remote_code", "dataset", "eval_len", "max_rows",
    "dataset_display_name", *ONLY_WITH_ANSWERS,
)  # fmt: skip
