"""The files of a tokenizer, which go from a model folder to every folder that is made of it."""

from __future__ import annotations

import shutil
from pathlib import Path


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy the tokenizer's files from one model folder to another."""
    for file in [*source.glob("*token*"), *source.glob("chat_template*")]:
        shutil.copy(file, out)
