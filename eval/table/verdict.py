"""The closing sentences of a run: what was found, and no more than the statistics support.

"For certain" means a paired difference at 95 % (``eval/ranking.py``).  Between quantized rows it is the test of the
star, which holds for all rows at once; between a row and the reference it is the interval of ``--pairs``.  On a text
whose errors may be far too small nothing is certain, and within the noise floor KLD ranks nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compare_q.eval.ranking import LEAST_TOKENS, SCORES, Difference, best_among, difference_or_reason, near_lossless
from compare_q.eval.results import ModelResult, RunResult, TextResult
from compare_q.eval.stats.answers import discordant, mcnemar_p
from compare_q.eval.stats.estimates import n_blocks
from compare_q.eval.stats.uncertainty import SHORT, Value
from compare_q.eval.table.numbers import number_with_error, two_digits
from compare_q.eval.table.pairs import LEVEL

NAMED = 3
"""The largest number of rows that are all named.  Of more rows, the first ones are named, or the best and the worst."""
MOST_TIMES = 1000
"""The largest ratio of two KLDs that is given as a ratio; beyond it the KLDs themselves are."""


def verdict(run: RunResult) -> str:
    """Return one or a few sentences on the whole run."""
    said = ["No text was scored."]
    if run.scored:
        said = of_text(run.scored[0]) if len(run.texts) == 1 else of_texts(run)
    failed = [label for label in run.labels if any(model and model.error for model in run.of_label(label))]
    failed += [f"the text {text.name}" for text in run.texts if text.error]
    return " ".join([*said, *([f"Failed: {listed(failed)}."] if failed else [])])


def of_text(text: TextResult) -> list[str]:
    """Return the sentences on one text."""
    measured = [model for model in text.models if model.estimates]
    if not measured:
        return ["No model was scored."]
    if text.is_answers:
        return of_answers(measured)
    compared = [model for model in measured if model.kld is not None and not (model.reference or model.noise_floor)]
    rows = [model for model in compared if model.is_quantized] or compared
    if text.reference is None or not rows:
        return [*of_ppl(measured), *caution(measured)]
    said, reference = of_kld(text, rows), next((model for model in measured if model.reference), None)
    if reference is not None and len(rows) <= NAMED:
        said += of_ppl_and_reference(reference, rows)
    without = [model.label for model in measured if model.kld is None]
    return [*said, *([f"No KLD: {listed(without)}."] if without else []), *caution(rows)]


@dataclass(frozen=True)
class Ranking:
    """Rows by a score: the ``best`` one, those without a significant difference from it (``equal``), ``worse`` ones,
    and those that cannot be compared (``unknown``) for a ``reason``."""

    best: ModelResult
    equal: Sequence[ModelResult] = ()
    worse: Sequence[ModelResult] = ()
    unknown: Sequence[ModelResult] = ()
    reason: str = "they cannot be compared token by token"


def ranking(rows: Sequence[ModelResult], score: str, near: frozenset[str] = frozenset()) -> Ranking:
    """Rank rows by the score "kld" or "nll", which they all have.  ``near``: labels of rows that KLD does not rank."""
    blocks = {m.label: m.estimates.blocks for m in rows if m.estimates and getattr(m.estimates.blocks, score)}
    first, *others = sorted(rows, key=lambda model: (model.kld if score == "kld" else model.ppl) or 0.0)
    if not others:
        return Ranking(first)
    if any(n_blocks(each) < 2 or each.length < LEAST_TOKENS for each in blocks.values()):
        return Ranking(first, unknown=others, reason="the text is too short")
    best = best_among(blocks, score)
    if first.label not in best:
        return Ranking(first, unknown=others, reason=f"{first.label} has no {SCORES[score]} at some tokens")
    equal = [model for model in others if model.label in best or {first.label, model.label} <= near]
    worse = [model for model in others if model not in equal and is_more(model, first, score)]
    return Ranking(first, equal, worse, [model for model in others if model not in (*equal, *worse)])


def is_more(model: ModelResult, other: ModelResult, score: str) -> bool:
    """Return True if a model's score is more than another's at 95 %."""
    found = difference_or_reason(model, other, score)
    return isinstance(found, Difference) and found.is_seen and found.value > 0


def of_kld(text: TextResult, rows: Sequence[ModelResult]) -> list[str]:
    """Return sentences on what the best row keeps of the reference, and how much more the others lose."""
    near, reference = near_lossless(text.models), (text.reference or {})["label"]
    found = ranking(rows, "kld", near)
    best, least = found.best, found.best.kld or 0.0
    size = f"KLD {number_with_error(least, best.kld_stderr)}"
    first = f"{best.marked_label} has a {size} to {reference}"
    if best.same_top is not None:
        kept = f"keeps {percent(best.same_top)} of the most probable tokens of {reference}"
        first = f"{best.marked_label} {kept} ({size})"
    if best.label in near:
        first += ", near what other roundings of the same weights lose"
    klds = {model.label: model.kld or 0.0 for model in rows}
    sizes, frame = {label: f"{kld:.5f}" for label, kld in klds.items()}, "a KLD of {}"
    if 0 < max(klds.values()) <= MOST_TIMES * least:
        sizes, frame = {label: f"{times(kld / least)} times" for label, kld in klds.items()}, "{} the KLD"
    return with_others(found, first, ("loses more", "lose more"), rows, sizes, frame, near)


def of_ppl(measured: Sequence[ModelResult]) -> list[str]:
    """Return sentences on the rows by perplexity, if there are no KLDs."""
    rows = [model for model in measured if model.ppl is not None and not model.noise_floor]
    if not rows:
        return ["No model has a perplexity."]
    found = ranking(rows, "nll")
    best, ppl = found.best, found.best.ppl or 0.0
    size = number_with_error(ppl, best.ppl_stderr)
    if len(rows) == 1:
        return [f"{best.marked_label} has a PPL of {size} on this text; there is no other to compare it with."]
    sizes = {model.label: f"{times(100 * ((model.ppl or 0.0) / ppl - 1))} %" for model in rows}
    first = f"{best.marked_label} has the lowest PPL, {size}"
    return with_others(found, first, ("has a higher one", "have higher ones"), rows, sizes, "by {}")


def with_others(
    found: Ranking, first: str, verbs: tuple[str, str], measured: Sequence[ModelResult], sizes: Mapping[str, str],
    frame: str, near: frozenset[str] = frozenset(),
) -> list[str]:  # fmt: skip
    """Return ``first``, a clause on the best row, followed by how the others compare with it.

    ``verbs``: for one row and for several; ``sizes``: label -> how much worse a row is, which goes into ``frame``.
    """
    clauses, doubts = [first], []
    if found.equal:
        unranked = {model.label for model in found.equal} <= near
        clauses.append(
            f"{'KLD cannot rank it beside' if unranked else 'it cannot be told apart from'} {named(found.equal)}"
        )
    for rows, certain in ((found.worse, certainly(measured)), (found.unknown, "")):
        if not rows:
            continue
        who, verb = named(rows), verbs[len(rows) > 1]
        shown = " and ".join(sizes[model.label] for model in rows)
        if len(rows) >= NAMED:
            who = f"the {len(rows)} others"
            shown = " to ".join(f"{sizes[model.label]} ({model.marked_label})" for model in (rows[0], rows[-1]))
        clauses.append(f"{who} {verb}{certain}: {frame.format(shown)}")
        if rows is found.unknown:
            doubts = [f"Whether {who} really {verb} is not known: {found.reason}."]
    return [f"{'; '.join(clauses)}.", *doubts]


def of_ppl_and_reference(reference: ModelResult, rows: Sequence[ModelResult]) -> list[str]:
    """Return a sentence for the rows with a higher perplexity than the reference, and for those with an equal one."""
    kinds: dict[str, list[ModelResult]] = {}
    for model in rows:
        found = difference_or_reason(model, reference, "nll")
        if isinstance(found, Difference) and found.limits is not None:
            said = f"is {'higher' if found.value > 0 else 'lower'} than {reference.label}'s{certainly(rows)}"
            kinds.setdefault(said if found.is_seen else f"cannot be told apart from {reference.label}'s", []).append(
                model
            )
    return [f"PPL {said}: {named(members)}." for said, members in kinds.items()]


def of_answers(measured: Sequence[ModelResult]) -> list[str]:
    """Return a sentence on how many questions the reference, or the best model, has right, and which rows differ.

    By McNemar's exact test; each of several comparisons has its share of the level (Bonferroni).
    """
    rows = [
        (m, found.acc.right) for m in measured if m.estimates and (found := m.estimates.answers) and found.acc.right
    ]
    if not rows:
        return ["No model's answers are known."]
    base, own = max(rows, key=lambda row: (row[0].reference, row[1].count("1")))
    questions = len(own)
    others = [(model, right) for model, right in rows if model is not base and len(right) == questions]
    said = f"{base.marked_label} has {percent(own.count('1') / questions)} of {questions:,} questions right"
    if not others:
        return [f"{said}; there is no other model to compare it with."]
    kinds: dict[str, list[str]] = {}
    for model, right in others:
        lost, won = discordant(own, right)
        kind = "fewer for certain" if lost > won else "more for certain"
        kind = kind if mcnemar_p(lost, won) < LEVEL / len(others) else "cannot be told apart from it"
        kinds.setdefault(kind, []).append(f"{model.marked_label} ({percent(right.count('1') / questions)})")
    return [f"{'; '.join([said, *(f'{kind}: {listed(labels)}' for kind, labels in kinds.items())])}."]


def of_texts(run: RunResult) -> list[str]:
    """Return the sentences on several texts: by mean KLD, or else by mean PPL, or else on each text."""
    klds, ppls = ({label: mean for label in run.labels if (mean := mean_of(label)).value is not None}
                  for mean_of in (run.mean_kld, run.mean_ppl))  # fmt: skip
    unquantized = {model.label for text in run.scored for model in text.models if model.reference or model.noise_floor}
    if compared := {label: mean for label, mean in klds.items() if label not in unquantized}:
        return of_means(run, compared, "kld", "KLD")
    if len(ppls) > 1:
        return of_means(run, ppls, "nll", "PPL")
    return [f"{text.name}: {each}" for text in run.scored for each in of_text(text)]


def of_means(run: RunResult, means: Mapping[str, Value], score: str, word: str) -> list[str]:
    """Return the sentences on rows by their means; a difference is certain if every text has it."""
    first, *others = sorted(means, key=lambda label: means[label].value or 0.0)
    texts = [text for text in run.scored if score == "kld" or not text.is_answers]
    models = [model for text in texts for model in text.models if model.estimates]
    size = number_with_error(means[first].value or 0.0, means[first].stderr)
    clauses = [f"Over {len(texts)} texts {first} has the lowest mean {word}, {size}"]
    worse = [label for label in others if all(is_worse(text, label, first, score) for text in texts)]
    same = [label for label in others if label not in worse]
    clauses += [f"higher on each text{certainly(models)}: {listed(worse)}"] if worse else []
    clauses += [f"not higher for certain on each text: {listed(same)}"] if same else []
    return [f"{'; '.join(clauses)}.", *caution(models)]


def is_worse(text: TextResult, label: str, best: str, score: str) -> bool:
    """Return True if a row is significantly worse on a text than the row that is best over all texts."""
    models = {model.label: model for model in text.models}
    ranked = score == "nll" or not {label, best} <= near_lossless(text.models)
    return ranked and is_more(models[label], models[best], score)


def certainly(models: Sequence[ModelResult]) -> str:
    """Return the words for a significant difference; none if errors may be far too small."""
    return "" if caution(models) else " for certain"


def caution(models: Sequence[ModelResult]) -> list[str]:
    """Return the sentence that nothing is certain, if the text is short."""
    blocks = [model.estimates.blocks for model in models if model.estimates]
    if any(n_blocks(each) < 2 for each in blocks):
        return ["Nothing of this is certain: no errors are known."]
    length = min((each.length for each in blocks), default=SHORT)
    return [] if length >= SHORT else [f"On a text of {length:,} tokens nothing of this is certain."]


def named(models: Sequence[ModelResult]) -> str:
    """Return the labels of rows as a list in words."""
    return listed([model.marked_label for model in models])


def listed(words: Sequence[str]) -> str:
    """Return ``a, b and c``; of more than four the first three, and the number of the others."""
    if len(words) > NAMED + 1:
        words = [*words[:NAMED], f"{len(words) - NAMED} more"]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def percent(share: float) -> str:
    """Return a share in percent with one decimal; only 1 is 100 %."""
    shown = f"{100 * share:.1f} %"
    return "over 99.9 %" if shown == "100.0 %" and share < 1 else shown


def times(ratio: float) -> str:
    """Return a ratio with two significant digits, or three near 1: 4.1, 170, 1.04."""
    return f"{ratio:.3g}" if 1 <= ratio < 1.1 else f"{two_digits(ratio):,g}"
