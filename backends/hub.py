"""``model_dir`` and ``tokenizer_dir`` -> a folder: on disk, in the Hugging Face cache, or downloaded from the hub."""

from __future__ import annotations

import re
from pathlib import Path

from backends.base import InputError
from backends.messages import one_line

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py", "tokenizer*"]
"""Patterns of everything that AutoTokenizer may read; code only runs where a spec trusts it."""


def is_hub_id(name: str) -> bool:
    """Whether ``name`` can be a hub id (``owner/model``): it is no existing path and does not look like one."""
    return HUB_ID.fullmatch(name) is not None and "/" in name and not Path(name).exists()


def resolve(name: str, revision: str | None, *, tokenizer_only: bool = False, download: bool = True) -> Path:
    """Folder of a local path or hub id; with ``download`` off only what is on disk is looked at.

    Raises InputError with the reason in one line.  Never fetches pickled weights.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not is_hub_id(name):
        raise InputError(f"{name}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = TOKENIZER_FILES if tokenizer_only else [*TOKENIZER_FILES, "*.safetensors"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=not download))
    except LocalEntryNotFoundError:
        where = "on the hub (is it reachable?) nor in the local cache" if download else "on disk or in the local cache"
        raise InputError(f"{name}: neither a folder nor found {where}") from None
    except Exception as error:  # refusals, proxies, timeouts, full disks: each layer below raises its own
        raise InputError(f"{name}: the hub refused it: {one_line(error)}") from None
