"""The slices of a run: which scored tokens belong to each text, each role, and each fixed slice."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ..stats import slices
from ..stats.slices import Mask, Slice
from ..text.eval_data import EvalData
from ..text.slice_names import SPECIAL
from .stored_scores import StoredScores, block_assignment

OF_TARGETS = (SPECIAL,)
"""Slices that are chosen by the scored token itself.  They have no estimated KLD: an estimate holds
for tokens that were drawn after the same tokens before them, and such a choice prefers some."""


def slices_of(scores: StoredScores, data: EvalData, *, is_reference: bool) -> dict[str, Slice]:
    """Return the statistics of each slice that has tokens, from the scores of all windows.

    An estimated KLD of the slices in ``OF_TARGETS`` is left out.
    """
    assignment = block_assignment(data, scores)
    by_name = {}
    for name, mask in masks_of(scores, data, is_reference=is_reference).items():
        columns = scores.columns
        if name in OF_TARGETS and scores.kld_kind == "estimate":
            columns = dict(columns)
            columns.pop("kld", None)
        if mask.any():
            by_name[name] = slices.summarize(columns, mask, assignment)
    return by_name


def masks_of(scores: StoredScores, data: EvalData, *, is_reference: bool) -> Mapping[str, Mask]:
    """Return the mask [N] of each slice, by its name.

    First the texts if there are several, then the roles, then the fixed slices.
    """
    masks: dict[str, Mask] = {}
    text_of = data.text_of[scores.window]
    if len(data.texts) > 1:
        for number, text in enumerate(data.texts):
            masks[text.name] = np.asarray(text_of == number)
    masks |= role_masks(scores, data, text_of)
    masks[SPECIAL] = np.isin(scores.token_id, data.texts[0].special)
    masks |= slices.by_confidence(scores.columns, is_reference=is_reference)
    masks |= slices.by_position(scores.position)
    return masks


def role_masks(scores: StoredScores, data: EvalData, text_of: NDArray[np.int32]) -> dict[str, Mask]:
    """Return the mask [N] of the tokens that each role of the conversations has written, by name.

    A role of several texts has one mask.
    """
    index = data.text_index(scores.window, scores.position)
    masks: dict[str, Mask] = {}
    # ``index`` counts the tokens of all texts, ``text.roles`` the tokens of one text.
    first_token = 0
    for number, text in enumerate(data.texts):
        if text.roles is not None:
            inside = text_of == number
            roles = text.roles[index[inside] - first_token]
            for role, name in enumerate(text.role_names):
                mask = masks.setdefault(name, np.zeros(len(inside), np.bool_))
                mask[inside] |= roles == role
        first_token += text.n_tokens
    return masks
