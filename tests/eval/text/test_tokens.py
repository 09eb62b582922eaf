"""Text -> tokens: bytes of each token, what the methods ask of a tokenizer beside the text's own tokens, and ordinary
tokens by their ids, which a model and the text must have alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs.reading import parse_data_spec
from compare_q.eval.specs.types import DataSpec
from compare_q.eval.text import corpus, tokens, vocabulary, windows
from compare_q.eval.text.tokens import Chat, Requests, Tokens
from tests.support.flips import flips
from tests.support.toy import save_toy_tokenizer

END = 256
"""The toy tokenizer's one special token, <|end|>, which is also its EOS."""


def spec(folder: Path, method: str = "exllamav3", **keys: Any) -> DataSpec:
    base = {"tokenizer_dir": "t", "dataset": "text", "path": "a.txt", "eval_len": 4, "method": method}
    return parse_data_spec({**base, "eval_stride": 2 if method == "exllamav3" else None, **keys}, folder / "d.json")


def tokenized(folder: Path, tokenizer: Path, text: str, method: str = "exllamav3", **keys: Any) -> Tokens:
    (folder / "a.txt").write_text(text)
    data, progress = spec(folder, method, **keys), Progress(quiet=True)
    return tokens.tokenize(corpus.load_texts(data, progress), tokenizer, data, progress)


@pytest.fixture
def with_bos(tmp_path: Path) -> Path:
    """The toy tokenizer with a BOS, id 257, before each text; its config does not say so."""
    return templated(tmp_path / "bos", "<|bos|> $A")


def templated(folder: Path, single: str) -> Path:
    from tokenizers import Tokenizer, processors

    folder.mkdir()
    save_toy_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|bos|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<|bos|>", END + 1), ("<|end|>", END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"bos_token": "<|bos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("text", "offsets", "gold"),
    [
        ("abc", [(0, 1), (1, 3)], [1, 2]),
        ("aé€😀", [(0, 1), (1, 2), (2, 3), (3, 4)], [1, 2, 3, 4]),
        ("😀a", [(0, 1), (0, 1), (0, 1), (1, 2)], [4, 0, 0, 1]),  # one character in three byte-level tokens
        ("ab", [(0, 0), (0, 1), (1, 2)], [0, 1, 1]),  # BOS
        ("ab", [(0, 1), (1, 2), (0, 0)], [1, 1, 0]),  # EOS
        ("ab", [(0, 1), (0, 0), (1, 2)], [1, 0, 1]),  # a special token in the middle
        ("\x7f\x80\u07ff\u0800\uffff\U00010000", [(i, i + 1) for i in range(6)], [1, 2, 2, 3, 3, 4]),
        ("a  b ", [(0, 1), (3, 4)], [1, 4]),  # white space that no token stands for: with the next one, or the last
        ("", [], []),
    ],
)
def test_byte_sizes(text: str, offsets: list[tuple[int, int]], gold: list[int]) -> None:
    assert tokens.byte_sizes(text, offsets).tolist() == gold


def test_bytes_of_a_real_tokenizer(tmp_path: Path, with_bos: Path) -> None:
    """A byte-level token is a byte, but of a character's several tokens the first has all."""
    found = tokenized(tmp_path, with_bos, "aé😀 b\n")
    assert found.sizes.tolist() == [0, 1, 2, 0, 4, 0, 0, 0, 1, 1, 1]
    assert (found.n_bytes, found.n_words) == (10, 3)
    assert found.ends.tolist() == [11]


def test_special_tokens_in_the_text_are_text_for_llamacpp(tmp_path: Path, with_bos: Path) -> None:
    text = "a<|end|><|bos|>b"
    assert tokenized(tmp_path, with_bos, text).ids[1:].tolist()[1:3] == [END, END + 1]
    found = tokenized(tmp_path, with_bos, text, "llamacpp")
    assert len(found.ids) == 1 + len(text)
    assert not {END, END + 1} & set(found.ids[1:].tolist())


def test_lm_eval_tokenizes_documents_by_themselves(tmp_path: Path, with_bos: Path) -> None:
    """Each with its BOS, but for the one whose text begins with it; empty ones count a word, as in lm-eval."""
    rows = ["ab c", "", "<|bos|>d", None, " \n"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    found = tokenized(tmp_path, with_bos, "", "lm_eval", path="a.jsonl")
    bos, byte = END + 1, dict(zip("ab cd\n", tokenized(tmp_path, with_bos, "ab cd\n").ids[1:].tolist(), strict=True))
    first, last = [bos, *(byte[letter] for letter in "ab c")], [bos, byte[" "], byte["\n"]]
    assert found.ids.tolist() == [*first, bos, bos, byte["d"], *last]
    assert (found.lead, found.ends.tolist()) == (bos, [5, 6, 8, 11])
    assert found.sizes.tolist() == [0, 1, 1, 1, 1, 0, 7, 1, 0, 1, 1]
    assert (found.n_bytes, found.n_words) == (4 + 0 + 8 + 2, 2 + 1 + 1 + 2)


NUMBERS = np.array([0, 1], np.int32)
KINDS = {
    "text": {},
    "conversations": {"chat": Chat(np.array([True, False]), "rendered prefixes", 0, "t")},
    "requests": {"requests": Requests(NUMBERS, NUMBERS, np.array([True, False]), NUMBERS, "task", 0)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_of_kept_tokens_makes_them_again(tmp_path: Path, kind: str) -> None:
    """A flipped bit in the name of the array that says which tokens are scored had the whole conversation scored."""
    cache = Cache(tmp_path)
    with cache.write("tokens", "k", ".npz") as file:
        tokens.save(file, Tokens(NUMBERS, NUMBERS, 9, "words", **KINDS[kind]))
    for _, position in flips([cache.path("tokens", "k", ".npz")], seed=6):
        assert tokens.load(cache, "k") is None, position
    assert tokens.load(cache, "k") is not None


@pytest.mark.parametrize(
    ("page", "gold"),
    [
        ("8 @,@ 600 well @-@ known , 3 @.@ 5", "8,600 well-known, 3.5"),
        ("a : b ; c . d ! e ? f , g", "a: b; c. d! e? f, g"),
        ("( a ) [ b ] { c }", "(a) [b] {c}"),
        ('he said " no " .', 'he said "no" .'),
        ("the dogs ' food", "the dogs' food"),
        (" = A = \n = = B = = \n = = = C = = = ", " = A =\n== B ==\n=== C === "),
        ("20 ° C , 5 N north", "20°C, 5 1 north"),
        ("/' 9/ and 99", "/'[0-9]/ and 99"),
    ],
)
def test_pages_of_wikitext(page: str, gold: str) -> None:
    assert tokens.detokenized(page) == gold


Change = Callable[[dict[str, Any]], None]
A, B = 64, 65  # ids of "a" and "b" in the toy tokenizer: the bytes' letters in sorted order, "!" being 0


def toy_tokenizer(folder: Path, change: Change = lambda content: None, indent: int | None = None) -> Path:
    """The toy tokenizer in a folder of its own, its tokenizer.json changed."""
    folder.mkdir()
    save_toy_tokenizer(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content, indent=indent))
    return folder


def swap(content: dict[str, Any]) -> None:
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def added(number: int, token: str, *, special: bool) -> Change:
    """Adds a token."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return lambda content: content["added_tokens"].append({"id": number, "content": token, **flags})


def loaded(folder: Path) -> dict[int, str]:
    return vocabulary.plain_tokens(vocabulary.load_tokenizer(folder, trust_remote_code=False))


def disagreement(model: Path, data: Path) -> str:
    return vocabulary.disagreement(model, data, trusted=False, data_trusted=False)


def renamed(content: dict[str, Any]) -> None:
    """Another name of the one special token."""
    content["added_tokens"][0]["content"] = "<|stop|>"


@pytest.mark.parametrize(
    ("data", "model", "config", "gold"),
    [
        ("same", "same", {}, ""),
        ("same", "swapped", {}, f"token {A} is 'b' in {{model}} and 'a' in {{data}}"),
        ("same", "word", {}, ""),
        ("Wort", "word", {}, "token 257 is 'word' in {model} and 'Wort' in {data}"),
        ("same", "renamed", {"eos_token": "<|stop|>"}, ""),
        ("same", "other a", {}, f"token {A} is '\u0100\u0100' in {{model}} and 'a' in {{data}}"),
    ],
)
def test_disagreements(tmp_path: Path, data: str, model: str, config: dict[str, str], gold: str) -> None:
    def other_a(content: dict[str, Any]) -> None:
        content["model"]["vocab"]["\u0100\u0100"] = content["model"]["vocab"].pop("a")

    changes: dict[str, Change] = {
        "same": lambda content: None, "swapped": swap, "renamed": renamed, "other a": other_a,
        "word": added(257, "word", special=False), "Wort": added(257, "Wort", special=False),
    }  # fmt: skip
    folders = [toy_tokenizer(tmp_path / side, changes[kind]) for side, kind in (("data", data), ("model", model))]
    file = folders[1] / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    assert disagreement(folders[1], folders[0]) == gold.format(data=folders[0], model=folders[1])


def test_special_tokens_that_a_conversation_holds(tmp_path: Path) -> None:
    """Control tokens in another order, under the same ordinary tokens."""
    names = ["<|user|>", "<|stop|>"]
    data, model = (
        toy_tokenizer(
            tmp_path / folder,
            lambda content, named=named: [
                added(257 + at, name, special=True)(content) for at, name in enumerate(named)
            ],
        )
        for folder, named in (("data", names), ("model", names[::-1]))
    )
    assert disagreement(model, data) == ""
    for seen, gold in (({A, 256}, ""), ({A, 258}, f"token 258 is '<|user|>' in {model} and '<|stop|>' in {data}")):
        found = vocabulary.disagreement(model, data, trusted=False, data_trusted=False, seen=frozenset(seen))
        assert found == gold


def in_config(number: int, token: str, *, special: bool) -> dict[str, Any]:
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"added_tokens_decoder": {str(number): {"content": token, "special": special, **flags}}}


@pytest.mark.parametrize(
    ("change", "config", "n_plain"),
    [
        (swap, {}, 256),
        (added(257, "<image>", special=True), {}, 256),
        (added(257, "word", special=False), {}, 257),
        (added(257, "word", special=False), in_config(257, "word", special=True), 256),
        (lambda content: None, {"bos_token": "<s>", "additional_special_tokens": ["<x>"]}, 256),
        (lambda content: content["model"].update(byte_fallback=True), {"tokenizer_class": "LlamaTokenizer"}, 256),
    ],
)
def test_a_tokenizer_file_says_what_transformers_says(
    tmp_path: Path, change: Change, config: dict[str, Any], n_plain: int
) -> None:
    """Ordinary tokens: one a byte, and added ones that are not special."""
    folder = toy_tokenizer(tmp_path / "a", change)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    found = vocabulary.of_file(folder)
    assert found == loaded(folder)
    assert len(found) == n_plain


def test_identity_follows_every_chat_template(tmp_path: Path) -> None:
    """The tokenizer takes the default of the additional ones, so a plain text's chat prefix depends on it."""
    (tmp_path / "a.txt").write_text("ab\n")
    save_toy_tokenizer(tmp_path)
    data = spec(tmp_path, chat_template=True)
    seen = [windows.identity(data, tmp_path)]
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    for text in ("one", "two"):
        (folder / "default.jinja").write_text(text)
        assert vocabulary.load_tokenizer(tmp_path, trust_remote_code=False).chat_template == text
        seen.append(windows.identity(data, tmp_path))
    (folder / "default.jinja").rename(tmp_path / "default.jinja")  # which no tokenizer reads
    seen.append(windows.identity(data, tmp_path))
    assert len({each["tokenizer"] for each in seen}) == 4
