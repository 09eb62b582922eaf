"""``pack``: record a model as a reference pack (``backends/reference/pack_files.py``).

The model is scored like the reference of any run: the windows that an interrupted run has recorded
are in the cache, and later runs can add more.  The pack is made in a hidden folder, and then
renamed (``pack_target``).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ... import backends
from ...backends import hub
from ...backends.common import storage
from ...backends.common.errors import InputError
from ...backends.common.message_text import bytes_in_words, printable, redacted
from ...backends.reference import pack_files, store
from ...backends.reference.pack_files import Manifest
from ..common.terminal import say
from ..results import ModelResult
from ..results import origin as origin_of_run
from ..run import runner, token_scores
from ..run.run_config import RunConfig
from ..run.runner import RunOutcome
from ..run.workers import signals_interrupt
from ..specs import spec_files
from ..specs.spec_types import DataSpec, ModelSpec
from ..text import corpus, text_tokens, text_windows
from ..text.eval_data import EvalData
from . import run_inputs
from .outputs import print_errors, print_note
from .pack_target import NEW, check_replaced, existing, replace, reserved

FLOOR = "noise floor"
WINDOWS = 64
"""Number of recorded windows, unless the command or the data spec gives one."""
LICENSES = dict.fromkeys(("wiki2", "wikitext2", "wiki103", "wikitext103"), "cc-by-sa-3.0")
"""Known data sets -> their licenses."""
PRIVATE = ("python_path",)
"""Facts about a run that may reveal the machine's user."""


def run(args: argparse.Namespace) -> int:
    """Record the model and make the pack; return the exit status."""
    data, models = run_inputs.specs_of(args)
    target = args.output
    if target is None:
        raise InputError("-o: is missing; name the folder of the pack")
    if len(data) != 1 or len(models) != 1:
        raise InputError("pack: takes one model and one text")
    if backends.resolve(models[0].load_fn, models[0].fwd_fn)[1].files.is_store:
        raise InputError(
            f"{models[0].name}: is a reference pack already; name the model that it was made of"
        )
    existing(target)  # refused before a folder is made next to it
    config = run_inputs.run_config(args)
    config.record_all = True
    with signals_interrupt(config.workers), reserved(target) as folder:
        try:
            return recorded_as_pack(args, config, models[0], data[0], folder)
        except BaseException:
            # ignores further signals, which could interrupt the deletion of files
            config.workers.stop()
            raise


def recorded_as_pack(
    args: argparse.Namespace, config: RunConfig, model: ModelSpec, text: DataSpec, folder: Path
) -> int:
    """Score the model, and make the pack in a hidden folder (``pack_target``); return the exit
    status.
    """
    replaced = existing(args.output)
    spec = model.model_copy(update={"reference": True, "out_logits": None})
    specs = [spec]
    if not args.no_floor:
        specs += noisy(spec)

    def check(content: str | None, data: EvalData) -> None:
        if replaced is not None:
            check_replaced(args.output, replaced, identity_of(content, data), len(data.windows))

    config.check_reference = check
    names = dict(zip(corpus.names_of([text]), [text], strict=True))
    rows = WINDOWS
    if args.rows is not None or text.max_rows:
        rows = args.rows
    done = runner.run(config, names, specs, rows)
    if done.signal:
        print_note("interrupted; run again to continue")
        return 128 + done.signal
    row_of = {row.label: row for row in done.results.models}
    problem = row_of[spec.name].error
    if problem:
        return print_errors(f"{spec.name}: {problem}")
    manifest = made(args, config, spec, text, done, row_of, folder / NEW)
    replace(folder, Path(os.path.abspath(args.output)))
    print_note(*warnings(manifest))
    say(*described(args.output))
    return 0


def identity_of(model_digest: str | None, data: EvalData) -> dict[str, str]:
    """Return what two packs must share if one replaces the other: digests of the text and of the
    model's files.
    """
    return {"text_digest": data.texts[0].series, "model_digest": model_digest or ""}


def noisy(spec: ModelSpec) -> list[ModelSpec]:
    """Return the model with other roundings, which measures the noise floor; empty if its engine
    cannot add noise.
    """
    capabilities = backends.resolve(spec.load_fn, spec.fwd_fn)[1].capabilities
    if not capabilities.noise:
        return []
    keys = spec.model_dump(mode="json", exclude_unset=True) | {"label": FLOOR, "noise_floor": True}
    engine = {**spec.engine, **capabilities.eager, "noise": "bf16"}
    copy = {key: value for key, value in keys.items() if key not in ("reference", "out_logits")} | {
        "engine": engine
    }
    return [spec_files.parse_model_spec(copy, spec._folder / spec_files.COMMAND_LINE)]


def made(
    args: argparse.Namespace,
    config: RunConfig,
    spec: ModelSpec,
    data_spec: DataSpec,
    done: RunOutcome,
    rows: Mapping[str, ModelResult],
    place: Path,
) -> Manifest:
    """Make the pack in a new folder from what a run has recorded, and return its manifest."""
    row = rows[spec.name]
    noise = rows.get(FLOOR)
    data = done.data
    reference = done.results.reference or {}
    opened = recorded(config, row, str(reference.get("key", "")), data, logits=args.logits)
    if row.ppl is None:
        raise InputError(
            f"{row.label}: its perplexity is not a number, so that no pack is made of it"
        )
    if noise is not None and noise.error:
        print_note(f"noise floor: not measured: {noise.error}")
    with storage.keeping("the pack", args.output.absolute().parent):
        place.mkdir()
        copy_store(opened, place / pack_files.STATES, data.digests)
        copy_tokenizer(data.tokenizer, place / pack_files.TOKENIZER)
        text_tokens.write_pack(place, text_windows.tokens_of(data_spec, config.cache))
        write_scores(config, row, data, place)
        identity = identity_of(reference.get("content"), data)
        facts = {**identity, "text": text_keys(data_spec, data), **facts_of(spec, row, noise, data)}
        facts["text_license"] = LICENSES.get(data_spec.dataset.lower())
        shown = Manifest.model_validate({**facts, "files": {}})
        (place / pack_files.CARD).write_text(
            card(shown, done.results.subtitle, opened), encoding="utf-8"
        )
        return pack_files.write_manifest(place, **facts)


def recorded(
    config: RunConfig, row: ModelResult, key: str, data: EvalData, *, logits: bool
) -> store.Reader:
    """Return the store that a run has recorded; InputError if there is none, or it holds
    unrequested logits.
    """
    path = config.cache.path("references", key, "")
    if not (path / store.MANIFEST).is_file():
        raise InputError(f"{row.label}: was not recorded: {'; '.join(row.notes)}")
    opened = store.open_reference(path)
    size = bytes_in_words(opened.bytes_of(data.digests))
    if opened.contents == "logits" and not logits:
        raise InputError(
            f"{row.label}: {opened.reason}; a pack holds its logits then, {size}; --logits makes it"
        )
    config.progress.say(f"{row.label}: {size} of {opened.contents}")
    return opened


def facts_of(
    spec: ModelSpec, row: ModelResult, noise: ModelResult | None, data: EvalData
) -> dict[str, Any]:
    """Return the manifest's facts about the model and its scores."""
    name, revision, folder = origin(spec)
    words = [os.path.basename(word) if os.path.isabs(word) else word for word in sys.argv[1:]]
    now = origin_of_run(["compare-q", *words])
    provenance = {key: value for key, value in row.provenance.items() if key not in PRIVATE}
    return {
        "model": name,
        "revision": revision,
        "model_license": license_of(folder),
        "vocabulary": data.vocabulary,
        "windows": [window.digest for window in data.windows],
        "scored_tokens": data.n_scored,
        "engine": f"{row.engine_version or row.engine}",
        "provenance": redacted({**provenance, "where": row.where}),
        "storage": {
            key: getattr(row, key) for key in ("bpw_layer", "bpw_head", "vram_bits", "file_bytes")
        },
        "ppl": row.ppl,
        "ppl_stderr": row.ppl_stderr,
        "floor_kld": None if noise is None else noise.kld,
        "floor_kld_stderr": None if noise is None else noise.kld_stderr,
        "created": now["created"],
        "command": list(now["command"]),
    }


def copy_store(opened: store.Reader, target: Path, windows: Collection[str]) -> None:
    """Copy the head and some windows (digests) of a reference store."""
    target.mkdir()
    names = [opened.windows[window] for window in sorted(windows)]
    names += opened.heads.values()
    files = {}
    for name in sorted(names):
        shutil.copyfile(opened.path / name, target / name)
        files[name] = opened.manifest.files[name]
    store.write_manifest(target, opened.manifest.model_copy(update={"files": files, "made": False}))


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer, without code."""
    target.mkdir()
    for file in text_windows.tokenizer_files(source):
        name = file.relative_to(source)
        if file.suffix != ".py" and not name.name.endswith(".index.json"):
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target / name)


def write_scores(config: RunConfig, row: ModelResult, data: EvalData, folder: Path) -> None:
    """Write the reference's own scores of every scored token, which users must reproduce from the
    pack's states.
    """
    stored = token_scores.of_row(config.cache, row.scores_key, data)
    if stored is None:
        raise InputError(f"{row.label}: its scores vanished from the cache")
    ends = np.cumsum([window.n_scored for window in data.windows])
    pack_files.write_scores(
        folder, [window.digest for window in data.windows], ends.tolist(), stored.columns
    )


def text_keys(spec: DataSpec, data: EvalData) -> dict[str, Any]:
    """Return the keys of the data spec that a pack keeps: paths without their folders, and what was
    recorded.
    """
    dropped = {"tokenizer_dir", "tokenizer_revision", "trust_remote_code", "pack", "label"}
    keys: dict[str, Any] = spec.model_dump(mode="json", exclude_unset=True, exclude=dropped)
    for key in ("path", "dataset_path"):
        if os.path.isabs(str(keys.get(key) or "")) or str(keys.get(key) or "").startswith("~"):
            keys[key] = os.path.basename(keys[key])
    return keys | {"max_rows": len(data.windows)}


def origin(spec: ModelSpec) -> tuple[str, str | None, Path]:
    """Return (hub id or name, revision, folder on this machine) of the recorded model."""
    name, revision = spec.located, spec.revision
    if not hub.is_hub_id(name):
        return os.path.basename(os.path.abspath(name)), revision, Path(name)
    folder = hub.resolve(name, revision, download=False)
    return name, folder.name if folder.parent.name == "snapshots" else revision, folder


def license_of(folder: Path) -> str | None:
    """Return the license in the model card of a folder; None if it is not known."""
    from huggingface_hub.repocard import metadata_load

    with suppress(Exception):  # a card may hold anything
        found = metadata_load(folder / "README.md") or {}
        return str(found.get("license_name") or found["license"])
    return None


def warnings(manifest: Manifest) -> list[str]:
    """Return warnings before a pack is published: the head and the tokens are other people's work."""
    said = [
        "the pack holds the model's head (weights) and the text's tokens: publish it only if both licenses allow it"
    ]
    said += [] if manifest.model_license else [f"{manifest.model}: its license is not known"]
    return said + ([] if manifest.text_license else ["text: its license is not known"])


def described(folder: Path) -> list[str]:
    """Return lines about a pack, each a title and a text."""
    manifest, opened = pack_files.read(folder), store.open_reference(folder / pack_files.STATES)
    facts = {
        "contents": opened.contents,
        "bytes": opened.stored_bytes,
        "text": pack_files.title_of_text(manifest),
    }
    return [
        printable(f"  {title:12} {words}")
        for title, words in pack_files.facts_in_words(manifest, facts)
    ]


def card(manifest: Manifest, subtitle: str, opened: store.Reader) -> str:
    """Return the dataset card of a pack, in Markdown."""
    from huggingface_hub import DatasetCardData

    head = DatasetCardData(
        license=manifest.model_license or "unknown",
        tags=["compare-q", "reference-pack"],
        pretty_name=f"Reference pack of {manifest.model}",
        base_model=manifest.model if "/" in manifest.model else None,
    ).to_yaml()
    facts = {"contents": opened.contents, "bytes": opened.stored_bytes, "text": subtitle}
    lines = [
        f"| {title} | {words} |" for title, words in pack_files.facts_in_words(manifest, facts)
    ]
    return "\n".join(
        [
            "---",
            head,
            "---",
            "",
            f"# Reference pack of {manifest.model}",
            "",
            "What is needed to measure the KL divergence of a quantized model from this reference without running it.",
            "",
            "    compare-q PACK MODEL...",
            "",
            "| | |",
            "|---|---|",
            *lines,
            "",
        ]
    )
