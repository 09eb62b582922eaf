"""``model_dir`` and ``tokenizer_dir`` -> a folder: on disk, in the Hugging Face cache, or downloaded from the hub.

Data sets and GGUF files take the same way (``fetch``): one question to the hub, with a deadline, says what there is and
how large it is; then the client downloads what its cache lacks.  Where the hub cannot be asked the cache has to do.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.common.errors import InputError, NoSafetensorsError
from backends.common.messages import bytes_in_words, nearest, one_line
from backends.common.watch import SILENT, Watch
from backends.hub import client
from backends.hub.client import HubAwayError

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py", "tokenizer*"]
"""Patterns of everything that AutoTokenizer may read; code only runs where a spec trusts it."""


@dataclass(frozen=True)
class Repo:
    """What the hub says of one revision of a repository: ``sizes`` are the bytes of its files."""

    kind: str
    name: str
    id: str
    commit: str
    sizes: Mapping[str, int]

    def wanted(self, patterns: Sequence[str]) -> list[str]:
        """The files that match one of the patterns."""
        return [name for name in self.sizes if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]

    def missing(self, patterns: Sequence[str]) -> int:
        """Bytes of the files that match and are not in the local cache."""
        from huggingface_hub import try_to_load_from_cache

        def cached(file: str) -> bool:
            return isinstance(try_to_load_from_cache(self.name, file, None, self.commit, self.kind), str)

        return sum(self.sizes[file] for file in self.wanted(patterns) if not cached(file))


def is_hub_id(name: str) -> bool:
    """Whether ``name`` can be a hub id (``owner/model``): it is no existing path and does not look like one."""
    return HUB_ID.fullmatch(name) is not None and "/" in name and not Path(name).exists()


def resolve(
    name: str, revision: str | None, *, tokenizer_only: bool = False, download: bool = True, watch: Watch = SILENT
) -> Path:
    """Folder of a local path or hub id; with ``download`` off only what is on disk is looked at.

    Raises InputError with the reason in one line.  Never fetches pickled weights.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not is_hub_id(name):
        named = "" if "/" in name else "; a model on the hub is named owner/name"
        raise InputError(f"{name}: no such folder{named}")
    if not download:
        return cached("model", name, revision, patterns_of(tokenizer_only=tokenizer_only), "")
    return fetch("model", name, revision, patterns_of(tokenizer_only=tokenizer_only), watch)


def patterns_of(*, tokenizer_only: bool) -> list[str]:
    """Which files of a model are fetched."""
    return TOKENIZER_FILES if tokenizer_only else [*TOKENIZER_FILES, "*.safetensors"]


def probe(
    name: str, revision: str | None = None, patterns: Sequence[str] = (*TOKENIZER_FILES, "*.safetensors"), *,
    kind: str = "model",
) -> str:  # fmt: skip
    """What fetching from the hub would mean: ``16.1 GB to download`` or ``in the local cache``; downloads nothing.

    Raises InputError with the reason in one line if it cannot be had; HubAwayError, one of them, if the hub cannot be
    asked and the files are not in the local cache.
    """
    try:
        missing = check(ask(kind, name, revision), patterns).missing(patterns)
    except HubAwayError as error:
        cached(kind, name, revision, patterns, str(error).removeprefix(f"{name}: "))
        missing = 0
    return f"{bytes_in_words(missing)} to download" if missing else "in the local cache"


def fetch(kind: str, name: str, revision: str | None, patterns: Sequence[str], watch: Watch = SILENT) -> Path:
    """Folder with a repository's files that match ``patterns``; what is in the local cache is not fetched again.

    ``kind``: "model" or "dataset".  Raises InputError with the reason in one line.
    """
    try:
        repo = check(ask(kind, name, revision), patterns)
    except HubAwayError as error:
        return cached(kind, name, revision, patterns, str(error).removeprefix(f"{name}: "))
    if repo.id != name:
        watch.say(f"{name}: is {repo.id} on the hub now")
    missing = repo.missing(patterns)
    watch.expect(missing)
    if missing:
        watch.say(f"{name}: {bytes_in_words(missing)} to download")
        check_room(name, missing)
    from huggingface_hub import snapshot_download

    shown = watch is not SILENT  # else the client's own bars are all that there is
    try:
        with client.heard(watch, name) if shown else nullcontext():
            folder = snapshot_download(
                name, repo_type=kind, revision=revision, allow_patterns=list(patterns),
                tqdm_class=client.meter(watch) if shown else None,
            )  # fmt: skip
    except Exception as error:  # refusals, proxies, timeouts, full disks: each layer below raises its own
        raise InputError(f"{name}: {client.reason(error, page(kind, name), revision)}") from None
    return Path(folder)


def ask(kind: str, name: str, revision: str | None, *, files: bool = True) -> Repo:
    """What the hub has under a name; InputError with the reason in one line, HubAwayError if it cannot be asked now.

    ``files`` off: without its files and their sizes, which make a long answer for a large data set.
    """
    if why := client.away():
        raise HubAwayError(f"{name}: {why}")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    try:
        found: Any = HfApi().repo_info(
            name, repo_type=kind, revision=revision, timeout=client.patience(),
            **({"files_metadata": True} if files else {"expand": ["sha", "gated"]}),
        )  # fmt: skip
        if found.gated:  # anybody may ask what there is, not everybody may have it
            HfApi().auth_check(name, repo_type=kind)
        sizes = {each.rfilename: each.size or 0 for each in found.siblings or ()}
        return Repo(kind, name, found.id, found.sha or "", sizes)
    except Exception as error:  # the hub's answers, and whatever the layers below the client raise
        why = client.reason(error, page(kind, name), revision)
        status = getattr(getattr(error, "response", None), "status_code", None)
        known = status is not None and status not in (408, 429) and status < 500
        final = known or isinstance(error, HFValidationError)
        raise (InputError if final else HubAwayError)(f"{name}: {why}") from None


def check(repo: Repo, patterns: Sequence[str]) -> Repo:
    """The repository; InputError if it lacks what is wanted."""
    for pattern in patterns:
        if pattern == "*.safetensors" and not repo.wanted([pattern]):
            raise NoSafetensorsError(repo.name, list(repo.sizes))
        if "*" not in pattern and pattern not in repo.sizes:
            raise InputError(f"{repo.name}: no file {pattern} on the hub{nearest(pattern, repo.sizes)}")
    if not repo.wanted(patterns):
        raise InputError(f"{repo.name}: no file {' or '.join(patterns)} on the hub")
    return repo


def cached(kind: str, name: str, revision: str | None, patterns: Sequence[str], why: str) -> Path:
    """Folder of a repository in the local cache; ``why`` the hub is not asked."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                name, repo_type=kind, revision=revision, allow_patterns=list(patterns), local_files_only=True
            )
        )
    except LocalEntryNotFoundError as error:
        partly = "only partly" if "incomplete" in str(error) else "not"
        and_why = f", and {why}" if why else ""
        raise (HubAwayError if why else InputError)(f"{name}: {partly} in the local cache{and_why}") from None
    except Exception as error:
        raise InputError(f"{name}: {one_line(error)}") from None
    lacking = [each for each in patterns if not any(folder.glob(each))]
    if "*.safetensors" in lacking or len(lacking) == len(patterns) or any("*" not in each for each in lacking):
        and_why = f", and {why}" if why else ""
        raise (HubAwayError if why else InputError)(f"{name}: only partly in the local cache{and_why}")
    return folder


def page(kind: str, name: str) -> str:
    """Address of a repository for people."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"


def check_room(name: str, size: int) -> None:
    """InputError if the disk of the hub's cache has no room for ``size`` bytes."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free < size:
        raise InputError(
            f"{name}: {bytes_in_words(size)} to download, but {cache} has room for {bytes_in_words(free)}; "
            "HF_HOME names another place for the hub's cache"
        )
