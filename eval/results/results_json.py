"""Results <-> results.json."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from backends.common import json_files, machine
from backends.common.errors import InputError
from backends.common.messages import one_line, printable, shortened, unicode
from backends.common.options import describe
from backends.layers import groups
from eval import __version__
from eval.common.files import replacing
from eval.results import beside, checks, older_formats
from eval.results.run_result import ORIGIN, ModelResult, RunResult, StoredRun
from eval.stats.answers import AnswerEstimates
from eval.stats.estimates import DIVERGENCES, AgainstReference
from eval.stats.uncertainty import Value

FORMAT = 5
"""Version of the layout of results.json.

1: perplexity of each model
2: KL divergence and same top, the reference, and the keys of the token scores in the cache
3: how the layers ran (the key "layers" of ``provenance``), the kernel and the deviations of each model
4: all estimates with their errors (``estimates``); written by compare_q 0.1 and 0.2
5: windows are called "windows" (in 4: "rows"), and the blocks of the text for the errors "blocks" (in 4: "stretches"),
   and the contents of the reference store "contents" (in 4: "kind")
"""
FORMAT_OF_TEXTS = 6
"""A run of several texts (``eval/results/texts_json.py``); a run of one text is written as format 5."""
PAYLOAD = re.compile(rb'<script type="application/json" id="payload">(.*?)</script>', re.DOTALL)
"""Where report.html holds ``{"run": results.json, "inspection": ...}``."""
NO_RESULTS = "neither a results.json nor a report.html of compare_q"
_RUN = TypeAdapter(StoredRun)


def model_json(model: ModelResult, run: RunResult) -> dict[str, Any]:
    """One model of a run for results.json."""
    return {
        **flat_json(model, run),
        "seconds": model.timing.seconds if model.timing else None,
        "timing": dataclasses.asdict(model.timing) if model.timing else None,
        "notes": list(model.notes),
        "spec": model.spec,
        "provenance": model.provenance,
        "estimates": dataclasses.asdict(model.estimates) if model.estimates else None,
    }


def flat_json(model: ModelResult, run: RunResult) -> dict[str, Any]:
    """What results.json has of a model in one value each; upstream's names where upstream has one (``vram_gb`` is GiB
    there too)."""
    return {
        "label": model.label,
        "engine": model.engine,
        "where": model.where or None,
        "kernel": groups.kernel_of(model.layers) or None,
        "deviations": "; ".join(model.deviations) or None,
        "kv_cache": model.kv_cache or None,
        "layer_bpw": model.storage.bpw_layer,
        "head_bpw": model.storage.bpw_head,
        "vram_gb": model.storage.vram_gib,
        "vram_bits": model.storage.vram_bits,
        "file_bytes": model.storage.file_bytes,
        "storage_note": model.storage.note or None,
        **flat_estimates(model),
        "reference": model.is_reference,
        "noise_floor": model.is_noise_floor,
        "windows": model.windows,
        "load_seconds": model.load_seconds,
        "score_seconds": model.score_seconds,
        "tokens_per_second": model.tokens_per_second,
        "beside": beside.words_beside(model, run) or None,
        "from_cache": model.cached,
        "error": model.error or None,
        "spec_sha256": model.spec_sha256,
        "scores_key": model.scores_key,
        "reference_key": model.reference_key or None,
    }


def flat_estimates(model: ModelResult) -> dict[str, Any]:
    """The estimates that most readers want, one key each; errors are the clustered ones but for one."""
    found = model.estimates
    ppl, kld, same_top, against = model.ppl, model.kld, model.same_top, found.against if found else None
    spread = against.kld_percentiles if against else {}
    top1, entropy, rates = (found.top1, found.entropy, found.rates) if found else (None, None, None)
    ratio, unknown = against.ln_ppl_ratio if against else None, Value(None)
    return {
        "ppl": ppl.value if ppl else None,
        "ppl_stderr": ppl.stderr if ppl else None,
        "ppl_stderr_independent": ppl.stderr_independent if ppl else None,
        "logprob_sum": ppl.logprob_sum if ppl else None,
        "tokens": ppl.tokens if ppl else None,
        "non_finite": ppl.non_finite if ppl else None,
        "ln_ppl_ratio": ratio.value if ratio else None,
        "ln_ppl_ratio_stderr": ratio.stderr if ratio else None,
        "ppl_ratio": against.ppl_ratio.value if against else None,
        "ppl_ratio_stderr": against.ppl_ratio.stderr if against else None,
        "kld": model.mean_kld,
        "kld_stderr": kld.stderr if kld else None,
        "kld_median": spread.get("50"),
        "kld_p99": spread.get("99"),
        "kld_p99.9": spread.get("99.9"),
        "kld_max": spread.get("max"),
        "kld_sum": kld.total if kld else None,
        "kld_tokens": kld.tokens if kld else None,
        "kld_non_finite": kld.non_finite if kld else None,
        "same_top": same_top.value if same_top else None,
        "same_top_stderr": same_top.stderr if same_top else None,
        "top1": top1.value if top1 else None,
        "entropy": entropy.value if entropy else None,
        "bits_per_byte": (rates.bits_per_byte if rates else unknown).value,
        "byte_perplexity": (rates.byte_perplexity if rates else unknown).value,
        "word_perplexity": (rates.word_perplexity if rates else unknown).value,
        **flat_divergences(against),
        **flat_answers(found.answers if found else None),
    }


def flat_answers(found: AnswerEstimates | None) -> dict[str, Any]:
    """Accuracy and flips, by lm-eval's two rules; None unless answers were scored."""
    flat: dict[str, Any] = {"questions": found.questions if found else None}
    for suffix, each in (("", found.acc if found else None), ("_norm", found.acc_norm if found else None)):
        accuracy, flips = each.accuracy if each else None, each.flips if each else None
        for name, share in (("acc", accuracy), ("flips", flips and flips.flips), ("changed", flips and flips.changed)):
            flat[f"{name}{suffix}"] = share.value if share else None
            flat[f"{name}{suffix}_stderr"] = share.stderr if share else None
        flat[f"flips_lost{suffix}"] = flips.lost if flips else None
        flat[f"flips_won{suffix}"] = flips.won if flips else None
        flat[f"mcnemar_p{suffix}"] = flips.mcnemar_p if flips else None
    return flat


def flat_divergences(against: AgainstReference | None) -> dict[str, Any]:
    """The means of what a run with ``--divergences`` measures, and their errors; None without it."""
    found: dict[str, Any] = {}
    for name in DIVERGENCES:
        mean = getattr(against, name, None)
        found |= {name: mean.value if mean else None, f"{name}_stderr": mean.stderr if mean else None}
    return found


def run_json(run: RunResult, command: Sequence[str]) -> dict[str, Any]:
    """results.json: everything needed to check or repeat the run; a run that was read back keeps its own ``ORIGIN``."""
    parts = run.parts if isinstance(run, StoredRun) else ()
    return {
        "format": FORMAT,
        **(run.origin if isinstance(run, StoredRun) else origin_now(command)),
        **({"parts": [dataclasses.asdict(part) for part in parts]} if parts else {}),
        "title": run.title,
        **text_json(run),
    }


def origin_now(command: Sequence[str]) -> dict[str, Any]:
    """The ``ORIGIN`` of a run that has just been made by a command line."""
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": list(map(unicode, command)),
        "commit": machine.commit(),
        "versions": {**machine.versions(), "compare-q": __version__},
        "hardware": {
            **machine.hardware(machine.gpus(), cpu_only=machine.cpu_build_of_torch()),
            **machine.threads(),
        },
    }


def text_json(run: RunResult) -> dict[str, Any]:
    """What results.json has of the text of a run, and of the models on it."""
    return {
        "data": run.data,
        "subtitle": run.subtitle,
        "reference": run.reference,
        "models": [model_json(model, run) for model in run.models],
    }


def from_json(raw: Any) -> StoredRun:
    """The run of a results.json; InputError in one line if it is of another format, or damaged."""
    if not isinstance(raw, dict) or "format" not in raw:
        raise InputError("not a results.json of compare_q")
    if raw["format"] == FORMAT_OF_TEXTS:
        raise InputError("holds several texts, which are not merged with other runs; name this file alone")
    if raw["format"] in older_formats.READABLE:
        raw = older_formats.upgraded(raw)
    elif raw["format"] != FORMAT:
        raise InputError(
            f"results of format {shortened(repr(raw['format']), 20)}, but this compare_q reads formats "
            f"{', '.join(map(str, older_formats.READABLE))}, {FORMAT} and {FORMAT_OF_TEXTS}; run compare_q again with "
            "-o (token scores in the cache are used)"
        )
    with damage_in_one_line():
        return run_of_text(raw, {key: raw[key] for key in ORIGIN}, raw.get("title"), raw.get("parts", []))


def run_of_text(raw: dict[str, Any], origin: dict[str, Any], title: Any = None, parts: Any = ()) -> StoredRun:
    """The checked run whose ``text_json`` is given; ValueError, KeyError or ValidationError if it is damaged."""
    if not (isinstance(raw.get("models"), list) and all(isinstance(model, dict) for model in raw["models"])):
        raise ValueError("models: must be a list of objects")
    run = {key: raw[key] for key in ("data", "subtitle", "reference")}
    run |= {"title": title, "parts": parts, "origin": origin}
    run |= {"models": [model_fields(model) for model in raw["models"]]}
    # Strict, as JSON: lists become tuples, and nothing else becomes anything else.
    found = _RUN.validate_json(json.dumps(run, allow_nan=False), strict=True)
    checks.check_run(found)
    return found


@contextmanager
def damage_in_one_line(where: str = "") -> Iterator[None]:
    """InputError in one line, with ``where`` before the reason, for what a block that reads results finds damaged."""
    try:
        yield
        return
    except ValidationError as error:
        reason = describe(error, ())
    except KeyError as error:
        reason = f"{error.args[0]}: missing"
    except ValueError as error:
        reason = one_line(error)
    raise InputError(f"damaged results: {where}{reason}") from None


def model_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of a ``ModelResult`` from its ``model_json``."""
    same = ("label", "engine", "windows", "load_seconds", "score_seconds", "spec", "spec_sha256", "scores_key",
            "provenance", "notes", "estimates")  # fmt: skip
    size = {"bpw_layer": raw["layer_bpw"], "bpw_head": raw["head_bpw"], "vram_bits": raw["vram_bits"]}
    return {key: raw[key] for key in same} | {
        "storage": {**size, "note": raw["storage_note"] or "", "file_bytes": raw.get("file_bytes")},
        "is_reference": raw["reference"],
        "cached": raw["from_cache"],
        "reference_key": raw.get("reference_key") or "",
        "timing": older_formats.timing(raw.get("timing")),  # older results have none
        "error": raw["error"] or "",
    }


def load(file: Path) -> tuple[StoredRun, Any]:
    """(the run, the inspection as JSON types or None) of a results.json or a report.html."""
    raw, is_report = read(file)
    try:
        return report_from_json(raw) if is_report else (from_json(raw), None)
    except InputError as error:
        raise InputError(f"{printable(file)}: {error}") from None


def read(file: Path) -> tuple[Any, bool]:
    """(the JSON in a results.json or a report.html, whether it is a report's); InputError for another file."""
    name = printable(file)
    content = json_files.read_bytes(file)
    is_object = content.lstrip().startswith(b"{")  # in which a label may hold what PAYLOAD looks for
    embedded = None if is_object else PAYLOAD.search(content)
    if embedded is None and not is_object:
        raise InputError(f"{name}: {NO_RESULTS}")
    return json_files.parsed(content if embedded is None else embedded[1], name), embedded is not None


def report_from_json(raw: Any) -> tuple[StoredRun, Any]:
    """The run of a report.html's payload and its inspection; InputError in one line."""
    if isinstance(raw, dict) and isinstance(raw.get("texts"), dict):
        return from_json(raw["texts"]), None
    if not isinstance(raw, dict) or not {"run", "inspection"} <= raw.keys():
        raise InputError(NO_RESULTS)
    run, inspection = from_json(raw["run"]), raw["inspection"]
    if raw["run"]["format"] in older_formats.READABLE:
        inspection = older_formats.upgraded_inspection(inspection)
    return run, checked_inspection(inspection, len(run.models))


def checked_inspection(inspection: Any, models: int) -> Any:
    """A report's excerpts (JSON types), which are of so many models; InputError in one line if they are damaged."""
    try:
        return checks.checked_inspection(inspection, models)
    except ValidationError as error:
        reason = describe(error, ())
    except ValueError as error:
        reason = one_line(error)
    raise InputError(f"the report's excerpts are damaged: {reason}; write it again") from None


def write_json(run: RunResult, file: Path, command: Sequence[str]) -> None:
    """Write results.json atomically."""
    with replacing(file) as part:
        part.write_text(json.dumps(run_json(run, command), indent=2, allow_nan=False) + "\n", encoding="utf-8")
