"""Build the windows of one text from a data spec, and describe them for titles, ``check`` and
results.json.

With ``chat_template`` the tokenizer's template (an empty system message, a user who says "Say
something.", the generation prompt) precedes each window.  Its tokens and the first token of the
window are not scored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends import hub
from ...backends.base import Spans, Window, abbreviated
from ...backends.common import json_files
from ...backends.common.errors import InputError
from ...backends.common.message_text import amount, printable
from ...backends.common.packages import builds
from ...backends.reference import pack_files
from ..common import processes
from ..common.cache import Cache
from ..common.progress import Progress
from ..specs import spec_files
from ..specs.spec_types import DataSpec
from . import conversations, corpus, cutting, hub_datasets, text_tokens
from .text_tokens import RENDER_S, TOKENS_VERSION, Chat, Tokens

CHAT_VERSION = 3
"""Version of the tokens of conversations.  Raise it when rendering, or the choice of scored tokens,
changes."""
TOKENIZING = (
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
LONG_IN_WORDS = {"truncate": "cut off there", "split": "split", "skip": "left out"}
"""``long`` -> how a conversation of more than ``eval_len`` tokens is treated."""


@dataclass(frozen=True)
class Documents:
    """Facts about a text that is conversations."""

    begins: tuple[int, ...]  # text index of the first token of each window's conversation
    title: str  # for titles: ``12 conversations, 3,456 scored tokens of the assistant``
    in_words: str  # for ``check``
    facts: dict[str, Any]  # for results.json


@dataclass(frozen=True)
class TextWindows:
    """The windows of one text of a run."""

    name: str  # of the text in the run
    spec: DataSpec
    windows: tuple[Window, ...]  # with their numbers in this text
    n_tokens: int  # of the whole text
    top_id: int
    digest: str  # identifies the windows by content
    series: str  # identifies all windows of the text; a run may use only the first ones
    vocabulary: str  # identifies the tokenizer by content
    tokenizer: Path  # its folder
    starts: tuple[
        int, ...
    ]  # ``starts[window] + position``: index of a token in the text, one document after the other
    available: int  # windows of the whole text
    text_size: tuple[int, float] | None  # UTF-8 bytes and words of the scored tokens
    text_note: str = ""  # why they are unknown
    documents: Documents | None = None
    roles: NDArray[np.int8] | None = (
        None  # [n_tokens], of each scored token: its place in ``role_names``; -1: none
    )
    role_names: tuple[str, ...] = ()
    special: NDArray[np.int32] = field(
        default_factory=lambda: np.zeros(0, np.int32)
    )  # ids of special tokens
    notes: tuple[str, ...] = ()  # footnotes: the tokenizer, file or rows of the tokens

    def text_index(self, window: NDArray[Any], position: NDArray[Any]) -> NDArray[np.int64]:
        """Return the index in the whole tokenized text of each token, int64 [N], from its window
        and position [N].
        """
        return np.asarray(np.asarray(self.starts)[window] + position)

    def begins(self, window: NDArray[Any]) -> NDArray[np.int64] | None:
        """Return the text index of the first token of each window's conversation [N]; None for a
        text.
        """
        return (
            None if self.documents is None else np.asarray(self.documents.begins, np.int64)[window]
        )

    @property
    def is_spread(self) -> bool:
        """True if the windows are a sample that is spread over the text."""
        return self.spec.sample == "spread" and len(self.windows) < self.available

    @cached_property
    def seen(self) -> frozenset[int]:
        """Token ids in windows of conversations, whose special tokens the model must share; empty
        for a text.
        """
        ids = [window.token_ids for window in self.windows if self.spec.is_chat]
        return frozenset(np.unique(np.concatenate(ids)).tolist()) if ids else frozenset()

    @property
    def length(self) -> int:
        """Number of tokens in the longest window, including the chat prefix."""
        return max(len(window.token_ids) for window in self.windows)

    @property
    def n_scored(self) -> int:
        """Number of scored tokens in all windows.  If windows overlap, a token counts each time."""
        return sum(window.n_scored for window in self.windows)


def cut(
    text: Tokens, spec: DataSpec, max_rows: int | None, tokenizer: Path, name: str = ""
) -> TextWindows:
    """Cut a tokenized text into windows; InputError if the text is too short for one.

    ``max_rows``: the number of windows; 0 and None: all.  ``name``: of the text in the run.
    """
    documents = None
    if text.chat is not None:
        every, too_long, unscored = cutting.chat(
            text.ids, text.chat.scored, text.ends, spec.eval_len, spec.long
        )
        taken = every[: max_rows or None]
        documents = conversations_in(taken, text, text.chat, spec, too_long, unscored)
    else:
        every = cutting.by_method(text, spec)
        taken = every[: max_rows or None]
    if not taken:
        least = cutting.least_tokens(spec.method, spec.eval_len)
        raise InputError(
            f"eval_len: the text has {len(text.ids)} tokens, one window takes {least}; shorten eval_len"
        )
    before = len(text.prefix)
    windows = tuple(
        Window(
            index, np.concatenate((text.prefix, window.token_ids)), shifted(window.spans, before)
        )
        for index, window in enumerate(taken)
    )
    starts = tuple(window.start - before for window in taken)
    top_id = max(text.top_id, max(int(window.token_ids.max()) for window in windows))
    size, note = scored_size(text, taken)
    return TextWindows(
        name=name,
        spec=spec,
        windows=windows,
        n_tokens=len(text.ids),
        top_id=top_id,
        digest=digest_of(windows, starts, spec.windows),
        series=series_of(text, every, spec.windows),
        vocabulary=text.vocabulary,
        tokenizer=tokenizer,
        starts=starts,
        available=len(every),
        text_size=size,
        text_note=note,
        documents=documents,
        roles=None if text.chat is None else text.chat.roles,
        role_names=() if text.chat is None else text.chat.role_names,
        special=text.special,
        notes=(*text.notes, *corpus.method_notes(spec)),
    )


def conversations_in(
    taken: Sequence[cutting.Cut],
    text: Tokens,
    chat: Chat,
    spec: DataSpec,
    too_long: int,
    unscored: int,
) -> Documents:
    """Return facts about the windows of conversations that a run takes; InputError if there is
    none.

    ``too_long``, ``unscored``: of all conversations, as ``cutting.chat`` counts them.
    """
    total, roles = len(text.ends), ", ".join(spec.score_roles)
    if not taken:
        longer = f", and {too_long:,} are longer than eval_len" if too_long else ""
        raise InputError(
            f"score_roles: none of {total:,} conversations has a token of {roles} in a window{longer}"
        )
    begins = np.concatenate(([0], text.ends))[
        np.searchsorted(text.ends, [each.start for each in taken], side="right")
    ]
    count, n_scored = (
        len(set(begins.tolist())),
        amount(sum(each.n_scored for each in taken), "scored token"),
    )
    whose = " and ".join(f"the {role}" for role in spec.score_roles) + (
        ", last turn" * (spec.score_turns == "last")
    )
    split = "" if len(taken) == count else f" in {amount(len(taken), 'window')}"
    lost = f"; {unscored:,} without a scored token left out" if unscored else ""
    lost += f"; {too_long:,} longer ones {LONG_IN_WORDS[spec.long]}" if too_long else ""
    facts = {
        "conversations": total,
        "scored": count,
        "without_scored_tokens": unscored,
        "longer_than_eval_len": too_long,
        "turns_told_by": chat.found_by,
        "tokens_across_edges": chat.across,
        "chat_template_sha256": chat.template,
    }
    return Documents(
        tuple(begins.tolist()),
        f"{amount(count, 'conversation')}{split}, {n_scored} of {whose}",
        f"{count:,} of {amount(total, 'conversation')} in {amount(len(taken), 'window')}, {n_scored} ({roles}; "
        f"found by {chat.found_by}){lost}",
        facts,
    )


def shifted(spans: Spans, by: int) -> Spans:
    """Return the spans with ``by`` added to every position."""
    return tuple((begin + by, end + by) for begin, end in spans)


def series_of(text: Tokens, every: Sequence[cutting.Cut], method: str) -> str:
    """Return the SHA-256 of all windows of a text: its tokens, and the start, length and spans of
    each window.
    """
    digest = hashlib.sha256(f"{method} {text.lead} {len(text.prefix)} ".encode())
    digest.update(np.ascontiguousarray(text.prefix, dtype="<i4").tobytes())
    digest.update(np.ascontiguousarray(text.ids, dtype="<i4").tobytes())
    for window in every:
        length = len(window.token_ids)
        digest.update(
            np.asarray(
                [window.start, length, *abbreviated(window.spans, length)], dtype="<i8"
            ).tobytes()
        )
    return digest.hexdigest()


def digest_of(windows: Sequence[Window], starts: Sequence[int], method: str) -> str:
    """Return the SHA-256 of the method and of the start, length, spans and tokens of each window.

    The lengths are needed: otherwise 4 windows of 128 tokens and 8 of 64 over the same text would
    be equal.
    """
    digest = hashlib.sha256(method.encode())
    for window, start in zip(windows, starts, strict=True):
        digest.update(f" {start} {len(window.token_ids)} {window.what_is_scored} ".encode())
        digest.update(window.token_ids.tobytes())
    return digest.hexdigest()


def scored_size(text: Tokens, taken: Sequence[cutting.Cut]) -> tuple[tuple[int, float] | None, str]:
    """Return ((UTF-8 bytes, words) of the scored tokens or None, the reason if None).

    If windows overlap, a token counts each time.  Words, separated by white space as in lm-eval,
    are counted by the bytes' share of the text; for a whole text they are lm-eval's.  Both count
    the text before it is detokenized.
    """
    if text.sizes is None:
        return (
            None,
            "bytes and words are not known: this tokenizer does not return the offsets of its tokens",
        )
    spans = [span for window in taken for span in shifted(window.spans, window.start)]
    scored, read = (
        sum(int(text.sizes[begin:end].sum()) for begin, end in spans),
        int(text.sizes.sum()),
    )
    if not scored:
        return None, "bytes and words are not known: the scored tokens have no text"
    # ``read`` is not the original's bytes where the text was detokenized.
    return (round(text.n_bytes * scored / read), text.n_words * scored / read), ""


def build(
    spec: DataSpec,
    n_windows: int | None,
    cache: Cache,
    progress: Progress,
    *,
    name: str = "",
    clear: bool = False,
    render_s: float = RENDER_S,
) -> TextWindows:
    """Return the windows of a data spec; the tokens come from the cache if nothing they depend on
    has changed.

    ``name``: of the text in the run.  ``n_windows``: the number of windows of this run, 0 for all;
    None: the spec's ``max_rows``.  ``render_s``: maximum seconds for the chat template, at most
    ``RENDER_S``.
    """
    n_windows = spec.max_rows if n_windows is None else n_windows
    if spec.pack is not None:
        folder = pack_files.resolve(spec.pack)
        return cut(
            text_tokens.of_pack(folder), spec, n_windows, folder / pack_files.TOKENIZER, name
        )
    location = spec.locate(spec.tokenizer_dir)
    fetching = None
    if hub.is_hub_id(location):
        fetching = progress.phase(f"fetching the tokenizer of {location}", unit="bytes")
    with fetching or nullcontext(hub.SILENT) as phase:
        folder = hub.resolve(location, spec.tokenizer_revision, tokenizer_only=True, watch=phase)
    before = states(spec, folder)
    key = cache.key("tokens", identity(spec, folder))
    cache.use("tokens", key)
    if clear:
        cache.clear("tokens", key)
    text = kept(spec, cache, key, progress)
    if text is None:
        if (file := cache.path("tokens", key, ".npz")).is_file():
            progress.say(f"{file}: damaged, or of another text or tokenizer; it is made again")
        with cache.write("tokens", key, ".npz") as file:
            what = f"tokenizing {corpus.display_name(spec)}"
            keys = {
                "spec": spec_files.as_json(spec),
                "tokenizer": str(folder),
                "file": str(file),
                "key": key,
                "render_s": min(render_s, RENDER_S),
            }
            processes.run_in_subprocess(make, what, progress, **keys)
            if changed := states(spec, folder) ^ before:
                file_name = printable(min(changed)[0])
                raise InputError(
                    f"{file_name}: changed while it was read; run again when no program writes it"
                )
        text = text_tokens.load(cache, key)
    if text is None:
        raise InputError(
            f"{cache.path('tokens', key, '.npz')}: vanished; is the disk full, or the cache not yours?"
        )
    return cut(text, spec, n_windows, folder, name)


def tokens_of(spec: DataSpec, cache: Cache) -> Tokens:
    """Return the tokens of a data spec that ``build`` has cut; InputError if they have vanished
    from the cache.
    """
    if spec.pack is not None:
        return text_tokens.of_pack(Path(spec.pack))
    folder = hub.resolve(
        spec.locate(spec.tokenizer_dir),
        spec.tokenizer_revision,
        tokenizer_only=True,
        download=False,
    )
    found = text_tokens.load(cache, cache.key("tokens", identity(spec, folder)))
    if found is None:
        raise InputError(
            f"{corpus.display_name(spec)}: its tokens vanished from the cache; run again"
        )
    return found


def kept(spec: DataSpec, cache: Cache, key: str, progress: Progress) -> Tokens | None:
    """Return the cached tokens, with a note if a remote text may have changed; None without tokens
    of this text.

    A text that has changed is deleted from the cache.
    """
    text = text_tokens.load(cache, key)
    if text is None or not hub_datasets.is_remote(spec):
        return text
    now, name = hub_datasets.version(spec), corpus.display_name(spec)
    if not (now and text.source):
        when = text.read or "an unknown date"
        note = f"{name}: as it was read on {when}; whether it has changed since is not known (-cc reads it again)"
        return replace(text, notes=(*text.notes, note))
    if now == text.source:
        return text
    progress.say(f"{name}: changed since {text.read}, when it was read; it is read again")
    cache.clear("tokens", key)
    return None


def states(spec: DataSpec, folder: Path) -> set[tuple[str, ...]]:
    """Return (path, inode, size, times) of each file of a text and its tokenizer.

    Changed content always changes an entry, since the system sets the time of the last change of
    state (ctime).
    """
    files = [*corpus.paths_of(spec), *tokenizer_files(folder)]
    found = ((file, file.stat()) for file in files if file.is_file())
    return {
        (str(f), *map(str, (s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))) for f, s in found
    }


def tokenizer_files(folder: Path) -> list[Path]:
    """Return all files in a folder that a tokenizer may read, in order."""
    # A default.jinja among the additional templates is the chat template if the folder has no
    # other.
    patterns = [*hub.TOKENIZER_FILES, "additional_chat_templates/*.jinja"]
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def make(
    spec: Mapping[str, Any],
    tokenizer: str,
    file: str,
    key: str,
    progress: Progress,
    render_s: float = RENDER_S,
) -> None:
    """Read the text of a ``spec`` as JSON, tokenize it and write the tokens into ``file``;
    InputError with the reason.

    ``tokenizer``: its folder; ``key``: of the tokens.  Runs in a subprocess, because it imports
    Transformers and ``datasets``.
    """
    data, folder = spec_files.from_json(spec), Path(tokenizer)
    source = hub_datasets.version(data) if hub_datasets.is_remote(data) else ""
    hub_datasets.fetch(data, progress)
    if data.is_chat:
        text = conversations.tokenize(
            conversations.read(data, progress), folder, data, progress, render_s
        )
    else:
        text = text_tokens.tokenize(
            corpus.load_texts(data, progress), folder, data, progress, render_s
        )
    read = datetime.now().isoformat(" ", "minutes")
    return text_tokens.save(Path(file), replace(text, source=source, read=read), key)


def identity(spec: DataSpec, folder: Path) -> dict[str, Any]:
    """Return everything that the tokens depend on, as JSON types; ``folder``: the tokenizer's."""
    digest = hashlib.sha256()
    for file in tokenizer_files(folder):
        digest.update(
            file.relative_to(folder).as_posix().encode()
            + b"\0"
            + json_files.read_bytes(file)
            + b"\0"
        )
    chat = {
        "roles": sorted(set(spec.score_roles)),
        "turns": spec.score_turns,
        "variables": spec.chat_template_kwargs,
        "version": CHAT_VERSION,
    }
    return {
        "version": TOKENS_VERSION,
        "method": spec.method,
        "detokenize": spec.detokenize,
        "text": corpus.identity(spec),
        "tokenizer": digest.hexdigest(),
        "chat_template": spec.chat_template,
        **({"chat": chat} if spec.is_chat else {}),
        "trust_remote_code": spec.trust_remote_code,
        "versions": builds(TOKENIZING),
    }


def would_fetch(spec: DataSpec, cache: Cache, *, tokenizer_is_here: bool) -> str:
    """Describe the download of the text; empty if the text is on this machine or its tokens are in
    the cache.
    """
    if (
        spec.pack is not None
        or corpus.is_here(spec)
        or (tokenizer_is_here and are_stored(spec, cache))
    ):
        return ""
    return hub_datasets.would_fetch(spec)


def are_stored(spec: DataSpec, cache: Cache) -> bool:
    """Return True if the tokenized text is in the cache; the tokenizer must be on this machine."""
    if spec.pack is not None:
        return True
    folder = hub.resolve(
        spec.locate(spec.tokenizer_dir),
        spec.tokenizer_revision,
        tokenizer_only=True,
        download=False,
    )
    return cache.path("tokens", cache.key("tokens", identity(spec, folder)), ".npz").is_file()


def subtitle(data: TextWindows) -> str:
    """The line below a plot's title, e.g. ``wikitext2, 141 × 2048 tokens``."""
    spec, name = data.spec, corpus.display_name(data.spec)
    if data.documents is not None:
        return f"{name}, {data.documents.title}"
    count = spec.display_rows or len(data.windows)
    length = spec.display_eval_len or spec.eval_len - spec.warmup_tokens
    mixed = len({len(window.token_ids) for window in data.windows}) > 1
    counted = amount(count, "window") if isinstance(count, int) else f"{count} windows"
    size = f"{counted} of up to {length} tokens" if mixed else f"{count} × {length} tokens"
    more = {
        f"{spec.warmup_tokens} tokens warm-up": spec.warmup_tokens,
        f"of each {spec.score_every} the last {spec.score_last} scored": spec.score_every,
        "formatted": spec.chat_template,
        f"method {spec.method}": spec.method != "exllamav3",
        f"spread over the text's {data.available:,}": data.is_spread,
    }
    return ", ".join((name, size, *(words for words, holds in more.items() if holds)))


def in_words(spec: DataSpec, data: TextWindows | None) -> str:
    """Return the line that ``check`` prints; ``data``: None if text or tokenizer are not downloaded
    yet.
    """
    what, whole = (
        f"method {spec.method}, windows of {spec.eval_len} every {spec.stride} tokens",
        "text",
    )
    if spec.is_chat:
        what, whole = f"conversations, windows of up to {spec.eval_len} tokens", "conversations"
    what = f"{corpus.display_name(spec)}, {what}"
    if data is None:
        return f"{what}; their number is known after {whole} and tokenizer are downloaded"
    if data.documents is not None:
        return f"{what}: {data.documents.in_words}"
    spread = f" spread over the text's {data.available:,}" if data.is_spread else ""
    counted = (
        f"{amount(len(data.windows), 'window')}{spread}, {amount(data.n_scored, 'scored token')}"
    )
    return f"{what}: {counted}, of a text of {data.n_tokens:,} tokens"


def data_json(data: TextWindows) -> dict[str, Any]:
    """Return the facts about a text and its windows for results.json."""
    spec, (n_bytes, n_words) = data.spec, data.text_size or (None, None)
    return {
        "spec": json.loads(spec.model_dump_json(exclude_unset=True)),
        "spec_sha256": spec.digest(),
        "windows_sha256": data.digest,
        "vocabulary_sha256": data.vocabulary,
        "text_tokens": data.n_tokens,
        "method": spec.windows,
        "windows": len(data.windows),
        **({"windows_of_the_text": data.available} if data.is_spread else {}),
        "window_length": data.length,
        "scored_tokens": data.n_scored,
        "bytes": n_bytes,
        "words": n_words,
        **({"text_note": data.text_note} if data.text_note else {}),
        **({"notes": data.notes} if data.notes else {}),
        **({"conversations": data.documents.facts} if data.documents else {}),
    }
