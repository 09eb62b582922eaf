"""The closing sentences of a run: what was found, and no more than the statistics support.

Which rows differ is decided in ``eval/ranking.py``: between quantized rows by the test of the star,
which holds for all rows at once; between a row and the reference as in ``--pairs``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from ..ranking import Outcome, Ranking, compare, near_lossless, ranking, why_unranked
from ..results import ModelResult, RunResult
from ..stats.uncertainty import SHORT
from . import precision_sentences
from .measured_rows import blocks_of, measured_rows
from .numbers import PPL_DIGITS, kld_in_words, kld_text, number_text, number_with_error
from .rollout_sentences import rollout_sentences
from .wording import (
    MOST_NAMED_ROWS,
    first_words_and_count,
    joined_words,
    ratio_in_words,
    share_in_words,
)

LARGEST_RATIO = 1000
"""The largest ratio of two KLDs that is given as a ratio; beyond it the KLDs themselves are."""
SMALLEST_SAVING = 1.05
"""The smallest ratio of two file sizes that is given."""
ROUNDINGS_OF_PPL = 1e-4
"""Nats: difference of two logarithms of PPL that roundings alone may cause.

A softmax in float32 over 49,152 tokens made all log-probabilities of a server of vLLM 0.32 larger
by 1.7e-5.
"""
VERBS = {"kld": ("loses more", "lose more"), "nll": ("has a higher one", "have higher ones")}
"""Score -> the verb for one worse row, and for several."""
MEASURES = {"kld": "KLD", "nll": "PPL"}
"""Score -> the number of a row."""
CERTAINLY = " for certain"
"""After the verb of a significant difference."""


def verdict(run: RunResult) -> str:
    """Return one or a few sentences on the whole run."""
    sentences = row_sentences(run)
    sentences += rollout_sentences(run)
    sentences += precision_sentences.sentences(run)
    failed = [model.label for model in run.models if model.error]
    if failed:
        sentences.append(f"Failed: {first_words_and_count(failed)}.")
    return " ".join(sentences)


def row_sentences(run: RunResult) -> list[str]:
    """Return the sentences on the rows: on KLDs, or else on perplexities."""
    # What was recorded is not one of the models that are ranked.
    models = [model for model in run.models if not model.is_rollouts]
    measured = measured_rows(models) or measured_rows(run.models)
    if not measured:
        return ["No model was scored."]
    rows = rows_with_kld(measured)
    if run.reference is None or not rows:
        return ppl_sentences(measured) + caution(measured)
    sentences = kld_sentences(run, rows, run.reference["label"])
    for model in measured:
        if model.reference:
            sentences += sentences_against_reference(rows, model)
            break
    without = [model.label for model in measured if model.kld is None]
    if without:
        sentences.append(f"No KLD: {first_words_and_count(without)}.")
    return sentences + caution(rows)


def rows_with_kld(measured: Sequence[ModelResult]) -> list[ModelResult]:
    """Return the rows whose KLDs are compared: quantized ones, or all others if there are none."""
    compared = []
    for model in measured:
        if model.kld is not None and not model.reference and not model.noise_floor:
            compared.append(model)
    quantized = [model for model in compared if model.is_quantized]
    # Rows that are not quantized show what roundings alone lose.
    if quantized:
        return quantized
    return compared


def sentences_against_reference(rows: Sequence[ModelResult], reference: ModelResult) -> list[str]:
    """Return sentences on the PPL of few rows, compared with the reference's; none on many rows."""
    if len(rows) > MOST_NAMED_ROWS:
        return []
    certainly = words_of_certainty(rows)
    clauses = {
        "more": f"is higher than {reference.label}'s{certainly}",
        "less": f"is lower than {reference.label}'s{certainly}",
        "equal": f"cannot be told apart from {reference.label}'s",
        "same": f"is {reference.label}'s, with the same score at every token",
        "rounded": f"is {reference.label}'s up to roundings",
    }
    labels_by_outcome: dict[Outcome | Literal["rounded"], list[str]] = {}
    for model in rows:
        difference = compare(model, reference, "nll")
        outcome: Outcome | Literal["rounded"] = difference.outcome
        is_unequal = outcome in ("more", "less")
        if is_unequal and abs(difference.value or 0.0) < ROUNDINGS_OF_PPL:
            outcome = "rounded"
        labels_by_outcome.setdefault(outcome, []).append(model.marked_label)
    sentences = []
    for outcome, labels in labels_by_outcome.items():
        if outcome in clauses:
            sentences.append(f"The PPL of {first_words_and_count(labels)} {clauses[outcome]}.")
    return sentences


def kld_sentences(run: RunResult, rows: Sequence[ModelResult], reference: str) -> list[str]:
    """Return sentences on the best row, and on how much more the others lose.

    ``reference``: its label.
    """
    lossless_labels = near_lossless(run.models)
    order = ranking(rows, "kld", lossless_labels)
    first_clause = best_row_clause(order.best, reference)
    if order.best.label in lossless_labels:
        first_clause += f", {why_unranked(run.models)}"
    smallest = order.best.kld or 0.0
    klds = {model.label: measured_kld(model) for model in rows}
    worse_klds = [model.kld or 0.0 for model in order.worse]
    # A ratio would claim more than that there is a difference.
    if not caution(rows) and ratios_are_clear([smallest, *worse_klds], smallest):
        ratios = {model.label: times_in_words(model, order.best) for model in order.worse}
        sentences = ranking_sentences(order, "kld", first_clause, ratios, "{} the KLD", klds)
        sentences += size_sentences(order, lossless_labels)
    else:
        sentences = ranking_sentences(order, "kld", first_clause, klds, "a KLD of {}", klds)
    return sentences + undecided_sentences(order.undecided)


def measured_kld(model: ModelResult) -> str:
    """Return the KLD of a row in a sentence: "0.03280", "at least 0.03280"."""
    kld = model.kld or 0.0
    return kld_in_words(kld, model.kld_kind) or kld_text(kld, model.kld_kind)


def times_in_words(model: ModelResult, best: ModelResult) -> str:
    """Return how many times the KLD of the best row a worse row's is: "2.5 times".

    "at least 2.5 times" for a bound.
    """
    times = f"{ratio_in_words((model.kld or 0.0) / (best.kld or 1.0))} times"
    if model.has_bound:
        return f"at least {times}"
    return times


def undecided_sentences(rows: Sequence[ModelResult]) -> list[str]:
    """Return a sentence on the rows whose KLD is a bound, and which may lose more or less than the
    best one; empty without such rows.
    """
    if not rows:
        return []
    klds = sizes_in_words(rows, {model.label: measured_kld(model) for model in rows})
    labels = labels_in_words(rows)
    if len(rows) == 1:
        return [
            f"The KLD of {labels} is {klds}; whether it loses more or less is not known, because "
            "only a bound is known."
        ]
    return [
        f"The KLDs of {labels} are {klds}; whether they lose more or less is not known, because "
        "only bounds are known."
    ]


def best_row_clause(best: ModelResult, reference: str) -> str:
    """Return a clause on the row with the smallest KLD: the tokens that it keeps, and its KLD."""
    kld = best.kld or 0.0
    number = kld_in_words(kld, best.kld_kind)
    if not number:
        number = number_with_error(kld, best.kld_stderr, bound=best.has_bound)
    if best.same_top is None:
        return f"{best.marked_label} has a KLD {number} to {reference}"
    tokens = f"{share_in_words(best.same_top)} of the most probable tokens of {reference}"
    return f"{best.marked_label} keeps {tokens} (KLD {number})"


def ratios_are_clear(klds: Collection[float], smallest: float) -> bool:
    """Return True if each larger KLD differs from the smallest one also as a ratio in words."""
    if smallest <= 0 or max(klds) > LARGEST_RATIO * smallest:
        return False
    ratios = []
    for kld in klds:
        if kld > smallest:
            ratios.append(ratio_in_words(kld / smallest))
    # "1 times the KLD" does not say that a KLD is larger.
    return "1" not in ratios


def size_sentences(order: Ranking, lossless_labels: Collection[str]) -> list[str]:
    """Return a sentence on what the smallest of the worse rows saves, and what that costs.

    Empty if it saves nothing.  A nearly lossless row is not compared, because its KLD comes from
    roundings.  ``lossless_labels``: of the nearly lossless rows.
    """
    best = order.best
    if not best.file_bytes or not best.kld or best.label in lossless_labels:
        return []
    sized = [model for model in order.worse if model.file_bytes and model.kld]
    if not sized:
        return []
    smallest = min(sized, key=lambda model: model.file_bytes or 0)
    saving = best.file_bytes / (smallest.file_bytes or 1)
    if saving < SMALLEST_SAVING:
        return []
    size = f"{ratio_in_words(saving)} times smaller than {best.marked_label}"
    cost = f"{times_in_words(smallest, best)} the KLD"
    return [f"{smallest.marked_label} is {size}, for {cost}."]


def ppl_sentences(measured: Sequence[ModelResult]) -> list[str]:
    """Return sentences on the rows by perplexity, if there are no KLDs."""
    rows = [model for model in measured if model.ppl is not None and not model.noise_floor]
    if not rows:
        return ["No model has a perplexity."]
    order = ranking(rows, "nll")
    best = order.best
    number = number_with_error(best.ppl or 0.0, best.ppl_stderr)
    if len(rows) == 1:
        sentence = f"{best.marked_label} has a PPL of {number} on this text"
        return [f"{sentence}; there is no other to compare it with."]
    ppls = {model.label: number_text(model.ppl, PPL_DIGITS) for model in rows}
    first_clause = f"{best.marked_label} has the lowest PPL, {number}"
    if caution(rows):
        return ranking_sentences(order, "nll", first_clause, ppls, "{}", ppls)
    increases = {}
    for model in order.worse:
        percent = 100 * ((model.ppl or 0.0) / (best.ppl or 1.0) - 1)
        if percent >= 0.01:
            increases[model.label] = f"{ratio_in_words(percent)} %"
        else:
            increases[model.label] = "less than 0.01 %"
    return ranking_sentences(order, "nll", first_clause, increases, "by {}", ppls)


def ranking_sentences(
    order: Ranking,
    score: str,
    first_clause: str,
    sizes: Mapping[str, str],
    frame: str,
    numbers: Mapping[str, str],
) -> list[str]:
    """Return a sentence on the best row and how the others compare with it.

    A second one follows if some differences are not known: of such rows, the first sentence has
    only what was measured.

    ``first_clause``: on the best row; ``sizes``: label -> how much worse a row is, which goes into
    ``frame``; ``numbers``: label -> the row's KLD or PPL.
    """
    clauses = [first_clause]
    if order.same:
        clauses.append(same_clause(order.same))
    if order.unranked:
        clauses.append(f"KLD cannot rank it beside {labels_in_words(order.unranked)}")
    if order.equal:
        clauses.append(f"it cannot be told apart from {labels_in_words(order.equal)}")
    if order.worse:
        rows = [order.best, *order.unranked, *order.equal, *order.worse, *order.unknown]
        verb = verb_of(order.worse, score) + words_of_certainty(rows)
        amounts = frame.format(sizes_in_words(order.worse, sizes))
        clauses.append(f"{subject_of(order.worse, order)} {verb}: {amounts}")
    if not order.unknown:
        return [f"{'; '.join(clauses)}."]
    subject = subject_of(order.unknown, order)
    verb = verb_of(order.unknown, score)
    values = sizes_in_words(order.unknown, numbers)
    if len(order.unknown) == 1:
        clauses.append(f"{subject} has a {MEASURES[score]} of {values}")
    else:
        clauses.append(f"{subject} have {MEASURES[score]}s of {values}")
    reason = order.reason or "they cannot be compared token by token"
    doubt = f"Whether {subject} {verb} is not known: {reason}."
    return [f"{'; '.join(clauses)}.", doubt]


def same_clause(rows: Sequence[ModelResult]) -> str:
    """Return a clause on rows with the scores of the best one."""
    verb = "has"
    if len(rows) > 1:
        verb = "have"
    return f"{labels_in_words(rows)} {verb} the same scores at every token"


def labels_in_words(rows: Sequence[ModelResult]) -> str:
    """Return the labels of rows; of many rows the first ones, and the number of the others."""
    return first_words_and_count([model.marked_label for model in rows])


def verb_of(rows: Sequence[ModelResult], score: str) -> str:
    """Return the verb for rows that are worse by a score."""
    singular, plural = VERBS[score]
    if len(rows) == 1:
        return singular
    return plural


def subject_of(rows: Sequence[ModelResult], order: Ranking) -> str:
    """Return the subject of a clause on the worse rows, or on the rows that may be worse."""
    # With both kinds of rows, "the others" could be either.
    has_both_kinds = bool(order.worse and order.unknown)
    if len(rows) >= MOST_NAMED_ROWS and not has_both_kinds:
        return f"the {len(rows)} others"
    return labels_in_words(rows)


def sizes_in_words(rows: Sequence[ModelResult], sizes: Mapping[str, str]) -> str:
    """Return how much worse each row is; of many rows, the first and the last one."""
    if len(rows) < MOST_NAMED_ROWS:
        return joined_words([sizes[model.label] for model in rows])
    ends = []
    for model in (rows[0], rows[-1]):
        ends.append(f"{sizes[model.label]} ({model.marked_label})")
    return " to ".join(ends)


def words_of_certainty(models: Sequence[ModelResult]) -> str:
    """Return the words for a significant difference; none if errors may be far too small."""
    if caution(models):
        return ""
    return CERTAINLY


def caution(models: Sequence[ModelResult]) -> list[str]:
    """Return the sentence that nothing is certain, if the text is short."""
    blocks = blocks_of(models)
    # An error is estimated from the spread of the blocks.
    if any(sums.held < 2 for sums in blocks):
        return ["Nothing of this is certain: no errors are known."]
    length = min((sums.length for sums in blocks), default=SHORT)
    if length >= SHORT:
        return []
    return [f"On a text of {length:,} tokens nothing of this is certain."]
