"""Names of slices, and names that a text cannot have, as ``kld:NAME`` would be ambiguous.

A slice is a named set of scored tokens (``eval/stats/slices.py``).  Each of several texts is a
slice, and so is each role of conversations.  A name must mean one slice.  Columns are called
``kld:NAME`` and ``memory:NAME``.
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
FIXED_SLICES = (SURE, UNSURE, BEGIN, REST, SPECIAL)
"""Names of slices that do not depend on the texts."""
CONTEXT_LENGTH = re.compile(r"\d+k?", re.ASCII | re.IGNORECASE)
"""A number of tokens, the parameter of ``memory:32k``."""


def roles_of(spec: DataSpec) -> tuple[str, ...]:
    """Return the roles whose tokens are scored, in alphabetical order; none for a plain text."""
    if not spec.is_chat:
        return ()
    return tuple(sorted(set(spec.score_roles)))


def slices_of(
    specs: Sequence[DataSpec], names: Sequence[str], *, reference: bool
) -> tuple[str, ...]:
    """Return the names of the slices that a run of these texts may have, in their order.

    ``names``: of the texts, one per spec; ``reference``: models are compared with one.
    """
    slices: list[str] = []
    if len(names) > 1:
        slices += names
    for spec in specs:
        slices += roles_of(spec)
    slices.append(SPECIAL)
    if reference:
        slices += [SURE, UNSURE]  # by the reference's confidence
    slices += [BEGIN, REST]
    return tuple(dict.fromkeys(slices))


def refuse_ambiguous(specs: Sequence[DataSpec], names: Sequence[str]) -> None:
    """Raise InputError if the name of a text or of a role has another meaning.

    ``names``: of the texts, one per spec.  The only text of a run is not a slice, so that it may
    have any name.
    """
    roles = set[str]()
    for spec in specs:
        for role in roles_of(spec):
            check_role(role, spec)
            roles.add(role)
    if len(specs) == 1:
        return
    for spec, name in zip(specs, names, strict=True):
        meaning = fixed_meaning(name)
        if not meaning and name in roles:
            meaning = "a role of the conversations"
        if meaning:
            reason = f"label: a text is called {printable(repr(name))}, which is {meaning}"
            raise InputError(spec.blamed(f'{reason}; give its data spec another "label"'))


def check_role(role: str, spec: DataSpec) -> None:
    """Raise InputError if the name of a role has another meaning."""
    meaning = fixed_meaning(role)
    if not meaning:
        return
    reason = f"score_roles: a role is called {printable(repr(role))}, which is {meaning}"
    raise InputError(spec.blamed(f"{reason}; rename the role in the conversations and here"))


def fixed_meaning(name: str) -> str:
    """Return what a name means in every run; empty if nothing."""
    if name in FIXED_SLICES:
        return "the name of a slice"
    if CONTEXT_LENGTH.fullmatch(name):
        return "a number of tokens, as in memory:32k"
    return ""
