"""The errors of compare_q: what a user can cause or must know."""

from __future__ import annotations


class CompareQError(Exception):
    """Anything a user can cause or must know; its text is one line a problem: what, where, what to do."""


class InputError(CompareQError):
    """The specs, files or flags do not fit; nothing was measured with them."""


class ModelError(CompareQError):
    """One model could not be loaded or scored; the others can go on."""
