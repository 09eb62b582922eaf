"""Make the tokens of a data spec in a subprocess, and keep them in the cache.

Their key has everything that they depend on (``tokens_identity``).  A remote text may change
without a change of its key: its version is compared each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ...backends import hub
from ...backends.common import json_files
from ...backends.common.errors import InputError
from ...backends.common.message_text import printable
from ...backends.common.packages import builds
from ..common import processes
from ..common.cache import Cache
from ..common.progress import Progress
from ..specs import spec_files
from ..specs.spec_types import DataSpec
from . import conversations, corpus, hub_datasets, rollouts, stored_tokens, text_tokens
from .text_tokens import RENDER_S, TOKENS_VERSION, Tokens

CHAT_VERSION = 3
"""Version of the tokens of conversations.  Raise it when rendering, or the choice of scored tokens,
changes."""
TOKENIZING_PACKAGES = (
    "transformers",
    "tokenizers",
    "datasets",
    "pyarrow",
    "jinja2",
    "sentencepiece",
    "tiktoken",
    "mistral-common",
)
"""Packages that may influence how a text is read and tokenized."""


def fetch_tokenizer(spec: DataSpec, progress: Progress) -> Path:
    """Return the folder of a data spec's tokenizer, which is downloaded from the hub if needed."""
    location = spec.locate(spec.tokenizer_dir)
    fetching: AbstractContextManager[hub.Watch] = nullcontext(hub.SILENT)
    if hub.is_hub_id(location):
        fetching = progress.phase(f"fetching the tokenizer of {location}", unit="bytes")
    with fetching as phase:
        return hub.resolve(location, spec.tokenizer_revision, tokenizer_only=True, watch=phase)


def fetched_tokenizer(spec: DataSpec) -> Path:
    """Return the folder of a data spec's tokenizer, which must be on this machine."""
    return hub.resolve(
        spec.locate(spec.tokenizer_dir),
        spec.tokenizer_revision,
        tokenizer_only=True,
        download=False,
    )


def make_or_load(
    spec: DataSpec,
    tokenizer: Path,
    cache: Cache,
    progress: Progress,
    *,
    clear: bool = False,
    render_s: float = RENDER_S,
) -> Tokens:
    """Return the tokens of a data spec, from the cache if nothing they depend on has changed.

    ``tokenizer``: its folder.  ``clear``: delete the cached tokens first.  ``render_s``: maximum
    seconds for the chat template, at most ``RENDER_S``.
    """
    # Before the key, which has the content of the same files: a later change is noticed.
    states = file_states(spec, tokenizer)
    key = cache.key("tokens", tokens_identity(spec, tokenizer))
    cache.use("tokens", key)
    if clear:
        cache.clear("tokens", key)
    tokens = load_unchanged(spec, cache, key, progress)
    if tokens is None:
        make(spec, tokenizer, cache, key, states, progress, render_s)
        tokens = stored_tokens.load(cache, key)
    if tokens is None:
        file = cache.path("tokens", key, ".npz")
        raise InputError(f"{file}: vanished; is the disk full, or the cache not yours?")
    return tokens


def make(
    spec: DataSpec,
    tokenizer: Path,
    cache: Cache,
    key: str,
    states: set[tuple[str, ...]],
    progress: Progress,
    render_s: float,
) -> None:
    """Write the tokens of a data spec into the cache.

    InputError if a file has changed since its state was one of ``states``.
    """
    damaged_file = cache.path("tokens", key, ".npz")
    if damaged_file.is_file():
        progress.say(f"{damaged_file}: damaged, or of another text or tokenizer; it is made again")
    with cache.write("tokens", key, ".npz") as file:
        processes.run_in_subprocess(
            write_tokens,
            f"tokenizing {corpus.display_name(spec)}",
            progress,
            spec=spec_files.as_json(spec),
            tokenizer=str(tokenizer),
            file=str(file),
            key=key,
            render_s=min(render_s, RENDER_S),
        )
        # Tokens of other content than the key's must not become an entry.
        changed = file_states(spec, tokenizer) ^ states
        if changed:
            file_name = printable(min(changed)[0])
            raise InputError(
                f"{file_name}: changed while it was read; run again when no program writes it"
            )


def write_tokens(
    spec: Mapping[str, Any],
    tokenizer: str,
    file: str,
    key: str,
    progress: Progress,
    render_s: float = RENDER_S,
) -> None:
    """Read the text of a ``spec`` as JSON, tokenize it and write the tokens into ``file``.

    InputError with the reason.  ``tokenizer``: its folder; ``key``: of the tokens.  Runs in a
    subprocess, because it imports Transformers and ``datasets``.
    """
    data = spec_files.from_json(spec)
    folder = Path(tokenizer)
    # Before the text is read: if it changes in between, the next run reads it again.
    source = ""
    if hub_datasets.is_remote(data):
        source = hub_datasets.version(data)
    hub_datasets.fetch(data, progress)
    if data.is_rollouts:
        tokens = rollouts.tokens_of(data, folder, progress)
    elif data.is_chat:
        messages = conversations.read(data, progress)
        tokens = conversations.tokenize(messages, folder, data, progress, render_s)
    else:
        texts = corpus.load_texts(data, progress)
        tokens = text_tokens.tokenize(texts, folder, data, progress, render_s)
    read = datetime.now().isoformat(" ", "minutes")
    stored_tokens.save(Path(file), replace(tokens, source=source, read=read), key)


def load_again(spec: DataSpec, cache: Cache, key: str = "") -> Tokens:
    """Return the tokens of a data spec whose windows were built before.

    ``key``: of sampled tokens.  InputError if they have vanished from the cache.
    """
    if spec.pack is not None:
        return stored_tokens.tokens_of_pack(Path(spec.pack))
    if not key:
        key = cache.key("tokens", tokens_identity(spec, fetched_tokenizer(spec)))
    tokens = stored_tokens.load(cache, key)
    if tokens is None:
        raise InputError(
            f"{corpus.display_name(spec)}: its tokens vanished from the cache; run again"
        )
    return tokens


def load_unchanged(spec: DataSpec, cache: Cache, key: str, progress: Progress) -> Tokens | None:
    """Return the cached tokens, with a note if a remote text may have changed.

    None without tokens of this text.  A text that has changed is deleted from the cache.
    """
    tokens = stored_tokens.load(cache, key)
    if tokens is None or not hub_datasets.is_remote(spec):
        return tokens
    version = hub_datasets.version(spec)
    name = corpus.display_name(spec)
    if not (version and tokens.source):
        when = tokens.read or "an unknown date"
        note = (
            f"{name}: as it was read on {when}; whether it has changed since is not known "
            "(-cc reads it again)"
        )
        return replace(tokens, notes=(*tokens.notes, note))
    if version == tokens.source:
        return tokens
    progress.say(f"{name}: changed since {tokens.read}, when it was read; it is read again")
    cache.clear("tokens", key)
    return None


def file_states(spec: DataSpec, tokenizer: Path) -> set[tuple[str, ...]]:
    """Return (path, inode, size, times) of each file of a text and its tokenizer.

    Changed content always changes an entry, since the system sets the time of the last change of
    state (ctime).
    """
    states = set()
    for file in [*corpus.paths_of(spec), *tokenizer_files(tokenizer)]:
        if file.is_file():
            status = file.stat()
            numbers = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            states.add((str(file), *[str(number) for number in numbers]))
    return states


def tokenizer_files(folder: Path) -> list[Path]:
    """Return all files in a folder that a tokenizer may read, in order."""
    # A default.jinja among the additional templates is the chat template if the folder has no
    # other.
    patterns = (*hub.TOKENIZER_FILES, "additional_chat_templates/*.jinja")
    files = set()
    for pattern in patterns:
        for file in folder.glob(pattern):
            if file.is_file():
                files.add(file)
    return sorted(files)


def tokens_identity(spec: DataSpec, tokenizer: Path) -> dict[str, Any]:
    """Return everything that the tokens depend on, as JSON types; ``tokenizer``: its folder."""
    digest = hashlib.sha256()
    for file in tokenizer_files(tokenizer):
        name = file.relative_to(tokenizer).as_posix()
        digest.update(name.encode() + b"\0" + json_files.read_bytes(file) + b"\0")
    identity: dict[str, Any] = {
        "version": TOKENS_VERSION,
        "method": spec.method,
        "detokenize": spec.detokenize,
        "text": corpus.text_identity(spec),
        "tokenizer": digest.hexdigest(),
        "chat_template": spec.chat_template,
        "trust_remote_code": spec.trust_remote_code,
        "versions": builds(TOKENIZING_PACKAGES),
    }
    if spec.is_rollouts:
        # In the note on longer sequences.
        identity["rollouts"] = spec.eval_len
    if spec.is_chat:
        identity["chat"] = {
            "roles": sorted(set(spec.score_roles)),
            "turns": spec.score_turns,
            "variables": spec.chat_template_kwargs,
            "version": CHAT_VERSION,
        }
    return identity


def would_fetch(spec: DataSpec, cache: Cache, *, tokenizer_is_here: bool) -> str:
    """Describe the download of the text.

    Empty if the text is on this machine or its tokens are in the cache.
    """
    if spec.pack is not None or corpus.is_here(spec):
        return ""
    # The key needs the files of the tokenizer.
    if tokenizer_is_here and are_stored(spec, cache):
        return ""
    return hub_datasets.would_fetch(spec)


def are_stored(spec: DataSpec, cache: Cache) -> bool:
    """Return True if the tokenized text is in the cache; the tokenizer must be on this machine."""
    if spec.pack is not None:
        return True
    key = cache.key("tokens", tokens_identity(spec, fetched_tokenizer(spec)))
    return cache.path("tokens", key, ".npz").is_file()
