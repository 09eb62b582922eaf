"""The results of several texts -> what their plot shows of each model."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from eval.plots import measures
from eval.plots.measures import ACCURACIES, BPW, FILES, KLD, PPL, VRAM, Measure, Size
from eval.results.run_result import ModelResult, Results, macro_mean
from eval.stats.estimates import n_blocks
from eval.stats.uncertainty import Value, interval_95, n_waves
from eval.table import columns

MOST_NOTES = 6
"""Values that are named as missing; of more their number is told."""
NORMAL = statistics.NormalDist().inv_cdf(0.975)
UNITS = {BPW: "bpw", VRAM: "GiB", FILES: "GB"}


@dataclass(frozen=True)
class Spot:
    """A model's value for text number ``text``, its standard error and its 95 % interval where these are known."""

    text: int
    value: float
    error: float | None
    limits: tuple[float, float] | None


@dataclass(frozen=True)
class Row:
    """One model: its size in words, its macro mean, and what is known of its texts, one spot at least."""

    label: str
    group: str
    size: str
    mean: Value
    spots: tuple[Spot, ...]
    more: bool = False

    @property
    def place(self) -> tuple[int, float, str]:
        """Rows are sorted by this: by macro mean, and below these the rows of which texts are missing."""
        known = statistics.fmean(spot.value for spot in self.spots) if self.mean.value is None else self.mean.value
        return -len(self.spots), -known if self.more else known, self.label


def chosen(result: Results, kind: str | None) -> Measure:
    """What ``-kld``, ``-ppl`` and ``-acc`` ask for; None: KLD where a model has one that is not 0, accuracy if all
    texts are answers, and else PPL."""
    if kind in ACCURACIES or (kind is None and result.scored and all(map(measures.has_answers, result.scored))):
        return ACCURACIES[kind or "acc"]
    if kind is None:
        return KLD if any(model.mean_kld for text in result.scored for model in text.models) else PPL
    return KLD if kind == "kld" else PPL


def rows_of(result: Results, measure: Measure, size: Size | None) -> list[Row]:
    """The models that have a value, in a plot of KLD without the reference."""
    found = []
    for label in result.labels:
        models = [model for model in result.of_label(label) if model is not None]
        spots = spots_of(result, label, measure)
        if spots:
            marked = next((model for model in models if model.deviations), models[0])
            words = next(filter(None, (size_words(model, size) for model in models)), "")
            shown = mean_of(result, label, measure)
            found.append(Row(columns.label_of(marked), marked.group, words, shown, tuple(spots), measure.more))
    return found


def mean_of(result: Results, label: str, measure: Measure) -> Value:
    """A model's mean over the texts, of accuracy over the texts of answers; unknown unless each of them has a value."""
    if not measure.more:
        return result.mean_kld(label) if measure.kld else paired_mean(result, label)
    asked = [
        (text, model)
        for text, model in zip(result.texts, result.of_label(label), strict=True)
        if text.error or measures.has_answers(text)
    ]
    values = [measure.of(model) if model else None for _, model in asked]
    errors = [measures.error_of(text, model, measure)[0] if model else None for text, model in asked]
    return macro_mean(values, errors)


def paired_mean(result: Results, label: str) -> Value:
    """The geometric mean of a model's perplexities, with the error of its ratio to the reference's if that is known."""
    errors = [
        measures.ppl_error(text, model)[0] if model else None
        for text, model in zip(result.texts, result.of_label(label), strict=True)
    ]
    ppls = [model.ppl.value if model and model.ppl else None for model in result.of_label(label)]
    relative = [error / ppl if error and ppl else None for error, ppl in zip(errors, ppls, strict=True)]
    logs = [math.log(ppl) if ppl else None for ppl in ppls]
    mean, stderr = result.mean_ppl(label).value, macro_mean(logs, relative).stderr
    return Value(mean, None if mean is None or stderr is None else mean * stderr)


def spots_of(result: Results, label: str, measure: Measure) -> list[Spot]:
    """What is known of a model, text by text, with the errors that ``measures.error_of`` gives."""
    spots = []
    for i, (text, model) in enumerate(zip(result.texts, result.of_label(label), strict=True)):
        value = None if model is None or left_out(model, measure) else measure.of(model)
        if model is not None and value is not None and math.isfinite(value):
            error = measures.error_of(text, model, measure)[0]
            spots.append(Spot(i, value, error, limits_of(model, value, error, measure)))
    return spots


def left_out(model: ModelResult, measure: Measure) -> bool:
    """Whether a model has no marker by definition: the reference in a plot of KLD."""
    return measure.kld and model.is_reference and not model.error


def limits_of(model: ModelResult, value: float, error: float | None, measure: Measure) -> tuple[float, float] | None:
    """The 95 % interval of a value of a model with this standard error; None if it is not known."""
    if error and measure.more:  # of many independent questions
        return value - NORMAL * error, value + NORMAL * error
    blocks = model.estimates.blocks if model.estimates else None
    if not error or blocks is None or n_blocks(blocks) < 2:
        return None
    return interval_95(value, error, n_waves(n_blocks(blocks), blocks.length))


def size_words(model: ModelResult, size: Size | None) -> str:
    """The size as it stands beside the label; empty if it is not known."""
    for each in (BPW, FILES) if size is None else (size,):
        if (value := each.of(model.storage)) is not None:
            return f"{value:.2f} {UNITS[each]}"
    return ""


def floor_of(result: Results) -> tuple[str, float] | None:
    """Label and macro mean of the KLD of the noise floor."""
    for text in result.scored:
        if text.noise_floor is not None:
            mean = result.mean_kld(text.noise_floor.label).value
            return None if mean is None or mean <= 0 else (text.noise_floor.label, mean)
    return None


def missing_note(result: Results, measure: Measure, *, reasons: bool) -> str:
    """What the plot cannot show, and why: texts that failed, models, and values of one text."""
    missing = [(text.name, text.error) for text in result.texts if text.error]
    kept = []
    for text in result.texts:
        if text.error or (measure.more and not measures.has_answers(text)):
            continue
        if measure.kld and text.reference is None and not any(model.mean_kld for model in text.models):
            missing.append((text.name, "no reference"))
        else:
            kept.append(text.name)
    for label in result.labels:
        gone = [
            (text.name, model.error or f"{measure.name} not known")
            for text, model in zip(result.texts, result.of_label(label), strict=True)
            if text.name in kept and model and not left_out(model, measure) and measure.of(model) is None
        ]
        alike = len(gone) == len(kept) and len({reason for _, reason in gone}) == 1
        missing += [(label, gone[0][1])] if alike else [(f"{label} on {name}", reason) for name, reason in gone]
    if not missing:
        return ""
    words = [f"{name} ({reason})" if reasons else name for name, reason in missing[:MOST_NOTES]]
    more = f"; and {len(missing) - MOST_NOTES} more" if len(missing) > MOST_NOTES else ""
    return f"n/a: {'; '.join(words)}{more}"
