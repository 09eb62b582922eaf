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
from typing import Any, Literal

from backends.common.errors import InputError, NoSafetensorsError
from backends.common.json_files import expanded, is_folder
from backends.common.messages import bytes_in_words, nearest, one_line
from backends.common.watch import SILENT, Watch
from backends.hub import client
from backends.hub.client import HubAwayError

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py", "tokenizer*"]
"""Patterns of everything that AutoTokenizer may read; code only runs where a spec trusts it."""
MODEL_FILES = [*TOKENIZER_FILES, "*.safetensors"]
"""Patterns of the files of a model that are fetched."""


RepoType = Literal["model", "dataset"]
"""What the hub's client calls the two sorts of repositories that are used here."""


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

        def cached(file: str) -> bool:
            return isinstance(try_to_load_from_cache(self.name, file, None, self.commit, self.repo_type), str)

        return sum(self.sizes[file] for file in self.wanted(patterns) if not cached(file))


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
        check_room(name, missing)
    from huggingface_hub import snapshot_download

    shown = watch is not SILENT  # otherwise the client's own bars are all that a user sees
    try:
        with client.warnings_told(watch, name) if shown else nullcontext():
            folder = snapshot_download(
                name, repo_type=repo_type, revision=revision, allow_patterns=list(patterns),
                tqdm_class=client.bar_for(watch, missing) if shown else None,
            )  # fmt: skip
    except Exception as error:  # refusals, proxies, timeouts, full disks: each layer below raises its own
        raise InputError(
            f"{name}: {client.failure_reason(error, repository_page(repo_type, name), revision)}"
        ) from None
    return Path(folder)


def look_up(repo_type: RepoType, name: str, revision: str | None, *, files: bool = True) -> Repo:
    """What the hub has under a name; InputError with the reason in one line, HubAwayError if the hub cannot be asked.

    ``files`` off: ``Repo.sizes`` stays empty, since the sizes of all files make a long answer for a large data set.
    """
    if why := client.why_away():
        raise HubAwayError(f"{name}: {why}")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    client.bound_answers()
    try:
        found: Any = HfApi().repo_info(
            name, repo_type=repo_type, revision=revision, timeout=client.deadline_s(),
            **({"files_metadata": True} if files else {"expand": ["sha", "gated"]}),
        )  # fmt: skip
        if found.gated:  # anybody may ask what there is, not everybody may have it
            HfApi().auth_check(name, repo_type=repo_type)
        sizes = {each.rfilename: each.size or 0 for each in found.siblings or ()}
        if not all(type(each) is int and each >= 0 for each in sizes.values()):
            raise ValueError("the hub's answer has sizes that are no numbers")
        return Repo(repo_type, name, str(found.id), str(found.sha or ""), sizes)
    except Exception as error:  # the hub's answers, and whatever the layers below the client raise
        why = client.failure_reason(error, repository_page(repo_type, name), revision)
        status = getattr(getattr(error, "response", None), "status_code", None)
        known = status is not None and status not in (408, 429) and status < 500
        final = known or isinstance(error, HFValidationError)
        raise (InputError if final else HubAwayError)(f"{name}: {why}") from None


def checked(repo: Repo, patterns: Sequence[str]) -> Repo:
    """The same repository; InputError if it lacks a file that is wanted."""
    for pattern in patterns:
        if pattern == "*.safetensors" and not repo.wanted([pattern]):
            raise NoSafetensorsError(repo.name, list(repo.sizes))
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

    try:
        folder = Path(
            snapshot_download(
                name, repo_type=repo_type, revision=revision, allow_patterns=list(patterns), local_files_only=True
            )
        )
    except LocalEntryNotFoundError as error:
        raise not_cached(name, "only partly" if "incomplete" in str(error) else "not", why) from None
    except Exception as error:
        raise InputError(f"{name}: {one_line(error)}") from None
    lacking = [each for each in patterns if not any(folder.glob(each))]
    if "*.safetensors" in lacking or len(lacking) == len(patterns) or any("*" not in each for each in lacking):
        raise not_cached(name, "only partly", why)
    return folder


def not_cached(name: str, how_much: str, why: str) -> InputError:
    """The error for files "not" or "only partly" (``how_much``) in the local cache; ``why`` as in ``cached``."""
    and_why = f", and {why}" if why else ""
    return (HubAwayError if why else InputError)(f"{name}: {how_much} in the local cache{and_why}")


def repository_page(repo_type: RepoType, name: str) -> str:
    """Address of a repository's page for people."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{'datasets/' if repo_type == 'dataset' else ''}{name}"


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
