"""The tokens behind the ids: the tokenizers of text, reference and models must agree, or no number means anything."""

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
    """Transformers' tokenizer of a folder; InputError if there is none."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers, sentencepiece and Transformers each raise their own
        raise InputError(f"tokenizer_dir: {folder}: no usable tokenizer: {one_line(error)}") from None


def plain_tokens(tokenizer: Any, seen: Iterable[int] = NONE) -> dict[int, str]:
    """Id -> token, without added special tokens but for those in ``seen``.

    A model that never sees a special token needs no logit for it: a text model may come with the tokenizer of a
    multimodal model, whose image token lies outside the text model's vocabulary.  Conversations do show it some.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special} - set(seen)
    return {number: token for token, number in tokenizer.get_vocab().items() if number not in special}


def digest(vocabulary: Mapping[int, str]) -> str:
    """SHA-256 of a vocabulary's ids and tokens."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


@cache
def of_folders(*wanted: tuple[Path, bool], seen: frozenset[int] = NONE) -> tuple[Mapping[int, str] | None, ...]:
    """The vocabularies of the tokenizers in some folders, by Transformers in a process of its own; None: has none.

    ``wanted``: folder, and whether its tokenizer may run code.  ``seen``: as for ``plain_tokens``.
    """
    named = [(str(folder), trusted) for folder, trusted in wanted]
    read = processes.run_in_subprocess(
        pairs_of, f"reading the tokenizer in {named[0][0]}", wanted=named, seen=sorted(seen)
    )
    return tuple(None if pairs is None else dict(pairs) for pairs in read)


def pairs_of(wanted: Sequence[tuple[str, bool]], seen: Sequence[int]) -> list[list[tuple[int, str]] | None]:
    """(id, token) of each folder's vocabulary; None where no tokenizer loads.  Imports Transformers."""
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
    """The vocabulary as tokenizer.json has it, with the marks of the config; None if it cannot be read so.

    For 49,152 tokens it takes 0.2 s, and ``of_folders`` 5 s.  Transformers may know more special tokens (one that the
    config names EOS), and so have fewer plain ones.
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
    """An id that means different tokens to a model's own vocabulary and to the data's tokenizer; empty if they agree.

    ``model``: its folder, or its vocabulary.  ``trusted``, ``data_trusted``: whether the two specs let their
    tokenizers run code.  ``seen``: ids of special tokens that count all the same where ``model`` is a folder (a model's
    own vocabulary does not tell its special tokens).  Ids that only one vocabulary has are no disagreement; a folder
    without a tokenizer has none.
    Where the files agree, Transformers need not be asked; only it says what a disagreement is.
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
    """The lowest id that means different tokens to two vocabularies; None if there is none."""
    return min((number for number in one.keys() & other.keys() if one[number] != other[number]), default=None)


def same_file(folder: Path, other: Path) -> bool:
    """Whether two folders hold the same tokenizer file: the usual case, without the second that loading takes."""
    mine, theirs = folder / FILE, other / FILE
    return mine.is_file() and theirs.is_file() and mine.read_bytes() == theirs.read_bytes()
