"""Compute accuracy and its error from the scores of answers, and compare the answers with the reference's.

As in lm-eval 0.4.13 (``process_results``, ``mean``, ``mean_stderr``), the chosen answer has the largest sum of its
tokens' log-probabilities (``acc``), or the largest sum divided by its number of characters (``acc_norm``).  If several
answers are equal, the first one is chosen.  Accuracy is the mean over the questions; its error is the error of a mean
of independent values.

Compared with a reference, ``flips`` is the share of questions that only one of the two has right (Dutta et al., arXiv
2407.09141), and ``changed`` is the share with different chosen answers, right or wrong.  McNemar's exact test (for
language models: Kübler et al., arXiv 2602.10144) is two-sided.  If neither model were better, each flip would go either
way like a coin; p is the probability of counts at least as far apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from compare_q.eval.stats.uncertainty import Count, Value
from compare_q.eval.text.tokens import Requests


def in_unit_interval(share: Value) -> Value:
    """Return a share of the questions; ValueError if it is not between 0 and 1."""
    if share.value is not None and not 0 <= share.value <= 1:
        raise ValueError(f"a share is between 0 and 1, not {share.value}")
    return share


Share = Annotated[Value, AfterValidator(in_unit_interval)]


@dataclass(frozen=True)
class Flips:
    """A model's answers compared with the reference's: shares of the questions with their errors, and counts.

    ``lost``: questions that the reference has right and the model wrong; ``won``: the other way round.
    """

    changed: Share
    flips: Share
    lost: Count
    won: Count
    mcnemar_p: float


@dataclass(frozen=True)
class Accuracy:
    """The share of questions whose chosen answer is right.

    ``right``: a digit for each question, "1" where the model is right; empty if ``accuracy`` is not known.  ``flips``:
    None without a reference, and where its choices or the model's are not known.
    """

    accuracy: Share
    right: Annotated[str, Field(pattern="^[01]*$")]
    flips: Flips | None = None


@dataclass(frozen=True)
class AnswerEstimates:
    """Accuracy by sums (``acc``) and by sums over characters (``acc_norm``), over ``questions``.

    ``undecided``: number of questions without a finite largest log-probability, or with a nan; if it is not 0, neither
    accuracy is known.
    """

    questions: Count
    undecided: Count
    acc: Accuracy
    acc_norm: Accuracy


def summarize(columns: Mapping[str, NDArray[Any]], window: NDArray[Any], asked: Requests) -> AnswerEstimates:
    """The estimates of a model from its scored tokens.

    ``columns`` [N]: ``logprob``, and ``ref_logprob`` if there is a reference, in nats; ``window`` [N]: of each token;
    ``asked``: the request of each window.
    """
    starts = np.unique(asked.question, return_index=True)[1]
    sums: dict[str, NDArray[Any]] = {
        name: np.bincount(window, columns[name].astype(np.float64), len(asked.question))
        for name in ("logprob", "ref_logprob") if name in columns
    }  # fmt: skip
    # Undecided are questions whose best sum is infinite or nan, as is a maximum over a nan.
    undecided = {name: int((~np.isfinite(np.maximum.reduceat(sums[name], starts))).sum()) for name in sums}
    accuracies = []
    for scale in (np.ones(len(asked.chars)), asked.chars.astype(np.float64)):
        chosen = {  # the window of each question's largest sum, the first of equal ones
            name: np.asarray([start + np.argmax(of_one) for start, of_one in
                              zip(starts, np.split(own / scale, starts[1:]), strict=True)])
            for name, own in sums.items() if not undecided[name]
        }  # fmt: skip
        if "logprob" not in chosen:
            accuracies.append(Accuracy(Value(None), ""))
            continue
        right, flips = asked.right[chosen["logprob"]], None
        if "ref_logprob" in chosen:
            other = asked.right[chosen["ref_logprob"]]
            lost, won = int((other & ~right).sum()), int((right & ~other).sum())
            changed = share(chosen["logprob"] != chosen["ref_logprob"])
            flips = Flips(changed, share(right != other), lost, won, mcnemar_p(lost, won))
        accuracies.append(Accuracy(share(right), "".join("1" if is_right else "0" for is_right in right), flips))
    return AnswerEstimates(len(starts), undecided["logprob"], *accuracies)


def share(hits: NDArray[np.bool_]) -> Value:
    """The share of hits among independent questions; without an error for a single one."""
    count = len(hits)
    value = int(hits.sum()) / count
    if count < 2:
        return Value(value)
    # lm-eval's formula, in its order, so that its digits are the same.
    deviation = math.sqrt(sum((hit - value) ** 2 for hit in hits.tolist()) / (count - 1))
    return Value(value, deviation / math.sqrt(count))


def discordant(first: str, second: str) -> tuple[int, int]:
    """Return (number of questions that only the first has right, only the second); digits as in ``Accuracy``."""
    pairs = list(zip(first, second, strict=True))
    return pairs.count(("1", "0")), pairs.count(("0", "1"))


def difference_error(first: str, second: str) -> float | None:
    """The standard error of the difference of two accuracies on the same questions; None for a single question.

    Both are digits as in ``Accuracy``: the difference is a mean of -1, 0 and 1 over independent questions.
    """
    count, (lost, won) = len(first), discordant(first, second)
    if count < 2:
        return None
    squares = lost + won - (lost - won) ** 2 / count
    return math.sqrt(squares / (count - 1) / count)


def mcnemar_p(lost: int, won: int) -> float:
    """McNemar's exact two-sided p of these numbers of flips: 2 P(X <= the smaller), X binomial, at most 1."""
    total, term, tail = lost + won, 1, 0
    for k in range(min(lost, won) + 1):
        tail += term  # the binomial coefficient of total over k
        term = term * (total - k) // (k + 1)
    return min(1.0, 2 * tail / (1 << total))
