"""The Hugging Face hub: ``model_dir`` and ``tokenizer_dir`` -> a folder on disk, in the hub's cache, or downloaded.

Data sets and GGUF files take the same way (``fetch``): one question to the hub, with a deadline, says what there is and
how large it is; then the client downloads what its cache lacks.  Where the hub cannot be asked the cache has to do.

On its own the client retries: without a network it gave up on a data set after 24 s where connections are refused, and
not within 130 s where nothing answers at all.  Here one request with a deadline asks first whether the hub answers.
"""

from __future__ import annotations

import errno
import fnmatch
import logging
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.json_files import expanded, is_file, is_folder
from compare_q.backends.common.messages import bytes_in_words, nearest, one_line

REMEMBERED_S = 60.0
"""Seconds for which an answer of ``why_away`` holds: a run of hours must notice that the network has come back."""
SIGN_IN = "`hf auth login` or HF_TOKEN"
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py", "tokenizer*"]
"""Patterns of everything that AutoTokenizer may read; code only runs where a spec trusts it."""
MODEL_FILES = [*TOKENIZER_FILES, "*.safetensors"]
"""Patterns of the files of a model that are fetched."""
_answers: dict[str, tuple[float, str]] = {}
"""Endpoint -> when it was asked (seconds of the monotonic clock), and why it cannot be reached ("" if it can)."""

RepoType = Literal["model", "dataset"]
"""What the hub's client calls the two sorts of repositories that are used here."""


class Watch(Protocol):
    """An object that is told of one download; calls may come from several threads, one call at a time."""

    def expect(self, total: int) -> None:
        """``total`` bytes will come."""
        return

    def advance(self, amount: int = 1) -> None:
        """``amount`` more bytes have come; negative where some have to come again."""
        return

    def say(self, text: str) -> None:
        """One line for the user."""
        return


class Silent(Watch):
    """A Watch that tells nobody."""


SILENT = Silent()


class HubAwayError(InputError):
    """The hub cannot be asked now; files in the local cache can still be used."""


def why_away() -> str:
    """Why the hub cannot be asked, or an empty string; takes at most ``deadline_s``, also where DNS never answers.

    The request runs in a thread, since a time limit of the HTTP client does not count the look-up of the host's name.
    """
    from huggingface_hub import constants, get_session

    endpoint = constants.ENDPOINT
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"

    def request() -> None:
        try:
            get_session().head(endpoint, timeout=2 * deadline_s(), follow_redirects=False)
            answers.append("")
        except Exception as error:  # the client's, the HTTP library's, proxies', TLS
            answers.append(f"{endpoint} cannot be reached ({one_line(error)})")

    when, why = _answers.get(endpoint, (-math.inf, ""))
    if time.monotonic() - when > REMEMBERED_S:
        late = f"no answer within {deadline_s():.0f} s; HF_HUB_ETAG_TIMEOUT sets another number"
        answers: list[str] = []
        thread = threading.Thread(target=request, daemon=True)
        thread.start()
        thread.join(deadline_s())
        why = answers[0] if answers else f"{endpoint} cannot be reached ({late})"
        _answers[endpoint] = time.monotonic(), why
    return why


def deadline_s() -> float:
    """Seconds within which the hub has to answer; HF_HUB_ETAG_TIMEOUT, the client's own variable, lengthens it."""
    return float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 4)


@dataclass(frozen=True)
class Repo:
    """What the hub says of one revision of a repository.

    ``name`` is the name in the spec, ``id`` its name on the hub now; ``sizes``: file -> bytes.
    """

    repo_type: RepoType
    name: str
    id: str
    commit: str
    sizes: Mapping[str, int]

    def wanted(self, patterns: Sequence[str]) -> list[str]:
        """Names of the files that match one of the patterns."""
        return [name for name in self.sizes if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]

    def missing(self, patterns: Sequence[str]) -> int:
        """Bytes of the files that match and are not in the local cache."""
        from huggingface_hub import try_to_load_from_cache

        here = {
            file: try_to_load_from_cache(self.name, file, None, self.commit, self.repo_type)
            for file in self.wanted(patterns)
        }
        return sum(self.sizes[file] for file, path in here.items() if not isinstance(path, str))


def is_hub_id(name: str) -> bool:
    """Whether ``name`` can be a hub id (``owner/model``): it is no existing path and does not look like one."""
    return HUB_ID.fullmatch(name) is not None and "/" in name and not Path(name).exists()


def resolve(
    name: str, revision: str | None, *, tokenizer_only: bool = False, download: bool = True, watch: Watch = SILENT
) -> Path:
    """Folder of a local path or hub id; with ``download`` off a hub id is looked for in the local cache only.

    Raises InputError with the reason in one line.  Never fetches pickled weights.
    """
    if not is_hub_id(name):
        return local_folder(name)
    patterns = TOKENIZER_FILES if tokenizer_only else MODEL_FILES
    if not download:
        return cached("model", name, revision, patterns, "")
    return fetch("model", name, revision, patterns, watch)


def local_folder(name: str) -> Path:
    """Folder of a local path; InputError if there is none.  The hub is never asked."""
    folder = expanded(name)
    if not is_folder(folder):
        if is_file(folder):
            hint = "; a GGUF file runs in llamacpp" if folder.suffix == ".gguf" else ""
            raise InputError(f"{name}: is a file, no folder{hint}")
        hint = "" if "/" in name else "; a model on the hub is named owner/name"
        raise InputError(f"{name}: no such folder{hint}")
    return folder


def would_fetch(
    name: str, revision: str | None = None, patterns: Sequence[str] = MODEL_FILES, *, repo_type: RepoType = "model"
) -> str:
    """What fetching from the hub would mean: ``16.1 GB to download`` or ``in the local cache``; downloads nothing.

    Raises InputError with the reason in one line if the files cannot be had; the InputError is a HubAwayError if the
    hub cannot be asked and the files are not in the local cache.
    """
    try:
        missing = checked(look_up(repo_type, name, revision), patterns).missing(patterns)
    except HubAwayError as error:
        cached(repo_type, name, revision, patterns, str(error).removeprefix(f"{name}: "))
        missing = 0
    return f"{bytes_in_words(missing)} to download" if missing else "in the local cache"


def fetch(repo_type: RepoType, name: str, revision: str | None, patterns: Sequence[str], watch: Watch = SILENT) -> Path:
    """Folder with a repository's files that match ``patterns``; files in the local cache are not fetched again.

    Raises InputError with the reason in one line.
    """
    from huggingface_hub import constants, snapshot_download

    try:
        repo = checked(look_up(repo_type, name, revision), patterns)
    except HubAwayError as error:
        return cached(repo_type, name, revision, patterns, str(error).removeprefix(f"{name}: "))
    if repo.id != name:
        watch.say(f"{name}: is {repo.id} on the hub now")
    missing = repo.missing(patterns)
    watch.expect(missing)
    if missing:
        watch.say(f"{name}: {bytes_in_words(missing)} to download")
        cache = Path(constants.HF_HUB_CACHE)
        free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
        if free < missing:
            raise InputError(
                f"{name}: {bytes_in_words(missing)} to download, but {cache} has room for {bytes_in_words(free)}; "
                "HF_HOME names another place for the hub's cache"
            )

    shown = watch is not SILENT  # otherwise the client's own bars are all that a user sees
    try:
        with warnings_told(watch, name) if shown else nullcontext():
            folder = snapshot_download(
                name, repo_type=repo_type, revision=revision, allow_patterns=list(patterns),
                tqdm_class=bar_for(watch) if shown else None,
            )  # fmt: skip
    except Exception as error:  # refusals, proxies, timeouts, full disks: each layer below raises its own
        raise InputError(f"{name}: {failure_reason(error, repository_page(repo_type, name), revision)}") from None
    return Path(folder)


def look_up(repo_type: RepoType, name: str, revision: str | None, *, files: bool = True) -> Repo:
    """What the hub has under a name; InputError with the reason in one line, HubAwayError if the hub cannot be asked.

    ``files`` off: ``Repo.sizes`` stays empty, since the sizes of all files make a long answer for a large data set.
    """
    if why := why_away():
        raise HubAwayError(f"{name}: {why}")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    try:
        found: Any = HfApi().repo_info(
            name, repo_type=repo_type, revision=revision, timeout=deadline_s(),
            **({"files_metadata": True} if files else {"expand": ["sha", "gated"]}),
        )  # fmt: skip
        if found.gated:  # anybody may ask what there is, not everybody may have it
            HfApi().auth_check(name, repo_type=repo_type)
        sizes = {each.rfilename: each.size or 0 for each in found.siblings or ()}
        return Repo(repo_type, name, str(found.id), str(found.sha or ""), sizes)
    except Exception as error:  # the hub's answers, and whatever the layers below the client raise
        why = failure_reason(error, repository_page(repo_type, name), revision)
        status = getattr(getattr(error, "response", None), "status_code", None)
        known = status is not None and status not in (408, 429) and status < 500
        final = known or isinstance(error, HFValidationError)
        raise (InputError if final else HubAwayError)(f"{name}: {why}") from None


def checked(repo: Repo, patterns: Sequence[str]) -> Repo:
    """The same repository; InputError if it lacks a file that is wanted."""
    for pattern in patterns:
        if pattern == "*.safetensors" and not repo.wanted([pattern]):
            file = next((name for name in repo.sizes if name.lower().endswith(".gguf")), "")
            cure = f'; with "load_fn": "llamacpp" {repo.name}/{file} can be measured' if file else ""
            raise InputError(f"{repo.name}: no .safetensors files; compare_q loads no pickled weights{cure}")
        if "*" not in pattern and pattern not in repo.sizes:
            raise InputError(f"{repo.name}: no file {pattern} on the hub{nearest(pattern, repo.sizes)}")
    if not repo.wanted(patterns):
        raise InputError(f"{repo.name}: no file {' or '.join(patterns)} on the hub")
    return repo


def cached(repo_type: RepoType, name: str, revision: str | None, patterns: Sequence[str], why: str) -> Path:
    """Folder of a repository in the local cache; InputError if a wanted file is not there.

    ``why``: the reason for which the hub was not asked, which makes the InputError a HubAwayError; "" if none is told.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    how_much = "only partly"
    try:
        folder = Path(
            snapshot_download(
                name, repo_type=repo_type, revision=revision, allow_patterns=list(patterns), local_files_only=True
            )
        )
        lacking = [pattern for pattern in patterns if not any(folder.glob(pattern))]
        needed = [pattern for pattern in lacking if "*" not in pattern or pattern == "*.safetensors"]
        if not needed and len(lacking) < len(patterns):
            return folder
    except LocalEntryNotFoundError as error:
        how_much = "only partly" if "incomplete" in str(error) else "not"
    except Exception as error:
        raise InputError(f"{name}: {one_line(error)}") from None
    and_why = f", and {why}" if why else ""
    raise (HubAwayError if why else InputError)(f"{name}: {how_much} in the local cache{and_why}")


def repository_page(repo_type: RepoType, name: str) -> str:
    """Address of a repository's page for people."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{'datasets/' if repo_type == 'dataset' else ''}{name}"


@contextmanager
def offline() -> Iterator[None]:
    """While it holds, both clients use the files in their caches, and do not ask the hub."""
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


@contextmanager
def warnings_told(watch: Watch, name: str) -> Iterator[None]:
    """While it holds, the client draws no bars, and its warnings (retries, waits) are told to ``watch``."""
    from huggingface_hub import utils

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            watch.say(f"{name}: {' '.join(record.getMessage().split())}")

    utils.disable_progress_bars()  # type: ignore[attr-defined]
    logger, ours = logging.getLogger("huggingface_hub"), Handler(logging.WARNING)
    before, logger.handlers = logger.handlers, [ours]
    try:
        yield
    finally:
        logger.handlers = before


def bar_for(watch: Watch) -> type[Any]:
    """The class of a bar for the client, which draws nothing, and tells ``watch`` how many bytes came.

    The client counts the bytes twice, as received and as written; ``watch`` is told the larger count.
    """
    from huggingface_hub.utils.tqdm import tqdm

    lock, counts = threading.Lock(), {0: 0.0}

    class Bar(tqdm):
        def __init__(self, *_: object, total: float | None = None, unit: str = "", **__: object) -> None:
            super().__init__(total=total, disable=True)  # type: ignore[no-untyped-call]
            self.counts_bytes = unit == "B"

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.counts_bytes:
                with lock:
                    before = max(counts.values())
                    counts[id(self)] = self.n
                    watch.advance(int(max(before, self.n)) - int(before))

    return Bar


def failure_reason(error: BaseException, page: str, revision: str | None) -> str:
    """What went wrong, in one line, and what to do; ``page`` is the repository's address."""
    from huggingface_hub import errors

    chain = [error]
    while len(chain) < 9 and (below := chain[-1].__cause__ or chain[-1].__context__):
        chain.append(below)
    for each in chain:
        response: Any = getattr(each, "response", None)
        status = getattr(response, "status_code", None)
        if isinstance(each, errors.GatedRepoError):
            signed_in = f"your account has no access yet; ask for it at {page}"
            not_signed_in = f"accept its licence at {page}, then sign in ({SIGN_IN})"
            return f"gated on the hub: {signed_in if status == 403 else not_signed_in}"
        if isinstance(each, errors.RevisionNotFoundError):
            return f"no revision {revision!r} of it on the hub; see {page}"
        if isinstance(each, errors.RepositoryNotFoundError):
            return f"not on the hub, or private; check the name, or sign in ({SIGN_IN})"
        if status == 401:
            return f"the hub does not know your token; sign in again ({SIGN_IN})"
        if status == 429:
            headers = response.headers
            seconds = headers.get("Retry-After") or headers.get("ratelimit", "").rpartition("t=")[2]
            later = f"in {seconds} s" if str(seconds).isdigit() else "later"
            return f"the hub limits how often you may ask; try again {later}, or sign in for a higher limit ({SIGN_IN})"
        if isinstance(each, OSError) and each.errno == errno.ENOSPC:
            return "no space left for it; HF_HOME names another place for the hub's cache"
        if isinstance(each, errors.HfHubHTTPError) and not isinstance(each, errors.EntryNotFoundError):
            return f"{page} answers {status}: the hub has a fault, or HF_ENDPOINT or a proxy leads to no hub"
    return one_line(error)
