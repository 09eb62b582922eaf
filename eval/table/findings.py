"""The closing sentences of a run: what was found, and no more than the statistics support.

Which rows differ is decided in ``eval/ranking.py``: between quantized rows by the test of the star,
which holds for all rows at once; between a row and the reference as in ``--pairs``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..ranking import Ranking, compare, near_lossless, ranking, why_unranked
from ..results import ModelResult, RunResult
from ..stats.uncertainty import SHORT
from . import precision_sentences
from .numbers import kld_in_words, kld_text, number_with_error, two_digits

NAMED = 3
"""The largest number of rows that are all named.  Of more rows, the first ones are named, or the
best and the worst."""
MOST_TIMES = 1000
"""The largest ratio of two KLDs that is given as a ratio; beyond it the KLDs themselves are."""
LEAST_SAVED = 1.05
"""The smallest ratio of two file sizes that is given."""
VERBS = {"kld": ("loses more", "lose more"), "nll": ("has a higher one", "have higher ones")}
"""The verb for one worse row, and for several."""
SAME = "the same scores at every token"


def verdict(run: RunResult) -> str:
    """Return one or a few sentences on the whole run."""
    said = [*on_models(run), *precision_sentences.sentences(run)]
    failed = [model.label for model in run.models if model.error]
    if failed:
        said.append(f"Failed: {listed(failed)}.")
    return " ".join(said)


def on_models(run: RunResult) -> list[str]:
    """Return the sentences on the rows: on KLDs, or else on perplexities."""
    measured = [model for model in run.models if model.blocks]
    if not measured:
        return ["No model was scored."]
    compared = [
        model
        for model in measured
        if model.kld is not None and not (model.reference or model.noise_floor)
    ]
    rows = [model for model in compared if model.is_quantized] or compared
    if run.reference is None or not rows:
        return [*of_ppl(measured), *caution(measured)]
    said, reference = (
        of_kld(run, rows),
        next((model for model in measured if model.reference), None),
    )
    if reference is not None and len(rows) <= NAMED:
        outcomes = {model.marked_label: compare(model, reference, "nll").outcome for model in rows}
        kinds = {
            "more": f"is higher than {reference.label}'s{certainly(rows)}",
            "less": f"is lower than {reference.label}'s{certainly(rows)}",
            "equal": f"cannot be told apart from {reference.label}'s",
            "same": f"is {reference.label}'s, with the same score at every token",
        }
        for kind in [each for each in dict.fromkeys(outcomes.values()) if each in kinds]:
            labels = [label for label, outcome in outcomes.items() if outcome == kind]
            said.append(f"The PPL of {listed(labels)} {kinds[kind]}.")
    without = [model.label for model in measured if model.kld is None]
    return [*said, *([f"No KLD: {listed(without)}."] if without else []), *caution(rows)]


def of_kld(run: RunResult, rows: Sequence[ModelResult]) -> list[str]:
    """Return sentences on what the best row keeps of the reference, and how much more the others
    lose.
    """
    near, reference = near_lossless(run.models), (run.reference or {})["label"]
    found = ranking(rows, "kld", near)
    best, least = found.best, found.best.kld or 0.0
    size = f"KLD {kld_in_words(least) or number_with_error(least, best.kld_stderr)}"
    first = f"{best.marked_label} has a {size} to {reference}"
    if best.same_top is not None:
        kept = f"keeps {percent(best.same_top)} of the most probable tokens of {reference}"
        first = f"{best.marked_label} {kept} ({size})"
    if best.label in near:
        first += f", {why_unranked(run.models)}"
    klds = {model.label: model.kld or 0.0 for model in rows}
    more = [kld / least for kld in klds.values() if kld > least > 0]
    if 0 < max(klds.values()) <= MOST_TIMES * least and all(times(ratio) != "1" for ratio in more):
        sizes = {label: f"{times(kld / least)} times" for label, kld in klds.items()}
        return [*ranked(found, "kld", first, sizes, "{} the KLD"), *for_its_size(found, near)]
    sizes = {label: kld_in_words(kld) or kld_text(kld) for label, kld in klds.items()}
    return ranked(found, "kld", first, sizes, "a KLD of {}")


def for_its_size(found: Ranking, near: Collection[str]) -> list[str]:
    """Return a sentence on what the smallest of the worse rows saves, and what that costs; none if
    it saves nothing.

    A nearly lossless row is not compared, because its KLD comes from roundings.
    """
    best = found.best
    sized = [model for model in found.worse if model.file_bytes and model.kld]
    if not (sized and best.file_bytes and best.kld) or best.label in near:
        return []
    smallest = min(sized, key=lambda model: model.file_bytes or 0)
    saved = best.file_bytes / (smallest.file_bytes or 1)
    if saved < LEAST_SAVED:
        return []
    cost = times((smallest.kld or 0.0) / best.kld)
    return [
        f"{smallest.marked_label} is {times(saved)} times smaller than {best.marked_label}, for {cost} times the KLD."
    ]


def of_ppl(measured: Sequence[ModelResult]) -> list[str]:
    """Return sentences on the rows by perplexity, if there are no KLDs."""
    rows = [model for model in measured if model.ppl is not None and not model.noise_floor]
    if not rows:
        return ["No model has a perplexity."]
    found = ranking(rows, "nll")
    best, size = found.best, number_with_error(found.best.ppl or 0.0, found.best.ppl_stderr)
    if len(rows) == 1:
        return [
            f"{best.marked_label} has a PPL of {size} on this text; there is no other to compare it with."
        ]
    above = {model.label: 100 * ((model.ppl or 0.0) / (best.ppl or 1.0) - 1) for model in rows}
    sizes = {
        label: f"{times(ratio)} %" if ratio >= 0.01 else "less than 0.01 %"
        for label, ratio in above.items()
    }
    return ranked(found, "nll", f"{best.marked_label} has the lowest PPL, {size}", sizes, "by {}")


def ranked(
    found: Ranking, score: str, first: str, sizes: Mapping[str, str], frame: str
) -> list[str]:
    """Return ``first``, a clause on the best row, followed by how the others compare with it.

    ``sizes``: label -> how much worse a row is, which goes into ``frame``.
    """
    clauses, doubts = [first], []
    if found.same:
        has = "has" if len(found.same) == 1 else "have"
        clauses.append(f"{listed([model.marked_label for model in found.same])} {has} {SAME}")
    for others, words in (
        (found.unranked, "KLD cannot rank it beside"),
        (found.equal, "it cannot be told apart from"),
    ):
        if others:
            clauses.append(f"{words} {listed([model.marked_label for model in others])}")
    certain = certainly([found.best, *found.unranked, *found.equal, *found.worse, *found.unknown])
    for others, surely in ((found.worse, certain), (found.unknown, "")):
        if not others:
            continue
        who, verb = listed([model.marked_label for model in others]), VERBS[score][len(others) > 1]
        shown = " and ".join(sizes[model.label] for model in others)
        if len(others) >= NAMED:
            who = who if found.worse and found.unknown else f"the {len(others)} others"
            shown = " to ".join(
                f"{sizes[model.label]} ({model.marked_label})" for model in (others[0], others[-1])
            )
        clauses.append(f"{who} {verb}{surely}: {frame.format(shown)}")
        if others is found.unknown:
            reason = found.reason or "they cannot be compared token by token"
            doubts = [f"Whether {who} really {verb} is not known: {reason}."]
    return [f"{'; '.join(clauses)}.", *doubts]


def certainly(models: Sequence[ModelResult]) -> str:
    """Return the words for a significant difference; none if errors may be far too small."""
    return "" if caution(models) else " for certain"


def caution(models: Sequence[ModelResult]) -> list[str]:
    """Return the sentence that nothing is certain, if the text is short."""
    blocks = [model.blocks for model in models if model.blocks]
    if any(each.held < 2 for each in blocks):
        return ["Nothing of this is certain: no errors are known."]
    length = min((each.length for each in blocks), default=SHORT)
    return (
        [] if length >= SHORT else [f"On a text of {length:,} tokens nothing of this is certain."]
    )


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
