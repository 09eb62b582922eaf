"""Which reference a run's KL divergences are against, where its store lies, and whether it is the right store.

A store belongs to one text, tokenizer, set of windows, model, engine and version of the recording.  In the cache, and
in a folder that ``out_logits`` names, the store lies under a key of them all; at a path that the user gives, what the
store says of them is checked.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare_q.backends.common.errors import InputError
from compare_q.backends.reference.reading import open_reference
from compare_q.backends.reference.store import MANIFEST, ReferenceStore, is_free
from compare_q.backends.reference.upstream import UpstreamReader
from compare_q.backends.scoring import segments
from compare_q.backends.scoring.segments import DIVERGENCES_SUFFIX
from compare_q.eval.common.cache import Cache, Lock, NoLock
from compare_q.eval.run import jobs
from compare_q.eval.run.jobs import Job
from compare_q.eval.run.session import Session
from compare_q.eval.text.windows import EvalData

TAG_DIGITS = 16
RECORDING_VERSION = 4
"""Version of the recording; a change that moves numbers, or that older code cannot read, raises it.

1: hidden states and one head, or logits in float16 where the head cannot be recomputed.
2: float32 logits less their row's maximum, since float16 has steps of 1/32 at llama.cpp's logits of 38.
3: logits bit for bit in the dtype that the engine gave.
4: files that carry their checksum; stores of the layout before, which are not read, keep their place in the cache.
"""
MEANING = {
    "vocabulary": "was made with another tokenizer",
    "series": "was made of other windows: another text, method, eval_len, eval_stride or warm-up",
    "model": "was made by another model",
    "engine": "was made by another engine",
    "options": "was made with other engine options",
    "decode": "was made in another phase, or in other steps",
    "versions": "was made by other versions of the engine",
    "hardware": "was made on other hardware",
}


@dataclass(frozen=True)
class NoReference:
    """A run in which no model is compared with another one."""


@dataclass(frozen=True)
class LostReference:
    """The reference of a run failed: the other models have perplexities and no KL divergence."""


@dataclass(frozen=True)
class HeldReference:
    """A run's reference: ``key`` stands for it in the keys of scores, ``path`` is where its store lies or will lie.

    ``identity``: everything that the store depends on; ``job``: the model, fetched, that makes a missing store;
    ``divergences``: models are compared with it by the divergences that have to be asked for, too.
    """

    key: str
    path: Path
    label: str
    identity: Mapping[str, Any]
    job: Job | None = None
    divergences: bool = False

    @property
    def exists(self) -> bool:
        """Whether there is a store, right or wrong."""
        return (self.path / MANIFEST).is_file()

    @property
    def n_windows(self) -> int:
        """How many of the first windows the store has."""
        return open_reference(self.path).n_windows if self.exists else 0

    def has(self, n_windows: int) -> bool:
        """Whether the store has so many windows."""
        return self.n_windows >= n_windows


Reference = NoReference | LostReference | HeldReference


def lock_of(reference: HeldReference, cache: Cache) -> Lock:
    """Held while a reference's store is made, checked or deleted; none where nothing can be written.

    It lies beside the store, since runs with other caches may have the same path; under a key, as the cache's own.
    """
    folder, name = os.path.split(os.path.abspath(reference.path))
    file = Path(folder, f"{name}.lock" if name == reference.key else f".{name}.lock")
    return cache.lock_at(file) if os.access(folder, os.W_OK) else NoLock()


def tag_for(reference: Reference, job: Job) -> str:
    """Under which tag a model's scores lie: of what they are compared with, or of scores that depend on no reference.

    Nothing does where there is no reference, for the reference itself, and in an engine that cannot be compared.
    """
    if not isinstance(reference, HeldReference) or job.spec.is_reference or not job.engine_class.capabilities.compares:
        return segments.ALONE
    return reference.key[:TAG_DIGITS] + (DIVERGENCES_SUFFIX if reference.divergences else "")


def of_model(job: Job, data: EvalData, session: Session) -> HeldReference:
    """The reference that a fetched model is; InputError if a path that the user gave holds another one.

    With ``session.clear`` a store under the reference's own key is going to be deleted, so that it may be damaged.
    """
    logits_file = session.logits_file
    identity = {**jobs.identity(job, data, session), "vocabulary": data.vocabulary, "reference": RECORDING_VERSION}
    key = Cache.key("reference", identity)
    folder = job.spec.out_logits
    in_cache = session.cache.path("references", key, "")
    path = logits_file or (Path(job.spec.locate(folder)) / key if folder else in_cache)
    reference = HeldReference(key, path, job.request.label, identity, job, session.divergences)
    key_name = "--logits_file" if logits_file is not None else "out_logits"
    if reference.exists:
        if not (session.clear and logits_file is None):
            check(open_reference(path), {"decode": None, **identity})
    elif path != in_cache and not is_free(path):
        raise InputError(f"{key_name}: {path}: is there and is no store of this compare_q; name another path")
    if path == in_cache or (reference.has(len(data.windows)) and not session.clear):
        return reference
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{key_name}: {path.parent}: cannot be written")
    return reference


def of_store(path: Path, data: EvalData, session: Session) -> HeldReference:
    """A reference from a store alone: compare_q's own, or upstream's, which does not say where it comes from."""
    store = open_reference(path)
    if not isinstance(store, UpstreamReader):
        check(store, {"series": data.series, "vocabulary": data.vocabulary, "reference": RECORDING_VERSION})
    elif data.spec.windows != "exllamav3":
        raise InputError(f"{path}: upstream's stores hold exllamav3's windows and no others")
    if store.n_windows < len(data.windows):
        raise InputError(
            f"{path}: has {store.n_windows} windows, window {store.n_windows} of {len(data.windows)} is missing; "
            f"use -r {store.n_windows if data.answers is None else data.answers.requests.question[store.n_windows]}"
        )
    if isinstance(store, UpstreamReader) and store.positions != data.windows[0].n_scored:
        raise InputError(
            f"{path}: scores {store.positions} positions a window, these windows {data.windows[0].n_scored}: "
            "it was made with another eval_len or warm-up"
        )
    if store.head.vocab_size <= data.top_id:
        raise InputError(f"{path}: has {store.head.vocab_size} logits, the tokenizer reaches id {data.top_id}")
    label = store.identity.get("label", "upstream's logits")
    identity = {name: value for name, value in store.identity.items() if name != "label"}
    if isinstance(store, UpstreamReader):
        with session.progress.phase("reading upstream's logits"):
            identity["upstream"] = content_of(store)
    return HeldReference(Cache.key("reference", identity), path, label, identity, divergences=session.divergences)


def check(store: ReferenceStore, expected: Mapping[str, Any]) -> None:
    """InputError that says in what a store's identity differs from the ``expected`` entries."""
    for name in sorted(expected, key=lambda name: list(MEANING).index(name) if name in MEANING else len(MEANING)):
        if store.identity.get(name) != expected[name]:
            meaning = MEANING.get(name, "was made by another version of compare_q")
            raise InputError(f"{store.path}: the reference {meaning}; delete it or give another path")


def content_of(store: UpstreamReader) -> str:
    """SHA-256 of all files of an upstream store."""
    digest = hashlib.sha256()
    for file in store.files or [store.path]:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def as_json(reference: HeldReference, n_tokens: int) -> dict[str, Any]:
    """The reference for results.json, with the bytes that its store takes for each of ``n_tokens`` scored tokens."""
    known: dict[str, Any] = {"label": reference.label, "key": reference.key, **reference.identity}
    if reference.job is not None:
        known["content"] = reference.job.files.content()
    try:
        store = open_reference(reference.path)
    except InputError:  # the scores came from the cache, and the store has been deleted since
        return known
    return {
        **known,
        "contents": store.contents,
        "contents_reason": store.reason,
        "vocab_size": store.head.vocab_size,
        "head_dtype": store.head.dtype,
        "bytes": store.stored_bytes,
        "bytes_a_token": round(store.stored_bytes / n_tokens, 1),
    }
