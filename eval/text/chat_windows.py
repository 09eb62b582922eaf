"""Tokens of conversations -> windows, and what titles, ``--check`` and results.json say of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.specs.types import DataSpec
from eval.text import corpus, cutting
from eval.text.tokens import Chat, Tokens

DONE = {"truncate": "cut off there", "split": "split", "skip": "left out"}
"""What ``long`` does with a conversation of more than ``eval_len`` tokens."""


@dataclass(frozen=True)
class Conversations:
    """What is known of the windows of a run whose text is conversations.

    ``begins``: text index of the first token of each window's conversation.  ``found``: conversations of the data set,
    of which ``unscored`` have no scored token and ``too_long`` more tokens than ``eval_len``.  ``told_by``, ``across``
    and ``template`` are those of ``eval.text.tokens.Chat``, for all conversations.
    """

    begins: tuple[int, ...]
    found: int
    unscored: int
    too_long: int
    told_by: str
    across: int
    template: str

    @property
    def scored(self) -> int:
        """The conversations that the windows are of."""
        return len(set(self.begins))

    def nothing_scored(self, spec: DataSpec) -> str:
        """Why there is no window, and what to look at."""
        longer = f", and {self.too_long:,} are longer than eval_len" if self.too_long else ""
        roles = ", ".join(spec.score_roles)
        return f"score_roles: none of {self.found:,} conversations has a token of {roles} in a window{longer}"

    def subtitle(self, spec: DataSpec, n_windows: int, n_scored: int) -> str:
        """The line below a title, e.g. ``ultrachat, 200 conversations, 61,234 scored tokens of the assistant``."""
        several = "" if n_windows == self.scored else f" in {n_windows:,} windows"
        whose = " and ".join(f"the {role}" for role in spec.score_roles)
        turns = ", last turn" if spec.score_turns == "last" else ""
        name = corpus.display_name(spec)
        return f"{name}, {self.scored:,} conversations{several}, {n_scored:,} scored tokens of {whose}{turns}"

    def in_words(self, spec: DataSpec, n_windows: int, n_scored: int) -> str:
        """What ``--check`` says of them."""
        out = [f"{self.unscored:,} without a scored token left out"] if self.unscored else []
        out += [f"{self.too_long:,} longer ones {DONE[spec.long]}"] if self.too_long else []
        return (
            f"{self.scored:,} of {self.found:,} conversations in {n_windows:,} windows, {n_scored:,} scored tokens "
            f"({', '.join(spec.score_roles)}; told by {self.told_by}){''.join(f'; {each}' for each in out)}"
        )

    def as_json(self) -> dict[str, Any]:
        """What results.json says of them beside the spec's keys."""
        return {
            "conversations": self.found,
            "scored": self.scored,
            "without_scored_tokens": self.unscored,
            "longer_than_eval_len": self.too_long,
            "turns_told_by": self.told_by,
            "tokens_across_edges": self.across,
            "chat_template_sha256": self.template,
        }


def cuts(text: Tokens, chat: Chat, spec: DataSpec, max_rows: int | None) -> tuple[list[cutting.Cut], Conversations]:
    """All windows of conversations, and what is known of those that a run takes."""
    made = cutting.chat(text.ids, chat.scored, text.ends, spec.eval_len, spec.long)
    starts = np.array([each.start for each in made.cuts[: max_rows or None]], np.int64)
    begins = np.concatenate(([0], text.ends))[np.searchsorted(text.ends, starts, side="right")]
    return made.cuts, Conversations(
        tuple(begins.tolist()), len(text.ends), made.unscored, made.too_long, chat.told_by, chat.across, chat.template
    )
