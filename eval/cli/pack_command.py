"""``pack``: record a model as a reference pack (``backends/reference/pack_files.py``).

The model is scored like the reference of any run: the windows that an interrupted run has recorded
are in the cache, and later runs can add more.  The pack is made in a hidden folder, and then
renamed (``pack_target``).
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Collection
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
from ..common.cache import Cache
from ..common.terminal import say
from ..results import ModelResult
from ..results import origin as origin_of_run
from ..run import runner, stored_scores
from ..run.run_config import RunConfig
from ..run.runner import RunOutcome
from ..run.workers import signals_interrupt
from ..specs import spec_files
from ..specs.spec_types import DataSpec, ModelSpec
from ..text import corpus, stored_tokens, tokens_cache
from ..text.eval_data import EvalData
from ..text.sampled import spec_of_sampled
from . import run_inputs
from .commands import PackCommand
from .outputs import print_errors, print_note
from .pack_target import NEW, check_replaced, existing, replace, reserved

FLOOR_LABEL = "noise floor"
PACK_WINDOWS = 64
"""Number of recorded windows, unless the command or the data spec gives one."""
LICENSES = {
    "wiki2": "cc-by-sa-3.0",
    "wikitext2": "cc-by-sa-3.0",
    "wiki103": "cc-by-sa-3.0",
    "wikitext103": "cc-by-sa-3.0",
}
"""Known data sets -> their licenses."""
PRIVATE_FACTS = ("python_path",)
"""Facts about a run that may reveal the machine's user."""


def run(command: PackCommand) -> int:
    """Record the model and make the pack; return the exit status."""
    data, models = run_inputs.specs_of(command.inputs, command.resources, stored=False)
    target = command.output
    if target is None:
        raise InputError("-o: is missing; name the folder of the pack")
    if len(data) != 1 or len(models) != 1:
        raise InputError("pack: takes one model and one text")
    model = models[0]
    text = data[0]
    if text.is_rollouts:
        raise InputError(
            text.blamed("dataset: a pack cannot hold rollouts; give the file to a run as its text")
        )
    if command.sampled:
        text = spec_of_sampled(text)
    _, engine_class = backends.resolve(model.load_fn, model.fwd_fn)
    if engine_class.files.is_store:
        raise InputError(
            f"{model.name}: is a reference pack already; name the model that it was made of"
        )
    # InputError for a target that cannot be replaced, before a folder is made next to it.
    existing(target)
    config = run_inputs.run_config(command.resources)
    with signals_interrupt(config.workers), reserved(target) as folder:
        try:
            return record_as_pack(command, config, model, text, target, folder)
        except BaseException:
            # Once the workers are stopped, no further signal interrupts the deletion of files.
            config.workers.stop()
            raise


def record_as_pack(
    command: PackCommand,
    config: RunConfig,
    model: ModelSpec,
    text: DataSpec,
    target: Path,
    folder: Path,
) -> int:
    """Score the model, make the pack in a hidden folder, and rename it.

    Returns the exit status.  ``folder``: the hidden folder of ``pack_target``.
    """
    config = recording_config(config, target)
    spec = model.model_copy(update={"reference": True, "out_logits": None})
    specs = [spec]
    if not command.no_floor:
        specs += noise_floor_specs(spec)
    texts = dict(zip(corpus.names_of([text]), [text], strict=True))
    rows = command.inputs.rows
    if rows is None and not text.max_rows:
        rows = PACK_WINDOWS
    outcome = runner.run(config, texts, specs, rows)
    if outcome.signal:
        print_note("interrupted; run again to continue")
        return 128 + outcome.signal
    row_of_label = {row.label: row for row in outcome.results.models}
    row = row_of_label[spec.name]
    if row.error:
        return print_errors(f"{spec.name}: {row.error}")
    floor_row = row_of_label.get(FLOOR_LABEL)
    reader = recorded_store(config, row, outcome, allow_logits=command.logits)
    if row.ppl is None:
        raise InputError(
            f"{row.label}: its perplexity is not a number, so that no pack is made of it"
        )
    if floor_row is not None and floor_row.error:
        print_note(f"noise floor: not measured: {floor_row.error}")
    recording = Recording(spec, text, outcome, row, floor_row, reader)
    with storage.keeping("the pack", target.absolute().parent):
        manifest = write_pack(folder / NEW, config.cache, recording)
    replace(folder, Path(os.path.abspath(target)))
    print_note(*warnings(manifest))
    say(*described(target))
    return 0


def recording_config(config: RunConfig, target: Path) -> RunConfig:
    """Return the configuration of a run that records all windows of its reference.

    Before an engine loads, it refuses a pack that may not replace the one at the target.
    """
    # Again: another process may have made a pack before this one locked the hidden folder.
    replaced_pack = existing(target)

    def check_reference(content: str | None, data: EvalData) -> None:
        if replaced_pack is not None:
            identity = identity_of(content, data)
            check_replaced(target, replaced_pack, identity, len(data.windows))

    return dataclasses.replace(config, record_all=True, check_reference=check_reference)


def identity_of(model_digest: str | None, data: EvalData) -> dict[str, str]:
    """Return what two packs must share if one replaces the other.

    These are digests of the text and of the model's files.
    """
    return {"text_digest": data.texts[0].text_digest, "model_digest": model_digest or ""}


def noise_floor_specs(spec: ModelSpec) -> list[ModelSpec]:
    """Return the model with other roundings, which measures the noise floor.

    Empty if its engine cannot add noise.
    """
    _, engine_class = backends.resolve(spec.load_fn, spec.fwd_fn)
    capabilities = engine_class.capabilities
    if not capabilities.noise:
        return []
    keys = spec.model_dump(mode="json", exclude_unset=True)
    for key in ("reference", "out_logits"):
        keys.pop(key, None)
    keys |= {
        "label": FLOOR_LABEL,
        "noise_floor": True,
        "engine": {**spec.engine, **capabilities.eager, "noise": "bf16"},
    }
    return [spec_files.parse_model_spec(keys, spec._folder / spec_files.COMMAND_LINE)]


@dataclasses.dataclass(frozen=True)
class Recording:
    """The specs, rows and reference store that a run has recorded for a pack.

    ``floor_row``: the row of the noise floor, None if it was not measured.
    """

    model: ModelSpec
    text: DataSpec
    outcome: RunOutcome
    row: ModelResult
    floor_row: ModelResult | None
    reader: store.Reader

    @property
    def data(self) -> EvalData:
        """The recorded windows."""
        return self.outcome.data


def recorded_store(
    config: RunConfig, row: ModelResult, outcome: RunOutcome, *, allow_logits: bool
) -> store.Reader:
    """Return the store that a run has recorded.

    InputError if there is none, or if it holds unrequested logits.
    """
    reference = outcome.results.reference or {}
    path = config.cache.path("references", str(reference.get("key", "")), "")
    if not (path / store.STORE_MANIFEST).is_file():
        raise InputError(f"{row.label}: was not recorded: {'; '.join(row.notes)}")
    reader = store.open_reference(path)
    size = bytes_in_words(reader.bytes_of(outcome.data.digests))
    if reader.contents == "logits" and not allow_logits:
        raise InputError(
            f"{row.label}: {reader.reason}; a pack holds its logits then, {size}; --logits makes it"
        )
    config.progress.say(f"{row.label}: {size} of {reader.contents}")
    return reader


def write_pack(folder: Path, cache: Cache, recording: Recording) -> Manifest:
    """Make the pack in a new folder from what a run has recorded, and return its manifest."""
    data = recording.data
    results = recording.outcome.results
    folder.mkdir()
    copy_store(recording.reader, folder / pack_files.STATES, data.digests)
    copy_tokenizer(data.tokenizer, folder / pack_files.TOKENIZER)
    tokens = tokens_cache.load_again(recording.text, cache, data.texts[0].tokens_key)
    stored_tokens.write_pack(folder, tokens)
    write_scores(folder, cache, recording.row, data)
    reference = results.reference or {}
    facts: dict[str, Any] = {
        **identity_of(reference.get("content"), data),
        "text": text_keys(recording.text, data),
        **facts_of(recording),
        "text_license": license_of_text(recording.text),
    }
    manifest = Manifest.model_validate({**facts, "files": {}})
    (folder / pack_files.CARD_FILE).write_text(
        card(manifest, results.subtitle, recording.reader), encoding="utf-8"
    )
    # Last: the manifest lists the other files.
    return pack_files.write_manifest(folder, **facts)


def facts_of(recording: Recording) -> dict[str, Any]:
    """Return the manifest's facts about the model and its scores."""
    row = recording.row
    data = recording.data
    name, revision, folder = origin(recording.model)
    words = []
    for word in sys.argv[1:]:
        # A path may reveal the machine's user.
        if os.path.isabs(word):
            word = os.path.basename(word)
        words.append(word)
    run_origin = origin_of_run(["compare-q", *words])
    provenance = {key: value for key, value in row.provenance.items() if key not in PRIVATE_FACTS}
    facts: dict[str, Any] = {
        "model": name,
        "revision": revision,
        "model_license": license_of(folder),
        "vocabulary": data.vocabulary,
        "windows": [window.digest for window in data.windows],
        "scored_tokens": data.n_scored,
        "engine": f"{row.engine_version or row.engine}",
        "provenance": redacted({**provenance, "where": row.where}),
        "storage": {
            "bpw_layer": row.bpw_layer,
            "bpw_head": row.bpw_head,
            "vram_bits": row.vram_bits,
            "file_bytes": row.file_bytes,
        },
        "ppl": row.ppl,
        "ppl_stderr": row.ppl_stderr,
        "floor_kld": None,
        "floor_kld_stderr": None,
        "created": run_origin["created"],
        "command": list(run_origin["command"]),
    }
    if recording.floor_row is not None:
        facts["floor_kld"] = recording.floor_row.kld
        facts["floor_kld_stderr"] = recording.floor_row.kld_stderr
    return facts


def copy_store(reader: store.Reader, target: Path, windows: Collection[str]) -> None:
    """Copy the head and some windows (digests) of a reference store."""
    target.mkdir()
    names = [reader.windows[window] for window in sorted(windows)]
    names += reader.heads.values()
    files = {}
    for name in sorted(names):
        shutil.copyfile(reader.path / name, target / name)
        files[name] = reader.manifest.files[name]
    store.write_manifest(target, reader.manifest.model_copy(update={"files": files, "made": False}))


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer, without code."""
    target.mkdir()
    for file in tokens_cache.tokenizer_files(source):
        name = file.relative_to(source)
        if file.suffix != ".py" and not name.name.endswith(".index.json"):
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target / name)


def write_scores(folder: Path, cache: Cache, row: ModelResult, data: EvalData) -> None:
    """Write the reference's own scores of every scored token.

    Users must reproduce them from the pack's states.
    """
    scores = stored_scores.scores_of_row(cache, row.scores_key, data)
    if scores is None:
        raise InputError(f"{row.label}: its scores vanished from the cache")
    digests = [window.digest for window in data.windows]
    ends = np.cumsum([window.n_scored for window in data.windows])
    pack_files.write_scores(folder, digests, ends.tolist(), scores.columns)


def text_keys(spec: DataSpec, data: EvalData) -> dict[str, Any]:
    """Return the keys of the data spec that a pack keeps.

    Of a file on this machine only the name is kept, not its folder.  The number of windows is the
    recorded one.
    """
    dropped = {"tokenizer_dir", "tokenizer_revision", "trust_remote_code", "pack", "label"}
    keys: dict[str, Any] = spec.model_dump(mode="json", exclude_unset=True, exclude=dropped)
    for key in ("path", "dataset_path"):
        path = str(keys.get(key) or "")
        if os.path.isabs(path) or path.startswith("~"):
            keys[key] = os.path.basename(keys[key])
    return keys | {"max_rows": len(data.windows)}


def origin(spec: ModelSpec) -> tuple[str, str | None, Path]:
    """Return (hub id or name, revision, folder on this machine) of the recorded model."""
    name = spec.located
    if not hub.is_hub_id(name):
        return os.path.basename(os.path.abspath(name)), spec.revision, Path(name)
    folder = hub.resolve(name, spec.revision, download=False)
    revision = spec.revision
    if folder.parent.name == "snapshots":
        revision = folder.name
    return name, revision, folder


def license_of_text(spec: DataSpec) -> str | None:
    """Return the license of a known data set; None if it is not known.

    Sampled text holds tokens of the text that its prompts are from.
    """
    name = spec.dataset
    if spec.is_sampled:
        name = spec.dataset_path or ""
    return LICENSES.get(name.lower())


def license_of(folder: Path) -> str | None:
    """Return the license in the model card of a folder; None if it is not known."""
    from huggingface_hub.repocard import metadata_load

    # A card may hold anything.
    with suppress(Exception):
        metadata = metadata_load(folder / "README.md") or {}
        return str(metadata.get("license_name") or metadata["license"])
    return None


def warnings(manifest: Manifest) -> list[str]:
    """Return warnings before a pack is published: head and tokens are other people's work."""
    lines = [
        "the pack holds the model's head (weights) and the text's tokens: publish it only if both "
        "licenses allow it"
    ]
    if not manifest.model_license:
        lines.append(f"{manifest.model}: its license is not known")
    if not manifest.text_license:
        lines.append("text: its license is not known")
    return lines


def described(folder: Path) -> list[str]:
    """Return lines about a pack, each a title and a text."""
    manifest = pack_files.read(folder)
    reader = store.open_reference(folder / pack_files.STATES)
    facts = {
        "contents": reader.contents,
        "bytes": reader.stored_bytes,
        "text": pack_files.title_of_text(manifest),
    }
    lines = []
    for title, text in pack_files.facts_in_words(manifest, facts):
        lines.append(printable(f"  {title:12} {text}"))
    return lines


def card(manifest: Manifest, subtitle: str, reader: store.Reader) -> str:
    """Return the dataset card of a pack, in Markdown."""
    from huggingface_hub import DatasetCardData

    # Only an id of the hub: other names are of folders.
    base_model = None
    if "/" in manifest.model:
        base_model = manifest.model
    card_metadata = DatasetCardData(
        license=manifest.model_license or "unknown",
        tags=["compare-q", "reference-pack"],
        pretty_name=f"Reference pack of {manifest.model}",
        base_model=base_model,
    )
    lines = [
        "---",
        card_metadata.to_yaml(),
        "---",
        "",
        f"# Reference pack of {manifest.model}",
        "",
        "What is needed to measure the KL divergence of a quantized model from this reference "
        "without running it.",
        "",
        "    compare-q PACK MODEL...",
        "",
        "| | |",
        "|---|---|",
    ]
    facts = {"contents": reader.contents, "bytes": reader.stored_bytes, "text": subtitle}
    for title, text in pack_files.facts_in_words(manifest, facts):
        lines.append(f"| {title} | {text} |")
    lines.append("")
    return "\n".join(lines)
