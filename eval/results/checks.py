"""What results that were read back must hold beyond their types, so that no table, plot or report meets what no run
writes: counts below 0, bins without edges, passages of other models.  ValueError in one line that names the place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from compare_q.backends.layers import groups
from compare_q.eval.results.run_result import SAME_AS, ModelResult, Results, TextResult
from compare_q.eval.stats.answers import AnswerEstimates
from compare_q.eval.stats.distributions import PERCENTS
from compare_q.eval.stats.estimates import DIVERGENCES, Estimates
from compare_q.eval.stats.uncertainty import MOST_BLOCKS

MOST = 2**53
"""Above every count; larger integers are no exact numbers in a browser."""
PERCENTILES = {"min", *(f"{percent:g}" for percent in PERCENTS), "max"}
SCORES = ("nll", "kld", "same_top")
Numbers = list[float | None]


class Damaged(TypedDict):
    """One damaged token of a report (``eval/html/inspector.py``)."""

    window: int
    position: int
    before: str
    token: str
    after: str
    ref_logprob: float | None
    logprob: float | None
    kld: float | None


class Passage(TypedDict):
    """One passage of a report."""

    window: int
    position: int
    tokens: list[str]
    ref_logprob: Numbers | None
    logprob: list[Numbers | None]
    kld: list[Numbers | None]
    chosen: str


@with_config(ConfigDict(strict=True))
class Inspection(TypedDict):
    """A report's excerpts of the text."""

    passages: list[Passage]
    worst: list[list[Damaged] | None]


_INSPECTION = TypeAdapter(Inspection)


def check_results(results: Results) -> None:
    """ValueError for results that no run writes, and that table, plots or report could not show."""
    names = [text.name for text in results.texts]
    if len(set(names)) < len(names):
        raise ValueError("texts: two have one name")
    if not results.scored:
        raise ValueError("texts: none has results")
    if results.parts and len(results.texts) > 1:
        raise ValueError("parts: only runs of one text are merged")
    for text in results.texts:
        place = f"{text.name}: " if len(names) > 1 else ""
        if not text.name:
            raise ValueError("texts: a text has no name")
        if not text.error:
            check_text(text, place)
            if tuple(model.label for model in text.models) != results.labels:
                raise ValueError(f"{place}models: are not the models of {results.scored[0].name}")
    for reference in (part.reference for part in results.parts):
        check_reference(reference)
    for origin in (results.origin or {}, *(part.origin for part in results.parts)):
        check_origin(origin)


def check_text(text: TextResult, place: str) -> None:
    """ValueError for the results of a text that no run writes; ``place``: what stands before the reason."""
    labels = [model.label for model in text.models]
    if not labels or len(set(labels)) < len(labels):
        raise ValueError(f"{place}no models" if not labels else f"{place}models with one label")
    for model in text.models:
        check_model(model, f"{place}{model.label}")
    if not is_count(text.data.get("text_tokens")):
        raise ValueError(f"{place}data: text_tokens is no number of tokens")
    check_reference(text.reference, place)


def check_reference(reference: dict[str, Any] | None, place: str = "") -> None:
    """ValueError for a reference that no table could name."""
    if reference is None:
        return
    if not isinstance(reference.get("label"), str):
        raise ValueError(f"{place}reference: has no label")
    for key in ("key", SAME_AS):
        if not isinstance(reference.get(key), str | None):
            raise ValueError(f"{place}reference: {key} is no text")


def check_origin(origin: dict[str, Any]) -> None:
    """ValueError for an origin with which runs could not be merged nor footnotes written."""
    for name, wanted in (("versions", dict), ("hardware", dict), ("created", str), ("commit", str | None)):
        if not isinstance(origin.get(name), wanted):
            raise ValueError(f"{name}: is of another type")
    if not all(isinstance(version, str) for version in origin["versions"].values()):
        raise ValueError("versions: is no object of texts")


def check_model(model: ModelResult, label: str) -> None:
    """ValueError for a row of the table; ``label`` says which one."""
    for name, read in (("layers", groups.groups_from_json), ("kv_cache_layers", groups.kv_caches_from_json)):
        try:
            read(model.provenance.get(name, ()))
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{label}: provenance.{name}: are no groups of layers") from None
    rest = dataclasses.replace(model, spec={}, provenance={})
    for place, value in numbers_in(rest, label):
        if isinstance(value, int) and not place.endswith(".first") and not is_count(value):
            raise ValueError(f"{place}: {value} is no count")
        if value < 0 and place.endswith(("stderr", "stderr_independent", "seconds", "bpw_layer", "bpw_head", "bits")):
            raise ValueError(f"{place}: {value} is below 0")
    if model.timing is not None and model.timing.moments != sorted(model.timing.moments):
        raise ValueError(f"{label}: timing: is not in order")
    if model.estimates is not None:
        check_estimates(model.estimates, label)


def check_estimates(found: Estimates, label: str) -> None:
    """ValueError for estimates that do not go together."""
    blocks, curve = found.blocks, found.curve
    if len(blocks.tokens) > MOST_BLOCKS:
        raise ValueError(f"{label}: more than {MOST_BLOCKS} blocks")
    sums = {name: getattr(blocks, name) for name in SCORES}
    if any(each is not None and len(each) != len(blocks.tokens) for each in sums.values()):
        raise ValueError(f"{label}: blocks: not a sum for each block")
    if any(sums.get(name) is None for name in blocks.whole) or (blocks.whole and not sum(blocks.tokens)):
        raise ValueError(f"{label}: blocks.whole: names what is not there")
    if list(curve.edges) != sorted(set(curve.edges)) or (curve.edges and curve.edges[0] < 1):
        raise ValueError(f"{label}: curve.edges: are no positions in order")
    if any(each is not None and len(each) != max(len(curve.edges) - 1, 0) for each in (curve.nll, curve.kld)):
        raise ValueError(f"{label}: curve: not a mean for each bin")
    if found.ppl.value is not None and found.ppl.value <= 0:
        raise ValueError(f"{label}: ppl: is not above 0")
    if found.answers is not None:
        check_answers(found.answers, label)
    if found.against is not None and found.against.kld_percentiles:
        histogram = found.against.kld_histogram
        if found.against.kld_percentiles.keys() != PERCENTILES or found.against.kld.value is None:
            raise ValueError(f"{label}: kld_percentiles: some are missing")
        if not (sum(histogram.counts) + histogram.below + histogram.above) or not 0 < histogram.per_decade <= 1000:
            raise ValueError(f"{label}: kld_histogram: holds nothing")
        if abs(histogram.first) > 300 or len(histogram.counts) > 300 * histogram.per_decade:
            raise ValueError(f"{label}: kld_histogram: reaches beyond every number")
    if found.against is not None:
        for name, percentiles in found.against.divergence_percentiles.items():
            if name not in DIVERGENCES or (percentiles and percentiles.keys() != PERCENTILES):
                raise ValueError(f"{label}: divergence_percentiles: some are missing, or of an unknown divergence")


def check_answers(found: AnswerEstimates, label: str) -> None:
    """ValueError for accuracies that do not go with their questions."""
    for name, each in (("acc", found.acc), ("acc_norm", found.acc_norm)):
        known = each.accuracy.value is not None
        if set(each.right) - {"0", "1"} or len(each.right) != (found.questions if known else 0):
            raise ValueError(f"{label}: answers.{name}.right: not a digit for each question")
        shares = [each.accuracy.value, *([each.flips.flips.value, each.flips.changed.value] if each.flips else [])]
        if any(share is not None and not 0 <= share <= 1 for share in shares):
            raise ValueError(f"{label}: answers.{name}: a share is not between 0 and 1")


def numbers_in(found: Any, place: str) -> Iterator[tuple[str, float]]:
    """(place, number) of every number in dataclasses, tuples and objects."""
    items: Sequence[tuple[Any, Any]] = ()
    if dataclasses.is_dataclass(found):
        items = [(field.name, getattr(found, field.name)) for field in dataclasses.fields(found)]
    elif isinstance(found, dict):
        items = list(found.items())
    elif isinstance(found, tuple):
        items = list(enumerate(found))
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield place, found
    for name, each in items:
        yield from numbers_in(each, f"{place}.{name}")


def is_count(value: Any) -> bool:
    """Whether a value is a count, or None."""
    return value is None or (type(value) is int and 0 <= value <= MOST)


def checked_inspection(found: Any, models: int) -> Any:
    """A report's excerpts as they are; ValueError unless they are of so many models."""
    if found is None:
        return None
    inspection = _INSPECTION.validate_python(found)
    if len(inspection["worst"]) != models:
        raise ValueError("worst: is of other models")
    for passage in inspection["passages"]:
        columns = [passage["ref_logprob"], *passage["logprob"], *passage["kld"]]
        if len(passage["logprob"]) != models or len(passage["kld"]) != models:
            raise ValueError("passages: are of other models")
        if any(column is not None and len(column) != len(passage["tokens"]) for column in columns):
            raise ValueError("passages: not a score for each token")
    return found
