"""The reference of a run: its key, the path of its store, and checks that the store is right.

A store belongs to one model, tokenizer, engine, hardware and version of the recording, and holds
windows of any text, by their digests.  In the cache, and in a folder that ``out_logits`` names, the
store's name is a key made from all of these.  At a path that the user gives, the store's identity
is checked.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...backends.common.errors import InputError, ModelError
from ...backends.common.message_text import amount, bytes_in_words
from ...backends.reference import store
from ...backends.reference.store import STORE_MANIFEST, Reader, is_free, open_reference
from ..text.eval_data import EvalData
from . import model_identity
from .claims import is_shared, short_lock
from .run_config import RunConfig
from .run_model import RunModel

RECORDING_VERSION = 5
"""Version of the recording.

A change that moves numbers, or that older code cannot read, raises it.
"""
MEANING = {
    "vocabulary": "was made with another tokenizer",
    "model": "was made by another model",
    "engine": "was made by another engine",
    "options": "was made with other engine options",
    "decode": "was made in another phase, or in other steps",
    "versions": "was made by other versions of the engine",
    "hardware": "was made on other hardware",
}
"""Entry of a store's identity -> the words of the message if a store differs in it."""


@dataclass(frozen=True)
class Reference:
    """A reference: its store, which may not exist yet, and everything that the store depends on."""

    # Hash of ``identity``; part of the keys of scores.
    key: str
    # Folder of the store, which may not exist yet.
    path: Path
    # The model's name.
    label: str
    # Everything that the store depends on.
    identity: Mapping[str, Any]
    # Fingerprint of the model that records the store; None: given without a model.
    content: str | None = None
    # The store is in a reference pack: it is not locked, extended or deleted.
    is_pack: bool = False

    @property
    def exists(self) -> bool:
        """True if a store exists; its content is not checked."""
        return (self.path / STORE_MANIFEST).is_file()

    @property
    def windows(self) -> Set[str]:
        """The digests of the windows in the store; empty if the store cannot be read."""
        with suppress(InputError):
            if self.exists:
                return open_reference(self.path).windows.keys()
        return frozenset()

    def recordings(self, windows: Set[str]) -> dict[str, str]:
        """Return the recordings of those of the ``windows`` (digests) that are in the store.

        By the windows' digests (``Reader.recording``).
        """
        with suppress(InputError):
            if self.exists:
                opened = open_reference(self.path)
                common_windows = windows & opened.windows.keys()
                return {window: opened.recording(window) for window in common_windows}
        return {}


@dataclass(frozen=True)
class RunReference:
    """The reference of the models of a run, which are all compared with the same numbers."""

    store: Reference
    # Window (digest) -> the recording that identifies the reference's numbers of this window.
    recordings: Mapping[str, str]


def reference_of_model(config: RunConfig, model: RunModel, data: EvalData) -> Reference:
    """Return the reference that a model on this machine makes.

    InputError if a path that the user gave holds another reference, or cannot be written.  A store
    under the reference's own key may be damaged: ``verify`` refuses it if scores depend on it, and
    ``config.clear`` deletes it.
    """
    files = model.files
    if files.is_store:
        return reference_of_pack(config, model, data)
    identity = {
        **model_identity.identity(config, model),
        "vocabulary": data.vocabulary,
        "reference": RECORDING_VERSION,
    }
    key = store.key_of(identity)
    path_in_cache = config.cache.path("references", key, "")
    option = "out_logits"
    path = path_in_cache
    if config.logits_file is not None:
        option = "--logits_file"
        path = config.logits_file
    elif model.out_logits is not None:
        path = model.out_logits / key
    reference = Reference(key, path, model.label, identity, files.content())
    if reference.exists:
        if config.logits_file is not None or reference.windows:
            check(open_reference(path), {"decode": None, **identity})
    elif path != path_in_cache and not is_free(path):
        raise InputError(f"{option}: {path}: holds no store of this compare_q; name another path")
    lacks_windows = not data.digests <= reference.windows
    if path != path_in_cache and (config.clear or lacks_windows):
        check_parent_is_writable(path, option)
    return reference


def check_parent_is_writable(path: Path, option: str) -> None:
    """Make the parent folder of a store; InputError if it cannot be written.

    ``option``: the flag or key that names the path.
    """
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{option}: {path.parent}: cannot be written")


def reference_of_pack(config: RunConfig, model: RunModel, data: EvalData) -> Reference:
    """Return the reference in a pack; InputError if the pack lacks windows of the run."""
    if config.logits_file is not None:
        raise InputError(
            "--logits_file: a reference pack is a store already; leave --logits_file out"
        )
    reference = reference_of_store(model.files.finished_store(), data, is_pack=True)
    return replace(reference, label=model.label, is_pack=True)


def reference_of_store(path: Path, data: EvalData, *, is_pack: bool = False) -> Reference:
    """Return the reference of a store without a model; InputError if it lacks windows of the run.

    ``is_pack``: the store is in a reference pack, which messages name.
    """
    place = str(path)
    advice = "give another path"
    fewer = "use at most -r"
    if is_pack:
        place = str(path.parent)
        pack = json.dumps(place)
        advice = (
            f'take the pack\'s own text: leave -d out, or write {{"pack": {pack}}} as the data spec'
        )
        fewer = "leave -r out, or use at most -r"
    opened = open_reference(path)
    check(opened, {"reference": RECORDING_VERSION, "vocabulary": data.vocabulary}, place, advice)
    missing = [window.index for window in data.windows if window.digest not in opened.windows]
    windows = amount(len(data.windows), "window")
    if len(missing) == len(data.windows):
        raise InputError(
            f"{place}: holds none of the run's {windows}: it was made of another text, "
            f"tokenizer, method, eval_len, eval_stride, warm-up or score_every; {advice}"
        )
    if missing:
        n_held = len(data.windows) - len(missing)
        remedy = "name a text and windows that it has"
        # The store has the first windows of the text, as a run with a smaller -r leaves it.
        if len(data.texts) == 1 and missing[0] == n_held:
            remedy = f"{fewer} {n_held}"
        raise InputError(f"{place}: holds {n_held:,} of the run's {windows}; {remedy}")
    if opened.head.vocab_size <= data.top_id:
        raise InputError(
            f"{place}: has {opened.head.vocab_size} logits, the tokenizer reaches id {data.top_id}"
        )
    identity = store.unlabelled(opened.identity)
    label = str(opened.identity.get("label", ""))
    return Reference(store.key_of(identity), path, label, identity)


def check(
    opened: Reader, expected: Mapping[str, Any], place: str = "", advice: str = "give another path"
) -> None:
    """InputError that names the first entry in which a store's identity is not as ``expected``.

    ``place``: the path in the message; empty: the store's.
    """
    for name in (*MEANING, *expected):
        if name in expected and opened.identity.get(name) != expected[name]:
            meaning = MEANING.get(name, "was made by another version of compare_q")
            raise InputError(f"{place or opened.path}: the reference {meaning}; {advice}")


def verify(config: RunConfig, reference: Reference, windows: Collection[str]) -> None:
    """Check every byte of these windows of a store, and of its head.

    InputError names a damaged file.
    """
    opened = open_reference(reference.path)
    with config.progress.phase(f"checking reference {reference.label}", unit="files") as phase:
        opened.verify(windows, config.workers.stoppable(phase).advance)


def begin(config: RunConfig, reference: Reference) -> None:
    """Prepare the folder of the store for windows.

    InputError if another run is recording another reference there.
    """
    with short_lock(config.cache, reference.path, config.workers.check):
        unfinished = store.unfinished_in(reference.path)
        is_other = unfinished and unfinished["identity"] != store.unlabelled(reference.identity)
        # What a killed run left of another reference is deleted by ``store.begin``.
        if is_other and is_shared(reference.path):
            raise InputError(
                f"{reference.path}: another run is recording another reference there; "
                "give another path"
            )
        store.begin(reference.path, reference.identity)


def tidy(config: RunConfig, reference: Reference) -> None:
    """Delete the folder of a store without any window.

    It is kept if another run is about to record windows there.
    """
    # Without a check of the run, because a run that was stopped deletes it too.
    with short_lock(config.cache, reference.path, lambda: None):
        if not is_shared(reference.path):
            store.tidy(reference.path)


def seal(config: RunConfig, reference: Reference, windows: Collection[str]) -> None:
    """Add the recorded files to the store, which then has all ``windows``; print their size."""
    with short_lock(config.cache, reference.path, config.workers.check):
        store.seal(reference.path, {**reference.identity, "label": reference.label}, windows)
    opened = open_reference(reference.path)
    label = reference.label
    mebibytes = opened.bytes_of(windows) / 1024**2
    size = f"{mebibytes:,.0f} MiB of {opened.contents}"
    config.progress.say(f"{label}: kept as the reference, {size}, in {reference.path}")
    if opened.reason:
        config.progress.say(
            f"{label}: {opened.head.dtype} logits are kept, not states: {opened.reason}"
        )


def forget(config: RunConfig, reference: Reference, windows: Collection[str]) -> None:
    """Delete these windows from the store; a store that another run or a pack uses is kept."""
    if reference.is_pack:
        return
    if reference.key in config.cache.used_by_runs(others=True) or is_shared(reference.path):
        config.progress.say(f"{reference.path}: kept, because another run uses this reference")
        return
    with short_lock(config.cache, reference.path, config.workers.check):
        store.forget(reference.path, windows)


def abandon(
    config: RunConfig,
    reference: Reference,
    windows: Collection[str],
    error: InputError | ModelError,
) -> str:
    """Delete what a run has recorded of these windows, which cannot be kept.

    Return the reason, with sizes.
    """
    needed = store.abandon(reference.path, windows) * len(windows)
    free = 0
    with suppress(OSError):
        free = shutil.disk_usage(reference.path).free
    tidy(config, reference)
    sizes = ""
    if needed:
        sizes = f"; it takes about {bytes_in_words(needed)}, and {bytes_in_words(free)} are free"
    return f"{error}{sizes}; free space or name another place"


def as_json(reference: Reference, data: EvalData) -> dict[str, Any]:
    """Return the reference for results.json, with the stored bytes per token of the windows."""
    facts: dict[str, Any] = {"label": reference.label, "key": reference.key, **reference.identity}
    if reference.content is not None:
        facts["content"] = reference.content
    # The scores may be from the cache, and the store may have been deleted since.
    with suppress(InputError):
        opened = open_reference(reference.path)
        if data.digests <= opened.windows.keys():
            n_bytes = opened.bytes_of(data.digests)
            # Equal windows of several texts are stored once.
            tokens_of_window = {window.digest: window.n_scored for window in data.windows}
            n_tokens = sum(tokens_of_window.values())
            facts |= {
                "contents": opened.contents,
                "contents_reason": opened.reason,
                "vocab_size": opened.head.vocab_size,
                "head_dtype": opened.head.dtype,
                "bytes": n_bytes,
                "bytes_a_token": round(n_bytes / n_tokens, 1),
            }
        if reference.content is None:
            # A finished store, which no run extends.
            facts["windows"] = len(opened.windows)
    return facts
