"""What a model is asked and what it answers: the types that travel when ``compare-q trace`` makes a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Question:
    """One prompt; ``number`` is its place in the run, from 0, and ``seed`` is for this answer alone.

    ``where``: the file and the line that it stands in, for messages.

    Engines that continue tokens get ``token_ids``, the conversation as the model's chat template writes it, up to the
    header of the answer.  Servers that apply a template themselves get ``messages`` and ``tools`` (JSON types).
    """

    number: int
    seed: int = 0
    token_ids: tuple[int, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    where: str = ""


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn: nothing but these changes the model's own probabilities, such as a repetition penalty.

    ``max_tokens``: the most tokens of an answer; ``temperature``: 0 takes the most probable token each time; ``top_p``:
    the share of the probability that is drawn from; ``stop``: ids of the tokens that end an answer, for engines that
    continue tokens; ``template``: variables for the template of a server, and ``as_text``: its answers are wanted as
    messages and not as tokens.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[int, ...] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    as_text: bool = False


@dataclass(frozen=True)
class Answer:
    """The answer to the question of that ``number``.

    ``token_ids``: what was sampled, with the token that ends the answer; None where a server does not tell.
    ``prompt_ids``: what the model saw before it, None likewise, and where the question had its tokens.  ``finish``:
    whether the model ended the answer, or ``max_tokens`` did.  ``message``: a server's own form of the answer.
    """

    number: int
    token_ids: tuple[int, ...] | None
    finish: Finish
    prompt_ids: tuple[int, ...] | None = None
    message: dict[str, Any] | None = None
