"""The reference of a text: its key, the path of its store, and checks that the store is right and complete.

A store belongs to one text, tokenizer, set of windows, model, engine and version of the recording.  In the cache, and
in a folder that ``out_logits`` names, the store's name is a key made from all of these.  At a path that the user gives,
the store's identity is checked.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compare_q import backends
from compare_q.backends.base import PlannedModel
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.common.messages import amount, bytes_in_words
from compare_q.backends.reference import store
from compare_q.backends.reference.store import MANIFEST, Reader, is_free, open_reference
from compare_q.eval.common.cache import Cache
from compare_q.eval.run import plan
from compare_q.eval.run.config import RunConfig
from compare_q.eval.text.windows import EvalData

RECORDING_VERSION = 4
"""Version of the recording; a change that moves numbers, or that older code cannot read, raises it."""
MEANING = {
    "vocabulary": "was made with another tokenizer",
    "series": "was made of other windows: another text, method, eval_len, eval_stride, warm-up or score_every",
    "model": "was made by another model",
    "engine": "was made by another engine",
    "options": "was made with other engine options",
    "decode": "was made in another phase, or in other steps",
    "versions": "was made by other versions of the engine",
    "hardware": "was made on other hardware",
}


@dataclass(frozen=True)
class Reference:
    """The reference of a text; the other models are compared with it."""

    key: str  # hash of ``identity``; part of the keys of scores
    path: Path  # folder of the store, which may not exist yet
    label: str  # the model's name
    identity: Mapping[str, Any]  # everything that the store depends on
    content: str | None = None  # fingerprint of the model that records the store; None: given without a model
    is_pack: bool = False  # the store is in a reference pack: it is not locked, extended or deleted

    @property
    def exists(self) -> bool:
        """True if a store exists; its content is not checked."""
        return (self.path / MANIFEST).is_file()

    def has(self, n_windows: int) -> bool:
        """Return whether a store exists that has the first ``n_windows`` windows; False if its manifest is damaged."""
        with suppress(InputError):
            return self.exists and open_reference(self.path).n_windows >= n_windows
        return False

    @property
    def lock_file(self) -> Path:
        """The file of the lock that is held while the store is made, checked or deleted.

        It is next to the store, because runs with other caches may share the store.
        """
        folder, name = os.path.split(os.path.abspath(self.path))
        return Path(folder, f"{name}.lock" if name == self.key else f".{name}.lock")


def of_model(config: RunConfig, model: PlannedModel, text: EvalData) -> Reference:
    """Return the reference of a text that a model on this machine makes.

    InputError if a path that the user gave holds another reference, or cannot be written.  A store under the
    reference's own key may be damaged: ``verify`` refuses it if scores depend on it, and ``config.clear`` deletes it.
    """
    if backends.files_of(model).is_store:
        return of_pack(config, model, text)
    identity = {
        **plan.identity(config, model, text), "vocabulary": text.vocabulary, "reference": RECORDING_VERSION,
    }  # fmt: skip
    key, given = Cache.key("reference", identity), config.logits_file
    in_cache = config.cache.path("references", key, "")
    path = given or (model.out_logits / key if model.out_logits else in_cache)
    found = Reference(key, path, model.label, identity, backends.files_of(model).content())
    option = "out_logits" if given is None else "--logits_file"
    if found.exists and (given is not None or (not config.clear and found.has(0))):
        check(open_reference(path), {"decode": None, **identity})
    elif not found.exists and path != in_cache and not is_free(path):
        raise InputError(f"{option}: {path}: holds no store of this compare_q; name another path")
    if path != in_cache and (config.clear or not found.has(len(text.windows))):
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise InputError(f"{option}: {path.parent}: cannot be written")
    return found


def of_pack(config: RunConfig, model: PlannedModel, text: EvalData) -> Reference:
    """Return the reference of a text in a pack; InputError if the pack is of another text, or has fewer windows."""
    if config.logits_file is not None:
        raise InputError("--logits_file: a reference pack is a store already; leave --logits_file out")
    path = backends.files_of(model).finished_store()
    found = of_store(config, path, text)
    key = Cache.key("reference", {**found.identity, "files": sorted(open_reference(path).manifest.files)})
    return replace(found, key=key, label=model.label, is_pack=True)


def of_store(config: RunConfig, path: Path, text: EvalData) -> Reference:
    """Return the reference of a store without a model; InputError if it is the store of another text."""
    opened = open_reference(path)
    check(opened, {"series": text.series, "vocabulary": text.vocabulary, "reference": RECORDING_VERSION})
    if (count := opened.n_windows) < len(text.windows):
        raise InputError(
            f"{path}: has {amount(count, 'window')}, window {count} of {len(text.windows)} is missing; use -r {count}"
        )
    if opened.head.vocab_size <= text.top_id:
        raise InputError(f"{path}: has {opened.head.vocab_size} logits, the tokenizer reaches id {text.top_id}")
    identity = store.unlabelled(opened.identity)
    key = Cache.key("reference", identity)
    return Reference(key, path, opened.identity["label"], identity)


def check(opened: Reader, expected: Mapping[str, Any]) -> None:
    """InputError that names the first of the ``expected`` entries in which a store's identity differs."""
    for name in (*MEANING, *expected):
        if name in expected and opened.identity.get(name) != expected[name]:
            meaning = MEANING.get(name, "was made by another version of compare_q")
            raise InputError(f"{opened.path}: the reference {meaning}; give another path")


def verify(config: RunConfig, reference: Reference) -> None:
    """Check every byte of a store, whose lock is held; InputError names a damaged file."""
    opened = open_reference(reference.path)
    with config.progress.phase(f"checking reference {reference.label}", unit="files") as phase:
        opened.verify(config.workers.stoppable(phase).advance)


def seal(config: RunConfig, reference: Reference, n_windows: int) -> None:
    """Make a store from the data that a run has recorded, and print its size."""
    label, say = reference.label, config.progress.say
    store.seal(reference.path, {**reference.identity, "label": label}, n_windows)
    made = open_reference(reference.path)
    size = f"{made.stored_bytes / 1024**2:,.0f} MiB of {made.contents}"
    say(f"{label}: kept as the reference, {size}, in {reference.path}")
    if made.reason:
        say(f"{label}: {made.head.dtype} logits are kept, not states: {made.reason}")


def unkept(reference: Reference, n_windows: int, error: InputError | ModelError) -> str:
    """Delete the recorded data of a reference that cannot be kept; return the reason, with sizes."""
    needs, free = store.abandon(reference.path) * n_windows, 0
    with suppress(OSError):
        free = shutil.disk_usage(reference.path).free
    takes = f"; it takes about {bytes_in_words(needs)}, and {bytes_in_words(free)} are free" if needs else ""
    return f"{error}{takes}; free space or name another place"


def as_json(reference: Reference, n_tokens: int) -> dict[str, Any]:
    """Return the reference for results.json, with the stored bytes per token if its text has ``n_tokens``."""
    known: dict[str, Any] = {"label": reference.label, "key": reference.key, **reference.identity}
    if reference.content is not None:
        known["content"] = reference.content
    with suppress(InputError):  # the scores came from the cache, and the store has been deleted since
        opened = open_reference(reference.path)
        known |= {
            "contents": opened.contents, "contents_reason": opened.reason, "vocab_size": opened.head.vocab_size,
            "head_dtype": opened.head.dtype, "bytes": opened.stored_bytes,
            "bytes_a_token": round(opened.stored_bytes / n_tokens, 1),
        }  # fmt: skip
        if reference.content is None:  # a finished store, which no run extends
            known["windows"] = opened.n_windows
    return known
