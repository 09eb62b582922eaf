"""Files of rollouts, written by hand or from the logits of the toy model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

HEADER = {"compare_q": "rollouts", "version": 1}
N_SEQUENCES = 12
PROMPT = [256, *range(97, 103)]
"""The toy's special token, and letters."""


def write(file: Path, lines: Iterable[Mapping[str, Any]], **header: Any) -> Path:
    """Write a file of rollouts from its lines; ``header``: more keys of the first line."""
    texts = [json.dumps({**HEADER, **header})]
    texts += [json.dumps(line) for line in lines]
    file.write_text("\n".join(texts) + "\n")
    return file


def line_of(
    prompt: Sequence[int], sampled: Sequence[int], logprobs: Sequence[float | None]
) -> dict[str, Any]:
    """Return the line of a sequence."""
    return {
        "prompt_ids": list(prompt),
        "sampled_ids": list(sampled),
        "logprobs": list(logprobs),
    }


@cache
def loaded(model: Path) -> Any:
    """Return a Transformers model in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def logprobs_of(
    model: Path,
    prompt: Sequence[int],
    sampled: Sequence[int],
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return ln p [T, V] after the prompt; ``dtype``: to which the logits are rounded."""
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *sampled]])
        logits = loaded(model)(ids).logits[0, len(prompt) - 1 : -1]
    return (logits.to(dtype).double() / temperature).log_softmax(-1)


def recorded(
    model: Path,
    prompt: Sequence[int],
    sampled: Sequence[int],
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """Return ln p of each sampled token by the model."""
    logprobs = logprobs_of(model, prompt, sampled, temperature, dtype)
    of_tokens = logprobs.gather(1, torch.tensor(sampled)[:, None])[:, 0]
    return [float(value) for value in of_tokens]


def lengths() -> list[int]:
    """Return the number of sampled tokens of each sequence, all different."""
    return [20 + 5 * number for number in range(N_SEQUENCES)]


def sampled_lines(model: Path, temperature: float = 1.0, seed: int = 0) -> list[dict[str, Any]]:
    """Return sequences that the model samples at a temperature, with these log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([[*PROMPT, 97 + number] for number in range(N_SEQUENCES)])
    n_prompt = ids.shape[1]
    with torch.inference_mode():
        # Together, as their prompts have one length; the shorter ones are cut off.
        for _ in range(max(lengths())):
            logits = loaded(model)(ids).logits[:, -1].double() / temperature
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, drawn], dim=1)
    lines = []
    for row, length in zip(ids.tolist(), lengths(), strict=True):
        prompt = row[:n_prompt]
        sampled = row[n_prompt : n_prompt + length]
        values = recorded(model, prompt, sampled, temperature)
        lines.append(line_of(prompt, sampled, values))
    return lines
