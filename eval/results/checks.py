"""What results that were read back must hold beyond their types, so that no table, plot or report meets what no run
writes: counts below 0, bins without edges.  ValueError in one line that names the place.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import (
    Annotated,
    Any,
    NotRequired,  # pydantic takes typing's from Python 3.12 on
)

from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from compare_q.backends.layers import groups
from compare_q.eval.results.run_result import ModelResult, Results
from compare_q.eval.stats.answers import Accuracy
from compare_q.eval.stats.distributions import PERCENTS
from compare_q.eval.stats.estimates import DIVERGENCES, AgainstReference, Estimates
from compare_q.eval.stats.uncertainty import MOST_BLOCKS

MOST = 2**53
"""Above every count; larger integers are no exact numbers in a browser."""
PERCENTILES = {"min", *(f"{percent:g}" for percent in PERCENTS), "max"}
NEVER_BELOW_0 = ("stderr", "stderr_independent", "seconds", "bpw_layer", "bpw_head", "bits")
"""How the names of numbers end that are no counts and never below 0."""
Count = Annotated[int, Field(ge=0, le=MOST)]


STRICT = with_config(ConfigDict(strict=True))


@STRICT
class Data(TypedDict, total=False):
    """What is read of a text's data."""

    text_tokens: Count | None


@STRICT
class Reference(TypedDict):
    """What is read of a reference's description."""

    label: str
    key: NotRequired[str | None]


@STRICT
class Origin(TypedDict):
    """``ORIGIN``: when, how and where a run was made."""

    created: str
    command: list[str]
    commit: str | None
    versions: dict[str, str]
    hardware: dict[str, Any]


@STRICT
class Described(TypedDict, total=False):
    """What else than numbers a run has, and a text of it."""

    data: Data
    reference: Reference | None
    origin: Origin


_DESCRIBED = TypeAdapter(Described)


def check_results(results: Results) -> None:
    """ValueError for results that no run writes, and that table, plots or report could not show."""
    names = [text.name for text in results.texts]
    if not all(names) or len(set(names)) < len(names):
        raise ValueError("texts: a text has no name, or two have one")
    if not results.labels:
        raise ValueError("texts: none has results")
    for text in results.scored:
        place = f"{text.name}: " if len(names) > 1 else ""
        labels = [model.label for model in text.models]
        if tuple(labels) != results.labels or len(set(labels)) < len(labels):
            raise ValueError(f"{place}models: two have one label, or are not those of {results.scored[0].name}")
        for model in text.models:
            check_model(model, f"{place}{model.label}")
        _DESCRIBED.validate_python({"data": text.data, "reference": text.reference})
    _DESCRIBED.validate_python({"origin": results.origin})


def check_model(model: ModelResult, label: str) -> None:
    """ValueError for a row of the table; ``label`` says which one."""
    try:
        groups.groups_from_json(model.provenance.get("layers", ()))
        groups.kv_caches_from_json(model.provenance.get("kv_cache_layers", ()))
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{label}: provenance: layers or kv_cache_layers are no groups of layers") from None
    for place, value in numbers_in(dataclasses.replace(model, spec={}, provenance={}), label):
        is_count = isinstance(value, int) and not place.endswith(".first")
        if (is_count and not 0 <= value <= MOST) or (value < 0 and place.endswith(NEVER_BELOW_0)):
            raise ValueError(f"{place}: {value} is below 0, or no count")
    if model.timing is not None and model.timing.moments != sorted(model.timing.moments):
        raise ValueError(f"{label}: timing: is not in order")
    for name, holds in going_together(model.estimates).items() if model.estimates else ():
        if not holds:
            raise ValueError(f"{label}: estimates: {name}: its numbers do not go together")


def going_together(estimates: Estimates) -> dict[str, bool]:
    """Part of a model's estimates -> whether its numbers go together."""
    blocks, curve, against, answers = estimates.blocks, estimates.curve, estimates.against, estimates.answers
    sums = {name: own for name in ("nll", "kld", "same_top") if (own := getattr(blocks, name)) is not None}
    bins = max(len(curve.edges) - 1, 0)
    return {
        "ppl": estimates.ppl.value is None or estimates.ppl.value > 0,
        "blocks": len(blocks.tokens) <= MOST_BLOCKS
        and all(len(own) == len(blocks.tokens) for own in sums.values())
        and (not blocks.whole or (sum(blocks.tokens) > 0 and set(blocks.whole) <= sums.keys())),
        "curve": all(a < b for a, b in itertools.pairwise((0, *curve.edges)))
        and all(
            own is None or len(own) == bins for own in (curve.nll, curve.kld, curve.nll_stderr, curve.kld_stderr)
        )
        and all((error or 0) >= 0 for error in (*(curve.nll_stderr or ()), *(curve.kld_stderr or ()))),
        "against": against is None or distributions_hold(against),
        "answers": answers is None or all(
            accuracy_holds(own, answers.questions) for own in (answers.acc, answers.acc_norm)
        ),
    }  # fmt: skip


def distributions_hold(against: AgainstReference) -> bool:
    """Whether percentiles are all there, and the histogram holds something within every number's reach."""
    histogram, divergences = against.kld_histogram, against.divergence_percentiles
    return (
        divergences.keys() <= set(DIVERGENCES)
        and all(not each or each.keys() == PERCENTILES for each in (against.kld_percentiles, *divergences.values()))
        and (not against.kld_percentiles or (
            against.kld.value is not None
            and sum(histogram.counts) + histogram.below + histogram.above > 0
            and 0 < histogram.per_decade <= 1000
            and abs(histogram.first) <= 300
            and len(histogram.counts) <= 300 * histogram.per_decade
        ))
    )  # fmt: skip


def accuracy_holds(found: Accuracy, questions: int) -> bool:
    """Whether there is a digit for each question, and whether shares are between 0 and 1."""
    known = found.accuracy.value is not None
    shares = [found.accuracy, *((found.flips.flips, found.flips.changed) if found.flips else ())]
    return (
        set(found.right) <= {"0", "1"}
        and len(found.right) == (questions if known else 0)
        and all(share.value is None or 0 <= share.value <= 1 for share in shares)
    )


def numbers_in(found: Any, place: str) -> Iterator[tuple[str, float]]:
    """(place, number) of every number in dataclasses, tuples and objects."""
    if dataclasses.is_dataclass(found):
        found = vars(found)
    elif isinstance(found, tuple):
        found = dict(enumerate(found))
    if isinstance(found, dict):
        for name, each in found.items():
            yield from numbers_in(each, f"{place}.{name}")
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield place, found
