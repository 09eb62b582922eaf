"""The slices of a run: which scored tokens belong to each text, each role, and each of the fixed
slices.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ..stats import slices
from ..stats.slices import Mask, Slice
from ..text.eval_data import EvalData
from ..text.slice_names import SPECIAL
from .token_scores import StoredScores, places_in


def slices_of(stored: StoredScores, data: EvalData, *, is_reference: bool) -> dict[str, Slice]:
    """Return the statistics of each slice that has tokens, from the scores of all windows of a run."""
    places = places_in(data, stored)
    by_name = {}
    for name, mask in masks_of(stored, data, is_reference=is_reference).items():
        if mask.any():
            by_name[name] = slices.summarize(stored.columns, mask, places)
    return by_name


def masks_of(stored: StoredScores, data: EvalData, *, is_reference: bool) -> Mapping[str, Mask]:
    """Return the mask [N] of each slice, by its name: texts if there are several, roles, then the
    fixed ones.
    """
    masks: dict[str, Mask] = {}
    text_of = data.text_of[stored.window]
    if len(data.texts) > 1:
        for number, text in enumerate(data.texts):
            masks[text.name] = np.asarray(text_of == number)
    masks |= by_role(stored, data, text_of)
    masks[SPECIAL] = np.isin(stored.token_id, data.texts[0].special)
    masks |= slices.by_confidence(stored.columns, is_reference=is_reference)
    masks |= slices.by_position(stored.position)
    return masks


def by_role(stored: StoredScores, data: EvalData, text_of: NDArray[np.int32]) -> dict[str, Mask]:
    """Return the mask [N] of the tokens that each role of the conversations has written, by the
    role's name.
    """
    index = data.text_index(stored.window, stored.position)
    masks: dict[str, Mask] = {}
    before = 0
    for number, text in enumerate(data.texts):
        if text.roles is not None:
            inside = text_of == number
            roles = text.roles[index[inside] - before]
            for place, name in enumerate(text.role_names):
                mask = masks.setdefault(name, np.zeros(len(inside), np.bool_))
                mask[inside] |= roles == place
        before += text.n_tokens
    return masks
