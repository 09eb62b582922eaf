"""The methods by which a text can be cut into windows, and the keys of a data spec that go with each method.

``eval/text/cutting.py`` explains the methods and cuts.
"""

from __future__ import annotations

from typing import Literal

Method = Literal["exllamav3", "llamacpp", "lm_eval", "gptq", "once"]
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
