"""Answers of a Transformers model, one at a time: no padding, and so nothing that depends on the other prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from backends.common.answers import Answer, Question, Sampling


def answers(model: Any, questions: Iterable[Question], sampling: Sampling) -> Iterator[Answer]:
    """Answers in the order of the questions, by the model's own ``generate``.

    ``generate`` would take what is not set from the model's generation config: Qwen2.5's has a repetition penalty, with
    which the greedy answer is not made of the most probable tokens.  So the model gets an empty one.
    """
    import torch
    from transformers import GenerationConfig

    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0} if sampling.temperature else {}
    model.generation_config = GenerationConfig()
    how = GenerationConfig(
        max_new_tokens=sampling.max_tokens, do_sample=bool(drawn), eos_token_id=list(sampling.stop) or None,
        pad_token_id=next(iter(sampling.stop), 0), **drawn,
    )  # fmt: skip
    for question in questions:
        torch.manual_seed(question.seed)
        ids = torch.tensor([question.token_ids], device=model.device)
        with torch.inference_mode():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how)
        new = tuple(found[0, ids.shape[1] :].tolist())
        yield Answer(question.number, new, "stop" if new and new[-1] in sampling.stop else "length")
