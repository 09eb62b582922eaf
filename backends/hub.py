"""The Hugging Face hub: find or download the folder of a ``model_dir`` or ``tokenizer_dir``.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from .common.errors import InputError
from .common.json_files import expanded, is_file, is_folder
from .common.message_text import bytes_in_words, nearest, one_line
from .hub_files import WEIGHTS, WEIGHTS_INDEX, expected, matching

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
    """True if ``name`` has the form of a hub id (``owner/model``), and is not an existing path."""
    return HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def resolve(
    name: str,
    revision: str | None,
    *,
    tokenizer_only: bool = False,
    download: bool = True,
    watch: Watch = SILENT,
) -> Path:
    """Return the folder of a local path or hub id; InputError with the reason in one line.

    Without ``download``, a hub id is only searched in the local cache.
    """
    if not is_hub_id(name):
        return local_folder(name)
    patterns = MODEL_FILES
    if tokenizer_only:
        patterns = TOKENIZER_FILES
    if download:
        return fetch("model", name, revision, patterns, watch)
    return cached("model", name, revision, patterns)


def local_folder(name: str) -> Path:
    """Return the folder of a local path; InputError if it does not exist."""
    folder = expanded(name)
    if is_folder(folder):
        return folder
    hint = ""
    if is_file(folder):
        if folder.suffix == ".gguf":
            hint = "; a GGUF file runs in llamacpp"
        raise InputError(f"{name}: is a file, no folder{hint}")
    if "/" not in name:
        hint = "; a model on the hub is named owner/name"
    raise InputError(f"{name}: no such folder{hint}")


def would_fetch(
    name: str,
    revision: str | None = None,
    patterns: Sequence[str] = MODEL_FILES,
    *,
    repo_type: RepoType = "model",
) -> str:
    """Return what ``fetch`` would do: ``16.1 GB to download`` or ``in the local cache``.

    Nothing is downloaded.  InputError with the reason in one line if files are not available.
    """
    missing = bytes_of(missing_files(repo_type, name, revision, patterns, SILENT))
    if missing:
        return f"{bytes_in_words(missing)} to download"
    return "in the local cache"


def fetch(
    repo_type: RepoType,
    name: str,
    revision: str | None,
    patterns: Sequence[str],
    watch: Watch = SILENT,
) -> Path:
    """Return a folder with a repository's files that match ``patterns``.

    Files in the local cache are not fetched again.  InputError with the reason in one line.
    """
    needed_files = missing_files(repo_type, name, revision, patterns, watch)
    # None: the hub cannot be reached, so that only the local cache may have the files.
    if needed_files is None:
        return cached(repo_type, name, revision, patterns)
    if needed_files.lacks_index:
        # The index names the weights: with it, copies in other formats are left out.
        download(repo_type, name, revision, [WEIGHTS_INDEX], SILENT)
        by_index = missing_files(repo_type, name, revision, patterns, SILENT)
        if by_index is not None:
            needed_files = by_index
    missing = bytes_of(needed_files)
    watch.expect(missing)
    if missing:
        watch.say(f"{name}: {bytes_in_words(missing)} to download")
    return download(repo_type, name, revision, needed_files.patterns, watch)


def download(
    repo_type: RepoType, name: str, revision: str | None, patterns: Sequence[str], watch: Watch
) -> Path:
    """Return a folder with the hub's files that match ``patterns``; InputError with the reason."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name,
            repo_type=repo_type,
            revision=revision,
            allow_patterns=list(patterns),
            tqdm_class=bar_for(watch),
        )
        return Path(folder)
    # Refusals, proxies, timeouts, full disks: each layer below raises its own errors.
    except Exception as error:
        raise InputError(f"{name}: {failure_reason(error, repo_type, name, revision)}") from None


@dataclass(frozen=True)
class NeededFiles:
    """The files of a repository that are needed.

    Attributes:
        patterns: of all these files.
        missing: bytes of each file that is not in the local cache.
        lacks_index: the index of the weights is missing, so that weights may be included that it
            does not name.
    """

    patterns: list[str]
    missing: dict[str, int]
    lacks_index: bool


def bytes_of(files: NeededFiles | None) -> int:
    """Return the bytes to download; 0 if the hub does not answer."""
    if files is None:
        return 0
    return sum(files.missing.values())


def missing_files(
    repo_type: RepoType, name: str, revision: str | None, patterns: Sequence[str], watch: Watch
) -> NeededFiles | None:
    """Return the files that match ``patterns``; InputError if the hub lacks a file.

    None if the hub does not answer and the local cache has all files.  ``watch`` receives a note if
    the repository has a new name.
    """
    from huggingface_hub import try_to_load_from_cache

    try:
        repository = look_up(repo_type, name, revision)
    except HubUnreachableError as error:
        reason = str(error).removeprefix(f"{name}: ")
        cached(repo_type, name, revision, patterns, f", and {reason}")
        return None
    if repository.id != name:
        watch.say(f"{name}: is {repository.id} on the hub now")
    sizes = {file.rfilename: file.size or 0 for file in repository.siblings or ()}

    def in_cache(file: str) -> Path | None:
        """Return the path of a file in the local cache; None if the cache lacks the file."""
        path = try_to_load_from_cache(name, file, None, repository.sha, repo_type)
        if isinstance(path, str):
            return Path(path)
        return None  # also for a note of the cache that the hub has no such file

    files = matching(sizes, patterns, in_cache(WEIGHTS_INDEX))
    check_available(name, files, sizes)
    names = set[str]()
    for matched in files.values():
        names.update(matched)
    missing = {}
    for file in sorted(names):
        if in_cache(file) is None:
            missing[file] = sizes[file]
    # The weights by their names: the pattern would fetch other copies of them too.
    exact = [pattern for pattern in patterns if pattern != WEIGHTS]
    exact += [glob.escape(file) for file in files.get(WEIGHTS, ())]
    return NeededFiles(exact, missing, lacks_index=WEIGHTS in patterns and WEIGHTS_INDEX in missing)


def check_available(name: str, files: Mapping[str, Sequence[str]], names: Iterable[str]) -> None:
    """InputError if a repository with files of these ``names`` lacks a needed file.

    ``files``: pattern -> the names that match it, in the order of the patterns.  A pattern without
    ``*`` is the name of a needed file, and weights are needed if ``WEIGHTS`` is a pattern.  The
    others may match nothing, as long as the repository has a file for any pattern.
    """
    if WEIGHTS in files and not files[WEIGHTS]:
        hint = ""
        for file in names:
            if file.lower().endswith(".gguf"):
                hint = f'; with "load_fn": "llamacpp" {name}/{file} can be measured'
                break
        raise InputError(f"{name}: no .safetensors files; compare_q loads no pickled weights{hint}")
    is_empty = not any(files.values())
    for pattern, matched in files.items():
        is_needed = "*" not in pattern
        if is_empty or (is_needed and not matched):
            raise InputError(f"{name}: no file {pattern} on the hub{nearest(pattern, names)}")


def cached(
    repo_type: RepoType, name: str, revision: str | None, patterns: Sequence[str], why: str = ""
) -> Path:
    """Return the folder of a repository in the local cache.

    InputError, ending with ``why``, if a file is missing.
    """
    from huggingface_hub import snapshot_download

    def in_cache(allowed: Sequence[str], ignored: Sequence[str] = ()) -> Path:
        """Return the folder; an error of the client if a file that it knows of is missing."""
        folder = snapshot_download(
            name,
            repo_type=repo_type,
            revision=revision,
            allow_patterns=list(allowed),
            ignore_patterns=list(ignored),
            local_files_only=True,
        )
        return Path(folder)

    how_much = "only partly"
    try:
        # First without weights: the index, if there is one, names the files of the weights, which
        # the second call then checks.
        folder = in_cache([pattern for pattern in patterns if pattern != WEIGHTS])
        if WEIGHTS in patterns:
            in_cache(*expected(folder))
        if has_needed_files(folder, patterns):
            return folder
    except Exception as error:  # also for a name that the client refuses
        if "incomplete" not in str(error):
            how_much = "not"
    raise InputError(f"{name}: {how_much} in the local cache{why}")


def has_needed_files(folder: Path, patterns: Sequence[str]) -> bool:
    """True if any pattern has a file, and each exact name and ``WEIGHTS`` have one."""
    n_matched = 0
    for pattern in patterns:
        if any(folder.glob(pattern)):
            n_matched += 1
        elif "*" not in pattern or pattern == WEIGHTS:
            return False
    return n_matched > 0


def look_up(repo_type: RepoType, name: str, revision: str | None, *, files: bool = True) -> Any:
    """Return ``huggingface_hub``'s description of a repository.

    It has ``id``, ``sha`` and, unless ``files`` is False, the sizes of the files: a large data set
    has many.  Raises InputError with the reason in one line, HubUnreachableError if the hub does
    not begin to answer in time (HF_HUB_ETAG_TIMEOUT, else 4 s).
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError

    began = time.monotonic()
    if constants.HF_HUB_OFFLINE:
        raise HubUnreachableError(f"{name}: HF_HUB_OFFLINE is set")
    failed_at, reason = UNREACHABLE.get(constants.ENDPOINT, (-math.inf, ""))
    if began - failed_at < REMEMBERED_S:
        raise HubUnreachableError(f"{name}: {reason}")
    deadline = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 4)
    details: dict[str, Any] = {"expand": ["sha", "gated"]}
    if files:
        details = {"files_metadata": True}

    def ask() -> Any:
        repository: Any = HfApi().repo_info(
            name, repo_type=repo_type, revision=revision, timeout=deadline, **details
        )
        # The hub lists the files of a gated repository for everyone.
        if repository.gated:
            HfApi().auth_check(name, repo_type=repo_type)
        return repository

    # The end of a long list of files may take much longer than its beginning.
    answer = answer_within(4 * deadline, ask)
    if not isinstance(answer, Exception):
        return answer
    reason = failure_reason(answer, repo_type, name, revision)
    status = getattr(getattr(answer, "response", None), "status_code", None)
    # 408, 429 and 5xx: the hub cannot answer now.  Any other status is its answer.
    is_refusal = status is not None and status not in (408, 429) and status < 500
    if is_refusal or isinstance(answer, HFValidationError):
        raise InputError(f"{name}: {reason}")
    if status is None:
        is_late = time.monotonic() - began >= deadline
        if is_late:
            reason = f"no answer within {deadline:g} s; HF_HUB_ETAG_TIMEOUT sets another number"
        reason = f"{constants.ENDPOINT} cannot be reached ({reason})"
        if is_late:
            UNREACHABLE[constants.ENDPOINT] = (time.monotonic(), reason)
    raise HubUnreachableError(f"{name}: {reason}")


def answer_within(seconds: float, request: Callable[[], Any]) -> Any:
    """Return the result of ``request`` or its exception; TimeoutError() if it takes longer.

    The request runs in a thread, because the HTTP client has no time limit for DNS.
    """
    answers: list[Any] = [TimeoutError()]

    def run() -> None:
        try:
            answers.append(request())
        except Exception as error:  # of the hub, the client and the layers below it
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[-1]


@contextmanager
def offline() -> Iterator[None]:
    """In the block, ``huggingface_hub`` and ``datasets`` use only their caches, not the hub."""
    import datasets
    from huggingface_hub import constants

    modules: list[Any] = [constants, datasets.config]
    previous = [module.HF_HUB_OFFLINE for module in modules]
    for module in modules:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(modules, previous, strict=True):
            module.HF_HUB_OFFLINE = value


def bar_for(watch: Watch) -> type[Any]:
    """Return a class of progress bars that draw nothing, and pass numbers of bytes to ``watch``.

    The client makes several bars in bytes; the last of these counts the bytes that are written.
    """
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        written: Any = None

        def __init__(
            self, *_: object, total: float | None = None, unit: str = "", **__: object
        ) -> None:
            super().__init__(total=total, disable=True)  # type: ignore[no-untyped-call]
            if unit == "B":
                Bar.written = self

        def update(self, n: float | None = 1) -> None:
            if self is Bar.written:
                watch.advance(int(n or 0))

    return Bar


def failure_reason(
    error: BaseException, repo_type: RepoType, name: str, revision: str | None
) -> str:
    """Return the reason of a failure with a repository, and what to do, in one line."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{name}"
    if repo_type == "dataset":
        page = f"{constants.ENDPOINT}/datasets/{name}"
    for cause in causes_of(error):
        if isinstance(cause, errors.GatedRepoError):
            return f"gated on the hub: accept its licence at {page}, then sign in ({SIGN_IN})"
        if isinstance(cause, errors.RevisionNotFoundError):
            return f"no revision {revision!r} of it on the hub; see {page}"
        if isinstance(cause, errors.RepositoryNotFoundError):
            return f"not on the hub, or private; check the name, or sign in ({SIGN_IN})"
        if isinstance(cause, errors.EntryNotFoundError):
            continue
        if isinstance(cause, errors.HfHubHTTPError):
            return f"{page} answers {cause.response.status_code}: {one_line(cause)}"
    return one_line(error)


def causes_of(error: BaseException) -> list[BaseException]:
    """Return an error and its causes, from the direct one on; at most nine errors."""
    causes = [error]
    while len(causes) < 9:
        cause = causes[-1].__cause__ or causes[-1].__context__
        if cause is None:
            break
        causes.append(cause)
    return causes
