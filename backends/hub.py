"""The Hugging Face hub: ``model_dir`` and ``tokenizer_dir`` -> a folder on disk, in the hub's cache
or downloaded.

``huggingface_hub`` downloads.  This file chooses the files of a repository that are needed, and
reports failures in one line.  A request with a deadline comes first: otherwise the client retries
for 24 s if connections are refused, and for more than 130 s if nothing answers.  If the hub does
not answer, the files in the local cache are used.
"""

from __future__ import annotations

import glob
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from .common.errors import InputError
from .common.json_files import expanded, is_file, is_folder
from .common.message_text import bytes_in_words, nearest, one_line
from .hub_files import INDEX, WEIGHTS, expected, matching

REMEMBERED_S = 60.0
"""Seconds before another request to an endpoint that did not answer."""
SIGN_IN = "`hf auth login` or HF_TOKEN"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py", "tokenizer*"]
"""Patterns of all files that AutoTokenizer may read; code runs only if a spec trusts it."""
MODEL_FILES = [*TOKENIZER_FILES, WEIGHTS]
"""Patterns of the model files to fetch; pickled weights are never fetched."""
UNREACHABLE: dict[str, tuple[float, str]] = {}
"""Endpoint that did not answer -> (time on the monotonic clock in seconds, reason)."""
RepoType = Literal["model", "dataset"]


class Watch(Protocol):
    """Receives the progress of one download; calls may come from several threads."""

    def expect(self, total: int) -> None:
        """``total`` bytes will be downloaded."""
        return

    def advance(self, amount: int = 1) -> None:
        """``amount`` more bytes were downloaded; negative if bytes must be downloaded again."""
        return

    def say(self, text: str) -> None:
        """Show one line to the user."""
        return


class Silent(Watch):
    """A Watch that ignores everything."""


SILENT = Silent()


class HubUnreachableError(InputError):
    """The hub does not answer now; files in the local cache can still be used."""


def is_hub_id(name: str) -> bool:
    """True if ``name`` can be a hub id (``owner/model``): it has that form, and is not an existing
    path.
    """
    return HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def resolve(
    name: str,
    revision: str | None,
    *,
    tokenizer_only: bool = False,
    download: bool = True,
    watch: Watch = SILENT,
) -> Path:
    """Folder of a local path or hub id.  Without ``download``, a hub id is only searched in the
    local cache.

    Raises InputError with the reason in one line.
    """
    if not is_hub_id(name):
        return local_folder(name)
    patterns = TOKENIZER_FILES if tokenizer_only else MODEL_FILES
    return (
        fetch("model", name, revision, patterns, watch)
        if download
        else cached("model", name, revision, patterns)
    )


def local_folder(name: str) -> Path:
    """Folder of a local path; InputError if it does not exist."""
    folder = expanded(name)
    if is_folder(folder):
        return folder
    if is_file(folder):
        hint = "; a GGUF file runs in llamacpp" if folder.suffix == ".gguf" else ""
        raise InputError(f"{name}: is a file, no folder{hint}")
    raise InputError(
        f"{name}: no such folder{'' if '/' in name else '; a model on the hub is named owner/name'}"
    )


def would_fetch(
    name: str,
    revision: str | None = None,
    patterns: Sequence[str] = MODEL_FILES,
    *,
    repo_type: RepoType = "model",
) -> str:
    """``16.1 GB to download`` or ``in the local cache``: what ``fetch`` would do.  Nothing is
    downloaded.

    Raises InputError with the reason in one line if the files are not available.
    """
    missing = bytes_of(missing_files(repo_type, name, revision, patterns, SILENT))
    return f"{bytes_in_words(missing)} to download" if missing else "in the local cache"


def fetch(
    repo_type: RepoType,
    name: str,
    revision: str | None,
    patterns: Sequence[str],
    watch: Watch = SILENT,
) -> Path:
    """Folder with a repository's files that match ``patterns``; files in the local cache are not
    fetched again.

    Raises InputError with the reason in one line.
    """
    found = missing_files(repo_type, name, revision, patterns, watch)
    if found is None:
        return cached(repo_type, name, revision, patterns)
    if found.lacks_index:
        download(repo_type, name, revision, [INDEX], SILENT)
        found = missing_files(repo_type, name, revision, patterns, SILENT) or found
    missing = bytes_of(found)
    watch.expect(missing)
    if missing:
        watch.say(f"{name}: {bytes_in_words(missing)} to download")
    return download(repo_type, name, revision, found.patterns, watch)


def download(
    repo_type: RepoType, name: str, revision: str | None, patterns: Sequence[str], watch: Watch
) -> Path:
    """Folder with a repository's files that match ``patterns``, from the hub; InputError with the
    reason.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                repo_type=repo_type,
                revision=revision,
                allow_patterns=list(patterns),
                tqdm_class=bar_for(watch),
            )
        )
    except (
        Exception
    ) as error:  # refusals, proxies, timeouts, full disks: each layer below raises its own
        raise InputError(f"{name}: {failure_reason(error, repo_type, name, revision)}") from None


@dataclass(frozen=True)
class Wanted:
    """The files of a repository that are needed.

    ``patterns``: of all these files; ``missing``: bytes of each file that is not in the local
    cache.  ``lacks_index``: the index of the weights is one of these, so that weights may be
    included that it does not name.
    """

    patterns: list[str]
    missing: dict[str, int]
    lacks_index: bool


def bytes_of(files: Wanted | None) -> int:
    """Bytes to download; 0 if the hub does not answer."""
    return sum(files.missing.values()) if files is not None else 0


def missing_files(
    repo_type: RepoType, name: str, revision: str | None, patterns: Sequence[str], watch: Watch
) -> Wanted | None:
    """The files that match ``patterns``; InputError if the hub lacks a file.

    None if the hub does not answer and the local cache has all files.  ``watch`` receives a note if
    the repository has a new name.
    """
    from huggingface_hub import try_to_load_from_cache

    try:
        found = look_up(repo_type, name, revision)
    except HubUnreachableError as error:
        cached(repo_type, name, revision, patterns, f", and {str(error).removeprefix(f'{name}: ')}")
        return None
    if found.id != name:
        watch.say(f"{name}: is {found.id} on the hub now")
    sizes = {each.rfilename: each.size or 0 for each in found.siblings or ()}

    def in_cache(file: str) -> Path | None:
        """The path of a file in the local cache; None if the cache does not have the file."""
        path = try_to_load_from_cache(name, file, None, found.sha, repo_type)
        return Path(path) if isinstance(path, str) else None

    files = matching(sizes, patterns, in_cache(INDEX))
    wanted = sorted({file for matched in files.values() for file in matched})
    if not files.get(WEIGHTS, True):
        file = next((file for file in sizes if file.lower().endswith(".gguf")), "")
        hint = f'; with "load_fn": "llamacpp" {name}/{file} can be measured' if file else ""
        raise InputError(f"{name}: no .safetensors files; compare_q loads no pickled weights{hint}")
    for pattern in patterns:
        if not wanted or ("*" not in pattern and not files[pattern]):
            raise InputError(f"{name}: no file {pattern} on the hub{nearest(pattern, sizes)}")
    missing = {file: sizes[file] for file in wanted if in_cache(file) is None}
    exact = [pattern for pattern in patterns if pattern != WEIGHTS]
    exact += [glob.escape(file) for file in files.get(WEIGHTS, ())]
    return Wanted(exact, missing, lacks_index=WEIGHTS in patterns and INDEX in missing)


def cached(
    repo_type: RepoType, name: str, revision: str | None, patterns: Sequence[str], why: str = ""
) -> Path:
    """Folder of a repository in the local cache; InputError, ending with ``why``, if a file is
    missing.
    """
    from huggingface_hub import snapshot_download

    how_much = "only partly"

    def in_cache(allowed: Sequence[str], ignored: Sequence[str] = ()) -> Path:
        """The folder; an error of the client if a file that it knows of is missing."""
        return Path(
            snapshot_download(
                name,
                repo_type=repo_type,
                revision=revision,
                allow_patterns=list(allowed),
                ignore_patterns=list(ignored),
                local_files_only=True,
            )
        )

    try:
        folder = in_cache([pattern for pattern in patterns if pattern != WEIGHTS])
        if WEIGHTS in patterns:
            in_cache(*expected(folder))
        lacking = [pattern for pattern in patterns if not any(folder.glob(pattern))]
        needed = [pattern for pattern in lacking if "*" not in pattern or pattern == WEIGHTS]
        if not needed and len(lacking) < len(patterns):
            return folder
    except Exception as error:  # also for a name that the client refuses
        how_much = "only partly" if "incomplete" in str(error) else "not"
    raise InputError(f"{name}: {how_much} in the local cache{why}")


def look_up(repo_type: RepoType, name: str, revision: str | None, *, files: bool = True) -> Any:
    """``huggingface_hub``'s description of a repository: its ``id`` and ``sha``, and the sizes of
    its files.

    Without ``files``, the sizes are left out, because a large data set has many files.  Raises
    InputError with the reason in one line, HubUnreachableError if the hub does not begin to answer
    in time (HF_HUB_ETAG_TIMEOUT, else 4 s).  The request runs in a thread, because the HTTP client has no
    time limit for DNS.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError

    began, (when, why) = time.monotonic(), UNREACHABLE.get(constants.ENDPOINT, (-math.inf, ""))
    if constants.HF_HUB_OFFLINE or began - when < REMEMBERED_S:
        raise HubUnreachableError(
            f"{name}: {'HF_HUB_OFFLINE is set' if constants.HF_HUB_OFFLINE else why}"
        )
    deadline = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 4)
    answers: list[Any] = [TimeoutError()]

    def ask() -> None:
        asked: dict[str, Any] = {"files_metadata": True} if files else {"expand": ["sha", "gated"]}
        try:
            found: Any = HfApi().repo_info(
                name, repo_type=repo_type, revision=revision, timeout=deadline, **asked
            )
            if found.gated:  # the hub lists the files of a gated repository for everyone
                HfApi().auth_check(name, repo_type=repo_type)
            answers.append(found)
        except Exception as error:  # of the hub, the client and the layers below it
            answers.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(
        4 * deadline
    )  # the end of a long list of files may take much longer than its beginning
    answer = answers[-1]
    if not isinstance(answer, Exception):
        return answer
    reason = failure_reason(answer, repo_type, name, revision)
    status = getattr(getattr(answer, "response", None), "status_code", None)
    if isinstance(answer, HFValidationError) or (
        status is not None and status not in (408, 429) and status < 500
    ):
        raise InputError(f"{name}: {reason}")
    if status is None:
        late = time.monotonic() - began >= deadline
        why = (
            f"no answer within {deadline:g} s; HF_HUB_ETAG_TIMEOUT sets another number"
            if late
            else reason
        )
        reason = f"{constants.ENDPOINT} cannot be reached ({why})"
        if late:
            UNREACHABLE[constants.ENDPOINT] = time.monotonic(), reason
    raise HubUnreachableError(f"{name}: {reason}")


@contextmanager
def offline() -> Iterator[None]:
    """In the block, ``huggingface_hub`` and ``datasets`` use only the files in their caches,
    without the hub.
    """
    import datasets
    from huggingface_hub import constants

    places: list[Any] = [constants, datasets.config]
    before = [place.HF_HUB_OFFLINE for place in places]
    for place in places:
        place.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


def bar_for(watch: Watch) -> type[Any]:
    """A class of progress bars for the client that draw nothing, and pass the number of bytes to
    ``watch``.

    The client makes several bars in bytes; the last of these counts the bytes that are written.
    """
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        written: Any = None

        def __init__(
            self, *_: object, total: float | None = None, unit: str = "", **__: object
        ) -> None:
            super().__init__(total=total, disable=True)  # type: ignore[no-untyped-call]
            Bar.written = self if unit == "B" else Bar.written

        def update(self, n: float | None = 1) -> None:
            if self is Bar.written:
                watch.advance(int(n or 0))

    return Bar


def failure_reason(
    error: BaseException, repo_type: RepoType, name: str, revision: str | None
) -> str:
    """The reason of a failure with a repository, and what to do, in one line."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{'datasets/' if repo_type == 'dataset' else ''}{name}"
    chain = [error]
    while len(chain) < 9 and (below := chain[-1].__cause__ or chain[-1].__context__):
        chain.append(below)
    for each in chain:
        if isinstance(each, errors.GatedRepoError):
            return f"gated on the hub: accept its licence at {page}, then sign in ({SIGN_IN})"
        if isinstance(each, errors.RevisionNotFoundError):
            return f"no revision {revision!r} of it on the hub; see {page}"
        if isinstance(each, errors.RepositoryNotFoundError):
            return f"not on the hub, or private; check the name, or sign in ({SIGN_IN})"
        if isinstance(each, errors.HfHubHTTPError) and not isinstance(
            each, errors.EntryNotFoundError
        ):
            return f"{page} answers {each.response.status_code}: {one_line(each)}"
    return one_line(error)
