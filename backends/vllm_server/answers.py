"""Answers of a vLLM server, by its chat endpoint and with its own chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any

from backends.common.answers import Answer, Finish, Question, Sampling
from backends.common.messages import shortened
from backends.vllm_server.client import (
    MOST_LOGITS,
    PER_TOKEN,
    SMALL,
    Card,
    ServedModel,
    ServerError,
    fingerprint_of,
    shape_of_vllm,
)

if TYPE_CHECKING:
    import httpx2

NEUTRAL = {
    "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1,
}  # fmt: skip
"""What a server else takes from the model's generation config, as Qwen2.5's repetition penalty of 1.05 to 1.1."""
SHOWN = {"content": str, "tool_calls": list, "reasoning_content": str, "reasoning": str}
"""Of a server's message, what belongs to the conversation, and its types."""
PER_LETTER = 16
"""Bytes of an answer for each of a request: the ids of the prompt's tokens."""
NO_IDS = (
    "its answer has no token ids, which vLLM's own server returns (return_token_ids); "
    "give -o a name that ends in .jsonl, and the text is kept"
)


async def answer(
    client: httpx2.AsyncClient, served: ServedModel, card: Card, question: Question, sampling: Sampling
) -> tuple[Answer, str | None]:
    """(the answer to a question, the server's fingerprint); ServerError."""
    asked = body(card.model, question, sampling)
    largest = SMALL + PER_TOKEN * sampling.max_tokens + PER_LETTER * len(json.dumps(asked))
    found = await served.server.ask(client, "/v1/chat/completions", asked, within=inf, largest=largest)
    fingerprint = fingerprint_of(found)
    with shape_of_vllm():
        choice = found["choices"][0]
        finish = choice.get("finish_reason")
        message = {key: choice["message"][key] for key in SHOWN if choice["message"].get(key)}
        new: Any = choice.get("token_ids")
        prompt: Any = found.get("prompt_token_ids")
        if wrong := [key for key, value in message.items() if not isinstance(value, SHOWN[key])]:
            raise TypeError(f"message.{wrong[0]}")
    if finish not in ("stop", "length", "tool_calls"):
        raise ServerError(f"an answer ended by {shortened(repr(finish))}, and neither by itself nor by --max-tokens")
    ended: Finish = "length" if finish == "length" else "stop"
    if sampling.as_text:
        told = {"role": "assistant", "content": message.pop("content", ""), **message}
        return Answer(question.number, None, ended, message=told), fingerprint
    if not (are_ids(new) and are_ids(prompt)):
        raise ServerError(NO_IDS)
    return Answer(question.number, tuple(new), ended, tuple(prompt)), fingerprint


def are_ids(found: Any) -> bool:
    """Whether these are token ids, at least one."""
    return isinstance(found, list) and bool(found) and all(type(one) is int and 0 <= one < MOST_LOGITS for one in found)


def body(model: str, question: Question, sampling: Sampling) -> dict[str, Any]:
    """The request.  Where tokens are wanted, no parser takes tool calls out of them: a server without one refuses."""
    asked: dict[str, Any] = {
        "model": model, "messages": [as_openai(each) for each in question.messages], "seed": question.seed,
        "max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p, **NEUTRAL,
    }  # fmt: skip
    if sampling.template:
        asked["chat_template_kwargs"] = dict(sampling.template)
    if question.tools:
        asked |= {"tools": list(question.tools), "tool_choice": "auto" if sampling.as_text else "none"}
    return asked if sampling.as_text else asked | {"return_token_ids": True}


def as_openai(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose tool calls are as the endpoint wants them: with an id, and arguments as JSON in a string."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for number, call in enumerate(message["tool_calls"]):
        inside = call.get("function", call)
        function = {**inside, "arguments": json.dumps(inside["arguments"], ensure_ascii=False)}
        calls.append({"id": call.get("id", f"call_{number}"), "type": "function", "function": function})
    return {"content": None, **message, "tool_calls": calls}
