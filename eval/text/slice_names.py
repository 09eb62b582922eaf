"""Names that a text of a run cannot have, because ``kld:NAME`` and ``memory:NAME`` have another
meaning.

A slice is a named set of scored tokens (``eval/stats/slices.py``).  Each of several texts is a
slice, and so is each role of conversations.  A name must mean one slice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...backends.common.errors import InputError
from ...backends.common.message_text import printable
from ..specs.spec_types import DataSpec

SURE = "sure"
UNSURE = "unsure"
BEGIN = "begin"
REST = "rest"
SPECIAL = "special"
SLICES = (SURE, UNSURE, BEGIN, REST, SPECIAL)
"""Names of slices that do not depend on the texts."""
CONTEXT = re.compile(r"\d+k?", re.ASCII | re.IGNORECASE)
"""A number of tokens, the parameter of ``memory:32k``."""


def roles_of(spec: DataSpec) -> tuple[str, ...]:
    """Return the roles whose tokens are scored, in alphabetical order; empty for a text without
    conversations.
    """
    return tuple(sorted(set(spec.score_roles))) if spec.is_chat else ()


def slices_of(
    specs: Sequence[DataSpec], names: Sequence[str], *, reference: bool
) -> tuple[str, ...]:
    """Return the names of the slices that a run of these texts may have, in their order.

    ``names``: of the texts, one per spec; ``reference``: models are compared with one.
    """
    slices = list(names) if len(names) > 1 else []
    for spec in specs:
        slices += roles_of(spec)
    of_confidence = [SURE, UNSURE] if reference else []
    return tuple(dict.fromkeys([*slices, SPECIAL, *of_confidence, BEGIN, REST]))


def refuse_ambiguous(specs: Sequence[DataSpec], names: Sequence[str]) -> None:
    """Raise InputError if the name of a text or of a role has another meaning.

    ``names``: of the texts, one per spec.  The only text of a run is not a slice, so that it may
    have any name.
    """
    for spec in specs:
        for role in roles_of(spec):
            if meaning := fixed_meaning(role):
                reason = (
                    f"score_roles: a role is called {printable(repr(role))}, which is {meaning}"
                )
                raise InputError(
                    spec.blamed(f"{reason}; rename the role in the conversations and here")
                )
    if len(specs) == 1:
        return
    roles = {role for spec in specs for role in roles_of(spec)}
    for spec, name in zip(specs, names, strict=True):
        meaning = fixed_meaning(name)
        if not meaning and name in roles:
            meaning = "a role of the conversations"
        if meaning:
            reason = f"label: a text is called {printable(repr(name))}, which is {meaning}"
            raise InputError(spec.blamed(f'{reason}; give its data spec another "label"'))


def fixed_meaning(name: str) -> str:
    """Return what a name means in every run; empty if nothing."""
    if name in SLICES:
        return "the name of a slice"
    if CONTEXT.fullmatch(name):
        return "a number of tokens, as in memory:32k"
    return ""
