"""Check that text, reference and models use the same tokenizer.  Scores are not comparable otherwise."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from compare_q.backends.common import json_files
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import one_line
from compare_q.eval.common import processes

FILE = "tokenizer.json"
NONE: frozenset[int] = frozenset()


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """Load the tokenizer in a folder by Transformers; InputError if it cannot be loaded."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers, sentencepiece and Transformers each raise their own
        raise InputError(f"tokenizer_dir: {folder}: no usable tokenizer: {one_line(error)}") from None


def plain_tokens(tokenizer: Any, seen: Iterable[int] = NONE) -> dict[int, str]:
    """Return id -> token, without added special tokens except those in ``seen``.

    A model that never sees a special token needs no logit for it.  For example, a text model may have the tokenizer of
    a multimodal model, whose image token is not in the text model's vocabulary.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special} - set(seen)
    return {number: token for token, number in tokenizer.get_vocab().items() if number not in special}


def digest(vocabulary: Mapping[int, str]) -> str:
    """Return the SHA-256 of a vocabulary's ids and tokens."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


@cache
def of_folders(*wanted: tuple[Path, bool], seen: frozenset[int] = NONE) -> tuple[Mapping[int, str] | None, ...]:
    """Return the vocabularies of the tokenizers in some folders, by Transformers in a subprocess; None without one.

    ``wanted``: (folder, True if its tokenizer may run code).  ``seen``: as for ``plain_tokens``.
    """
    named = [(str(folder), trusted) for folder, trusted in wanted]
    read = processes.run_in_subprocess(
        pairs_of, f"reading the tokenizer in {named[0][0]}", wanted=named, seen=sorted(seen)
    )
    return tuple(None if pairs is None else dict(pairs) for pairs in read)


def pairs_of(wanted: Sequence[tuple[str, bool]], seen: Sequence[int]) -> list[list[tuple[int, str]] | None]:
    """Return (id, token) pairs of each folder's vocabulary; None if no tokenizer loads.  Imports Transformers."""
    vocabularies: list[list[tuple[int, str]] | None] = []
    for folder, trusted in wanted:
        try:
            tokenizer = load_tokenizer(Path(folder), trust_remote_code=trusted)
            vocabularies.append(list(plain_tokens(tokenizer, seen).items()))
        except InputError:
            vocabularies.append(None)
    return vocabularies


@cache
def of_file(folder: Path, seen: frozenset[int] = NONE) -> Mapping[int, str] | None:
    """Return the vocabulary in tokenizer.json, with the config's marks of special tokens; None if it cannot be read.

    This takes 0.2 s for 49,152 tokens, ``of_folders`` 5 s.  Transformers may know more special tokens, such as one that
    the config calls EOS, and then returns fewer plain tokens.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(json_files.read_bytes(folder / FILE))
        config = folder / "tokenizer_config.json"
        marks = json_files.read_object(config, strict=False) if config.is_file() else {}
        special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        special |= {int(number) for number, token in marks.get("added_tokens_decoder", {}).items() if token["special"]}
    except Exception:  # tokenizers raises bare Exception; the config may hold anything
        return None
    return {number: token for token, number in tokenizer.get_vocab().items() if number not in special - seen}


def disagreement(
    model: Path | Mapping[int, str],
    data_folder: Path,
    *,
    trusted: bool,
    data_trusted: bool,
    seen: frozenset[int] = NONE,
) -> str:
    """Describe an id that stands for different tokens in a model's vocabulary and in the data's tokenizer.

    Returns an empty string if they agree.  ``model``: its folder, or its vocabulary.  ``trusted``, ``data_trusted``:
    True if the spec trusts code.  ``seen``: ids of special tokens that are compared too if ``model`` is a
    folder.  Ids in only one of the vocabularies are ignored.  A folder without a tokenizer agrees with every other.
    The files are compared first; only Transformers can confirm a difference.
    """
    if isinstance(model, Path) and (same_file(model, data_folder) or not any(model.glob("tokenizer*"))):
        return ""
    if not (trusted or data_trusted):
        mine = of_file(model, seen) if isinstance(model, Path) else model
        theirs = of_file(data_folder, seen if isinstance(model, Path) else NONE)
        if mine is not None and theirs is not None and differing(mine, theirs) is None:
            return ""
    if isinstance(model, Path):
        mine, theirs = of_folders((model, trusted), (data_folder, data_trusted), seen=seen)
    else:
        mine, (theirs,) = model, of_folders((data_folder, data_trusted))
    if mine is None or theirs is None or (number := differing(mine, theirs)) is None:
        return ""
    where = str(model) if isinstance(model, Path) else "the model's own vocabulary"
    return f"token {number} is {mine[number]!r} in {where} and {theirs[number]!r} in {data_folder}"


def differing(one: Mapping[int, str], other: Mapping[int, str]) -> int | None:
    """Return the lowest id that stands for different tokens in two vocabularies; None if they agree."""
    return min((number for number in one.keys() & other.keys() if one[number] != other[number]), default=None)


def same_file(folder: Path, other: Path) -> bool:
    """Return True if two folders have the same tokenizer file, which saves loading it."""
    mine, theirs = folder / FILE, other / FILE
    return mine.is_file() and theirs.is_file() and mine.read_bytes() == theirs.read_bytes()
