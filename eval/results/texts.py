"""A run of several texts: one result a text, of the same models, and the means over the texts.

Every text keeps the whole result that a run of it alone has.  A macro mean weighs all texts alike, whatever their
lengths: of KL divergence it is the mean of the texts' means; of perplexity it is the exponential of the mean of the
texts' ln PPL, the geometric mean, so that a text with a large perplexity does not drown the others.  The texts'
errors are independent: stderr = sqrt(sum of stderr ** 2) / number of texts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from eval.results.run_result import ModelResult, RunResult
from eval.stats.uncertainty import Value


@dataclass(frozen=True)
class TextResult:
    """The result of one text; ``run`` is None, and ``error`` says why, where the text itself failed."""

    name: str
    run: RunResult | None
    error: str = ""

    @property
    def is_answers(self) -> bool:
        """Whether its windows are answers to questions, wrong ones too, so that its PPL says nothing of a text."""
        return self.run is not None and "answers" in self.run.data


@dataclass(frozen=True)
class TextsResult:
    """A run of two texts or more, whose names differ; every text that has a run has the same labels, in one order."""

    texts: tuple[TextResult, ...]
    title: str | None = None

    @property
    def runs(self) -> tuple[RunResult, ...]:
        """The results of the texts that did not fail."""
        return tuple(text.run for text in self.texts if text.run is not None)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of all models."""
        return tuple(model.label for model in self.runs[0].models) if self.runs else ()

    def of_label(self, label: str) -> tuple[ModelResult | None, ...]:
        """A model's result for each text; None for a text that failed."""
        return tuple(
            None if text.run is None else next(model for model in text.run.models if model.label == label)
            for text in self.texts
        )

    def mean_kld(self, label: str) -> Value:
        """Macro mean of a model's KLD, nats; unknown unless every text has one; 0 without error for the reference."""
        found = [None if model is None else model.mean_kld for model in self.of_label(label)]
        errors = [model.kld.stderr if model and model.kld else None for model in self.of_label(label)]
        if all(model is not None and model.is_reference for model in self.of_label(label)):
            return Value(None if None in found else 0.0)
        return macro_mean(found, errors)

    def mean_ppl(self, label: str) -> Value:
        """Geometric mean of a model's perplexities, without those of answers; unknown unless every text has one."""
        every = zip(self.texts, self.of_label(label), strict=True)
        ppls = [None if model is None else model.ppl for text, model in every if not text.is_answers]
        logs = [None if ppl is None or not ppl.value else math.log(ppl.value) for ppl in ppls]
        errors = [ppl.stderr / ppl.value if ppl and ppl.value and ppl.stderr is not None else None for ppl in ppls]
        mean = macro_mean(logs, errors)
        if mean.value is None:
            return mean
        value = math.exp(mean.value)
        return Value(value, None if mean.stderr is None else value * mean.stderr)


def macro_mean(values: list[float | None], errors: list[float | None]) -> Value:
    """Mean of independent values and its error; unknown if any value is, without error if any error is not known."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return Value(None)
    squares = [error**2 for error in errors if error is not None]
    stderr = math.sqrt(sum(squares)) / len(known) if len(squares) == len(values) else None
    return Value(math.fsum(known) / len(known), stderr)
