"""Errors of means over windows that are spread over a text, as means of all its windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...backends.base import KldKind
from .uncertainty import Array, Columns, Error, sampling_error


@dataclass(frozen=True)
class SamplingErrors:
    """Standard errors of means over spread windows, as what all windows of the text would give.

    ``nll`` (nats, so relative ones of PPL), and ``kld`` (nats); None where a score is missing or
    not finite.
    """

    nll: Error | None
    kld: Error | None = None

    @property
    def row_fields(self) -> dict[str, Error | None]:
        """The fields of a row that hold these errors."""
        return {"ln_ppl_stderr_of_text": self.nll, "kld_stderr_of_text": self.kld}


def sampling_errors(
    columns: Columns,
    window: Array,
    starts: Sequence[int],
    available: int,
    kld_kind: KldKind = "exact",
) -> SamplingErrors:
    """Return the errors of the means of a text's spread windows.

    ``window`` [N]: number of the window of each entry of the ``columns`` [N]; ``starts``: text
    index at which each window starts; ``available``: number of windows of the text.
    """
    populations: dict[str, float] = {"logprob": available, "kld": available}
    if kld_kind == "estimate":
        # The values of an estimate are draws: with all windows of the text, its error is not 0.
        populations["kld"] = math.inf
    # The error comes from the differences of windows that are neighbours in the text.
    in_text_order = np.argsort(starts)
    tokens = np.bincount(window, minlength=len(starts))[in_text_order]
    errors: dict[str, float | None] = {}
    for name, population in populations.items():
        errors[name] = None
        scores = columns.get(name)
        if scores is not None and np.isfinite(scores).all():
            sums = np.bincount(window, scores.astype(np.float64), len(starts))[in_text_order]
            errors[name] = sampling_error(sums, tokens, population)
    return SamplingErrors(errors["logprob"], errors["kld"])


def sampling_errors_of_texts(texts: Sequence[tuple[SamplingErrors, int]]) -> SamplingErrors:
    """Return the errors of the means over several texts, which are independent of each other.

    ``texts``: the errors and the number of scored tokens of each text.  An error is None if that of
    a text is None.
    """
    nll_errors = []
    kld_errors = []
    counts = []
    for errors, tokens in texts:
        nll_errors.append(errors.nll)
        kld_errors.append(errors.kld)
        counts.append(tokens)
    return SamplingErrors(error_of_all(nll_errors, counts), error_of_all(kld_errors, counts))


def error_of_all(errors: Sequence[float | None], counts: Sequence[int]) -> float | None:
    """Return the error of the mean over all texts' tokens; None if that of a text is None."""
    total = sum(counts)
    square = 0.0
    for error, tokens in zip(errors, counts, strict=True):
        if error is None:
            return None
        square += (error * tokens / total) ** 2
    return math.sqrt(square)
