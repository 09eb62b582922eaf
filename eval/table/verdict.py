"""Results -> the words that end a run: what was found, and no more than the statistics bear.

"For certain" stands where paired differences say so at 95 % (``eval/ranking.py``): of rows beside the best
one it is the test of the star, which holds for all rows at once, and of a row beside the reference the interval of
``--pairs``.  On a text whose errors may be far too small nothing is certain.  Within the noise floor KLD ranks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compare_q.eval.ranking import (
    LEAST_TOKENS,
    SCORES,
    Difference,
    best_among,
    difference_or_reason,
    near_lossless,
)
from compare_q.eval.results import ModelResult, RunResult, TextResult
from compare_q.eval.stats.answers import discordant, mcnemar_p
from compare_q.eval.stats.estimates import n_blocks
from compare_q.eval.stats.uncertainty import SHORT
from compare_q.eval.table.numbers import number_with_error, two_digits
from compare_q.eval.table.pairs import LEVEL

NAMED = 3
"""Rows that are named one by one; of more, the first ones, or the ends of a range."""
MOST_TIMES = 1000
"""A KLD that is more often as large is said itself: beside a KLD of next to nothing everything is."""
Measured = Callable[[ModelResult], float | None]


@dataclass(frozen=True)
class Ranking:
    """Rows by what they lose: the ``best`` measured one, those ``equal`` to it (not told apart), and ``worse`` ones.

    ``unknown``: rows of which the statistics do not say it, and the ``reason``.
    """

    best: ModelResult
    equal: Sequence[ModelResult] = ()
    worse: Sequence[ModelResult] = ()
    unknown: Sequence[ModelResult] = ()
    reason: str = "they cannot be compared token by token"


def verdict(results: RunResult) -> str:
    """One or a few sentences on the whole run."""
    said = ["No text was scored."]
    if results.scored:
        said = of_text(results.scored[0]) if len(results.texts) == 1 else of_texts(results)
    failed = [label for label in results.labels if any(m and m.error for m in results.of_label(label))]
    failed += [f"the text {text.name}" for text in results.texts if text.error]
    return " ".join([*said, *([f"Failed: {listed(failed)}."] if failed else [])])


def of_text(text: TextResult) -> list[str]:
    """The sentences on one text."""
    measured = [model for model in text.models if model.estimates]
    if not measured:
        return ["No model was scored."]
    if text.is_answers:
        return of_answers(measured)
    compared = [m for m in measured if kld_of(m) is not None and not (m.reference or m.noise_floor)]
    rows = [m for m in compared if m.is_quantized] or compared
    if text.reference is None or not rows:
        return [*of_ppl(measured), *caution(measured)]
    said = of_kld(text, rows)
    reference = next((m for m in measured if m.reference), None)
    if reference is not None and len(rows) <= NAMED:
        said += ppl_beside(reference, rows)
    without = [m.label for m in measured if kld_of(m) is None and not m.reference]
    return [*said, *([f"No KLD: {listed(without)}."] if without else []), *caution(rows)]


def kld_of(model: ModelResult) -> float | None:
    """A row's mean KLD in nats."""
    return None if model.reference else model.kld


def ppl_of(model: ModelResult) -> float | None:
    """A row's perplexity."""
    return model.ppl


def ranking(rows: Sequence[ModelResult], score: str, of: Measured, near: frozenset[str] = frozenset()) -> Ranking:
    """The rows, all of which have the measure ``of``, by a score (of ``SCORES``); ``near``: whom KLD does not rank."""
    blocks = {m.label: m.estimates.blocks for m in rows if m.estimates and getattr(m.estimates.blocks, score)}
    first, *others = sorted(rows, key=lambda model: of(model) or 0.0)
    if not others:
        return Ranking(first)
    if any(n_blocks(each) < 2 or each.length < LEAST_TOKENS for each in blocks.values()):
        return Ranking(first, unknown=others, reason="the text is too short")
    best = best_among(blocks, score)
    if first.label not in best:
        return Ranking(first, unknown=others, reason=f"{first.label} has no {SCORES[score]} at some tokens")
    equal = [m for m in others if m.label in best | (near if first.label in near else frozenset())]
    seen = {m.label: difference_or_reason(m, first, score) for m in others if m not in equal}
    worse = [m for m in others if isinstance(off := seen.get(m.label), Difference) and off.is_seen and off.value > 0]
    return Ranking(first, equal, worse, [m for m in others if m not in (*equal, *worse)])


def of_kld(text: TextResult, rows: Sequence[ModelResult]) -> list[str]:
    """What the rows keep of the reference, and how much more than the best one the others lose."""
    assert text.reference is not None
    near, reference = near_lossless(text.models), text.reference["label"]
    found = ranking(rows, "kld", kld_of, near)
    best, kld = found.best, found.best.kld
    assert kld is not None
    size = f"KLD {number_with_error(kld, best.kld_stderr)}"
    first = f"{best.marked_label} has a {size} to {reference}"
    if best.same_top is not None:
        kept = f"keeps {percent(best.same_top)} of the most probable tokens of {reference}"
        first = f"{best.marked_label} {kept} ({size})"
    if best.label in near:
        first += ", near what other roundings of the same weights lose"
    klds = {m.label: kld_of(m) or 0.0 for m in rows}
    if kld <= 0 or max(klds.values()) > MOST_TIMES * kld:
        sizes, frame = {label: f"{each:.5f}" for label, each in klds.items()}, "a KLD of {}"
    else:
        sizes, frame = {label: f"{times(each / kld)} times" for label, each in klds.items()}, "{} the KLD"
    return beside_best(found, first, ("loses more", "lose more"), certainly(rows), sizes, frame, near)


def beside_best(
    found: Ranking, first: str, verbs: tuple[str, str], certain: str, sizes: Mapping[str, str], frame: str,
    near: frozenset[str] = frozenset(),
) -> list[str]:  # fmt: skip
    """``first``, which is about the best row, and then what the others are beside it.

    ``verbs``: of one row and of several ones; ``sizes``: label -> how much worse a row is, shown in the ``frame``.
    """
    clauses, doubts = [first], []
    if found.equal:
        is_near = {m.label for m in found.equal} <= near
        clauses.append(
            ("KLD cannot rank it beside " if is_near else "it cannot be told apart from ") + named(found.equal)
        )
    for rows, sure in ((found.worse, certain), (found.unknown, "")):
        if not rows:
            continue
        who, verb = named(rows), verbs[len(rows) > 1]
        shown = " and ".join(sizes[m.label] for m in rows)
        if len(rows) >= NAMED:
            who, shown = (
                f"the {len(rows)} others",
                " to ".join(f"{sizes[m.label]} ({m.marked_label})" for m in (rows[0], rows[-1])),
            )
        clauses.append(f"{who} {verb}{sure}: {frame.format(shown)}")
        doubts = [f"Whether {who} really {verb} is not known: {found.reason}."] if rows is found.unknown else []
    return [f"{'; '.join(clauses)}.", *doubts]


def ppl_beside(reference: ModelResult, rows: Sequence[ModelResult]) -> list[str]:
    """Whose perplexity differs from the reference's."""
    groups: dict[str, list[ModelResult]] = {}
    for model in rows:
        found = difference_or_reason(model, reference, "nll")
        if isinstance(found, Difference) and found.limits is not None:
            kind = "" if not found.is_seen else "higher" if found.value > 0 else "lower"
            groups.setdefault(kind, []).append(model)
    return [
        f"PPL is {kind} than {reference.label}'s{certainly(rows)}: {named(members)}." if kind
        else f"PPL cannot be told apart from {reference.label}'s: {named(members)}."
        for kind, members in groups.items()
    ]  # fmt: skip


def of_ppl(measured: Sequence[ModelResult]) -> list[str]:
    """The rows by perplexity, where no KLD says more."""
    rows = [model for model in measured if ppl_of(model) is not None and not model.noise_floor]
    if not rows:
        return ["No model has a perplexity."]
    found = ranking(rows, "nll", ppl_of)
    best, ppl = found.best, found.best.ppl
    assert ppl is not None
    size = number_with_error(ppl, best.ppl_stderr)
    if len(rows) == 1:
        return [f"{best.marked_label} has a PPL of {size} on this text; there is no other to compare it with."]
    first = f"{best.marked_label} has the lowest PPL, {size}"
    sizes = {m.label: f"{times(100 * ((ppl_of(m) or 0.0) / ppl - 1))} %" for m in rows}
    return beside_best(found, first, ("has a higher one", "have higher ones"), certainly(rows), sizes, "by {}")


def of_answers(measured: Sequence[ModelResult]) -> list[str]:
    """How many questions the reference, or else the best model, has right, and who has fewer (McNemar's exact test).

    Of several comparisons each has its share of the level (Bonferroni).
    """
    rows = [(m, found.acc) for m in measured if m.estimates and (found := m.estimates.answers) and found.acc.right]
    if not rows:
        return ["No model's answers are known."]
    base, own = max(rows, key=lambda row: (row[0].reference, row[1].right.count("1")))
    questions = len(own.right)
    others = [(m, acc) for m, acc in rows if m is not base and len(acc.right) == questions]
    said = f"{base.marked_label} has {percent(own.right.count('1') / questions)} of {questions:,} questions right"
    if not others:
        return [f"{said}; there is no other model to compare it with."]
    groups: dict[str, list[str]] = {}
    for model, acc in others:
        lost, won = discordant(own.right, acc.right)
        kind = "fewer for certain" if lost > won else "more for certain"
        kind = kind if mcnemar_p(lost, won) < LEVEL / len(others) else "cannot be told apart from it"
        groups.setdefault(kind, []).append(f"{model.marked_label} ({percent(acc.right.count('1') / questions)})")
    return [f"{'; '.join([said, *(f'{kind}: {listed(labels)}' for kind, labels in groups.items())])}."]


def of_texts(results: RunResult) -> list[str]:
    """The rows by their means over the texts; a difference is certain that is so on every text, in one direction."""
    candidates = dict.fromkeys(m.label for text in results.scored for m in text.models)
    for score, mean, word in (("kld", results.mean_kld, "KLD"), ("nll", results.mean_ppl, "PPL")):
        known = {label: value for label in candidates if (value := mean(label)).value is not None}
        rows = [label for label in known if score == "nll" or is_candidate(results, label)]
        if len(rows) > (score == "nll"):
            return [*of_means(results, sorted(rows, key=lambda label: known[label].value or 0.0), score, word)]
    return [f"{text.name}: {each}" for text in results.scored for each in of_text(text)]


def is_candidate(results: RunResult, label: str) -> bool:
    """Whether a row is neither the reference nor a noise floor."""
    models = [model for model in results.of_label(label) if model]
    return not any(model.reference or model.noise_floor for model in models)


def of_means(results: RunResult, labels: Sequence[str], score: str, word: str) -> list[str]:
    """The sentences on rows in the order of their means."""
    first, *others = labels
    mean = (results.mean_kld if score == "kld" else results.mean_ppl)(first)
    texts = [text for text in results.scored if score == "kld" or not text.is_answers]
    models = [m for text in texts for m in text.models if m.estimates]
    assert mean.value is not None
    size = number_with_error(mean.value, mean.stderr)
    clauses = [f"Over {len(texts)} texts {first} has the lowest mean {word}, {size}"]
    worse = [label for label in others if all(is_worse(text, label, first, score) for text in texts)]
    same = [label for label in others if label not in worse]
    clauses += [f"higher on each text{certainly(models)}: {listed(worse)}"] if worse else []
    clauses += [f"not higher for certain on each text: {listed(same)}"] if same else []
    return [f"{'; '.join(clauses)}.", *caution(models)]


def is_worse(text: TextResult, label: str, best: str, score: str) -> bool:
    """Whether a row is told apart from the best one of all texts on this text, in the same direction."""
    models = {model.label: model for model in text.models}
    found, near = difference_or_reason(models[label], models[best], score), near_lossless(text.models)
    ranked = score == "nll" or not {label, best} <= near
    return isinstance(found, Difference) and found.is_seen and found.value > 0 and ranked


def certainly(models: Sequence[ModelResult]) -> str:
    """Whether what intervals say is certain: not where errors may be far too small."""
    return "" if caution(models) else " for certain"


def caution(models: Sequence[ModelResult]) -> list[str]:
    """The sentence that takes certainty back, where the text is short."""
    blocks = [model.estimates.blocks for model in models if model.estimates]
    if any(n_blocks(each) < 2 for each in blocks):
        return ["Nothing of this is certain: no errors are known."]
    length = min((each.length for each in blocks), default=SHORT)
    return [] if length >= SHORT else [f"On a text of {length:,} tokens nothing of this is certain."]


def named(models: Sequence[ModelResult]) -> str:
    """The labels of rows."""
    return listed([model.marked_label for model in models])


def listed(words: Sequence[str]) -> str:
    """``a, b and c``; of many the first ones, and how many more there are."""
    if len(words) > NAMED + 1:
        words = [*words[:NAMED], f"{len(words) - NAMED} more"]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def percent(share: float) -> str:
    """A share in percent with one decimal; what is not the whole is not called 100 %."""
    shown = f"{100 * share:.1f} %"
    return "over 99.9 %" if shown == "100.0 %" and share < 1 else shown


def times(ratio: float) -> str:
    """A ratio with two significant digits, near 1 with three: 4.1, 170, 1.04."""
    return f"{ratio:.3g}" if 1 <= ratio < 1.1 else f"{two_digits(ratio):,g}"
