"""Text -> tokens: the bytes of each token, the methods' additional tokens, and the check that a
model and a text have equal ordinary tokens.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from compare_q.backends.common.errors import InputError
from compare_q.backends.reference import pack_files
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs.spec_files import parse_data_spec
from compare_q.eval.specs.spec_types import DataSpec
from compare_q.eval.text import corpus, text_tokens, text_windows, vocabulary
from compare_q.eval.text.text_tokens import Chat, Tokens
from tests.support.flips import flips
from tests.support.toy import refusal, save_toy_tokenizer

END = 256
"""The toy tokenizer's one special token, <|end|>, which is also its EOS."""


def spec(folder: Path, method: str = "exllamav3", **keys: Any) -> DataSpec:
    base = {
        "tokenizer_dir": "t",
        "dataset": "text",
        "path": "a.txt",
        "eval_len": 4,
        "method": method,
    }
    return parse_data_spec(
        {**base, "eval_stride": 2 if method == "exllamav3" else None, **keys}, folder / "d.json"
    )


def tokenized(
    folder: Path, tokenizer: Path, text: str, method: str = "exllamav3", **keys: Any
) -> Tokens:
    (folder / "a.txt").write_text(text)
    data, progress = spec(folder, method, **keys), Progress(quiet=True)
    return text_tokens.tokenize(corpus.load_texts(data, progress), tokenizer, data, progress)


FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
ADDED = [
    {"id": 257, "content": "<|call|>", "special": True, **FLAGS},
    {"id": 258, "content": "plain", "special": False, **FLAGS},
]


@pytest.fixture
def with_bos(tmp_path: Path) -> Path:
    """The toy tokenizer with a BOS, id 257, before each text, which its config does not mention."""
    from tokenizers import Tokenizer, processors

    folder = toy_tokenizer(tmp_path / "bos", bos_token="<|bos|>")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|bos|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", END + 1), ("<|end|>", END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


Change = Callable[[dict[str, Any]], None]


def same(content: dict[str, Any]) -> None:
    """Change nothing."""


def toy_tokenizer(folder: Path, change: Change = same, **config: Any) -> Path:
    """Write the toy tokenizer into a folder, with a changed tokenizer.json and additional keys in
    its config.
    """
    folder.mkdir()
    save_toy_tokenizer(folder)
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    settings.write_text(json.dumps(json.loads(settings.read_text()) | config))
    return folder


ENDLESS = """
from transformers import PreTrainedTokenizer

class Endless(PreTrainedTokenizer):
    vocab_size = 1
    def get_vocab(self):
        return {"a": 0}
    def _tokenize(self, text):
        while True:
            pass
"""


def test_a_tokenizer_without_end_is_stopped(tmp_path: Path) -> None:
    """A long text has more time than a short one."""
    folder = tmp_path / "endless"
    folder.mkdir()
    (folder / "endless.py").write_text(ENDLESS)
    config = {
        "tokenizer_class": "Endless",
        "auto_map": {"AutoTokenizer": ["endless.Endless", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    data = spec(tmp_path, trust_remote_code=True)
    for length, limit in ((10, 0.101), (5_000, 0.6)):
        text = "a" * length
        said = refusal(text_tokens.tokenize, [text], folder, data, Progress(quiet=True), 0.1)
        assert said == f"tokenizer_dir: tokenizing a did not end within {limit:g} s"


def metaspace(content: dict[str, Any]) -> None:
    content["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": "never",
        "split": True,
    }


def no_split(content: dict[str, Any]) -> None:
    content["pre_tokenizer"]["add_prefix_space"] = True


@pytest.mark.parametrize(
    ("change", "tokenizer_class", "model_type", "differs", "loses"),
    [
        (same, "PreTrainedTokenizerFast", "llama", False, False),
        (same, "GPT2TokenizerFast", "llama", False, False),
        (same, "LlamaTokenizerFast", "llama", True, False),
        (same, "GemmaTokenizerFast", "llama", True, False),
        (no_split, "GPT2TokenizerFast", "gpt2", True, False),
        (no_split, "PreTrainedTokenizerFast", "llama", False, False),
        (metaspace, "PreTrainedTokenizerFast", "llama", False, True),  # saved after a wrong load
    ],
)
def test_tokens_are_those_of_tokenizer_json(
    tmp_path: Path,
    change: Change,
    tokenizer_class: str,
    model_type: str,
    differs: bool,
    loses: bool,
) -> None:
    """Transformers chooses a class by the configs, and some classes replace the rules of the file
    by their own.
    """
    from tokenizers import Tokenizer

    folder = toy_tokenizer(tmp_path / "t", change, tokenizer_class=tokenizer_class)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    text = "Two  words, 12345 and\n\nsome 'more' of them: \u00e9\u20ac\u6c49"
    found = tokenized(tmp_path, folder, text)
    expected = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert found.ids.tolist() == expected
    assert [any(word in note for note in found.notes) for word in ("tokenizer.json", "lose")] == [
        differs,
        loses,
    ]


@pytest.mark.parametrize(
    ("text", "offsets", "gold"),
    [
        ("aé€😀", [(0, 1), (1, 2), (2, 3), (3, 4)], [1, 2, 3, 4]),
        (
            "😀a",
            [(0, 1), (0, 1), (0, 1), (1, 2)],
            [4, 0, 0, 1],
        ),  # one character in three byte-level tokens
        ("ab", [(0, 0), (0, 1), (1, 2)], [0, 1, 1]),  # BOS
        (
            "\x7f\x80\u07ff\u0800\uffff\U00010000",
            [(i, i + 1) for i in range(6)],
            [1, 2, 2, 3, 3, 4],
        ),
        (
            "a  b ",
            [(0, 1), (3, 4)],
            [1, 4],
        ),  # white space without a token counts for the next token, or the last
        ("", [], []),
    ],
)
def test_byte_sizes(text: str, offsets: list[tuple[int, int]], gold: list[int]) -> None:
    assert text_tokens.byte_sizes(text, offsets).tolist() == gold


def test_bytes_of_a_real_tokenizer(tmp_path: Path, with_bos: Path) -> None:
    """A byte-level token is one byte; if a character has several tokens, its first token has all
    its bytes.
    """
    found = tokenized(tmp_path, with_bos, "aé😀 b\n")
    assert found.sizes.tolist() == [0, 1, 2, 0, 4, 0, 0, 0, 1, 1, 1]
    assert (found.n_bytes, found.n_words) == (10, 3)
    assert found.ends.tolist() == [11]


@pytest.mark.parametrize(
    ("change", "config", "gold"),
    [
        (same, {}, [END]),
        (
            lambda content: content["added_tokens"].extend(ADDED),
            {},
            [END, 257],
        ),  # 258 is not special
        (
            lambda content: content["added_tokens"].extend(ADDED),
            {"pad_token": "plain"},
            [END, 257, 258],
        ),
        (same, {"bos_token": "a"}, [64, END]),
    ],
)
def test_special_tokens_are_those_that_are_marked_or_named(
    tmp_path: Path, change: Change, config: dict[str, str], gold: list[int]
) -> None:
    found = tokenized(tmp_path, toy_tokenizer(tmp_path / "t", change, **config), "ab")
    assert found.special.tolist() == gold
    assert found.special.dtype == np.int32


def test_special_tokens_in_the_text_are_text_for_llamacpp(tmp_path: Path, with_bos: Path) -> None:
    text = "a<|end|><|bos|>b"
    assert tokenized(tmp_path, with_bos, text).ids[1:].tolist()[1:3] == [END, END + 1]
    found = tokenized(tmp_path, with_bos, text, "llamacpp")
    assert len(found.ids) == 1 + len(text)
    assert not {END, END + 1} & set(found.ids[1:].tolist())


def test_lm_eval_tokenizes_documents_by_themselves(tmp_path: Path, with_bos: Path) -> None:
    """Each document gets a BOS unless its text begins with BOS; an empty document counts as a word,
    as in lm-eval.
    """
    rows = ["ab c", "", "<|bos|>d", None, " \n"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    found = tokenized(tmp_path, with_bos, "", "lm_eval", path="a.jsonl")
    bos, byte = (
        END + 1,
        dict(
            zip("ab cd\n", tokenized(tmp_path, with_bos, "ab cd\n").ids[1:].tolist(), strict=True)
        ),
    )
    first, last = [bos, *(byte[letter] for letter in "ab c")], [bos, byte[" "], byte["\n"]]
    assert found.ids.tolist() == [*first, bos, bos, byte["d"], *last]
    assert (found.lead, found.ends.tolist()) == (bos, [5, 6, 8, 11])
    assert found.sizes.tolist() == [0, 1, 1, 1, 1, 0, 7, 1, 0, 1, 1]
    assert (found.n_bytes, found.n_words) == (4 + 0 + 8 + 2, 2 + 1 + 1 + 2)


NUMBERS = np.array([0, 1], np.int32)
KINDS = {
    "text": {},
    "conversations": {
        "chat": Chat(np.array([0, -1], np.int8), ("assistant",), "rendered prefixes", 0, "t")
    },
}


@pytest.mark.parametrize("name", ["a.txt", "t/tokenizer.json"])
@pytest.mark.parametrize("put_back", [True, False])
def test_what_changes_while_it_is_read_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, put_back: bool
) -> None:
    """The key is the digest of the old content, but the tokens may be those of the new content."""
    (tmp_path / "t").mkdir()
    save_toy_tokenizer(tmp_path / "t")
    (tmp_path / "a.txt").write_text("abcdefgh")
    load, file, cache = corpus.load_texts, tmp_path / name, Cache(tmp_path / "cache")

    def racing(*args: Any) -> list[str]:
        old = file.read_text()
        file.write_text(f"{old}\n")
        texts = load(*args)
        file.write_text(old if put_back else f"{old}\n")
        return texts

    monkeypatch.setattr(corpus, "load_texts", racing)
    with pytest.raises(InputError, match=name):
        text_windows.build(spec(tmp_path), None, cache, Progress(quiet=True))
    assert not list((tmp_path / "cache" / "tokens").glob("*.npz"))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_the_cache_and_of_a_pack_are_those_that_were_saved(
    tmp_path: Path, kind: str
) -> None:
    cache = Cache(tmp_path / "cache")
    saved = Tokens(NUMBERS, NUMBERS, 9, "words", special=np.array([3, 7], np.int32), **KINDS[kind])
    with cache.write("tokens", "k", ".npz") as file:
        text_tokens.save(file, saved, "k")
    text_tokens.write_pack(tmp_path, saved)
    for found in (text_tokens.load(cache, "k"), text_tokens.of_pack(tmp_path)):
        assert found.special.tolist() == [3, 7]
        assert (found.top_id, found.vocabulary) == (9, "words")
        if kind == "text":
            assert found.chat is None
        else:
            assert found.chat.roles.tolist() == [0, -1]
            assert found.chat.roles.dtype == np.int8
            assert found.chat.scored.tolist() == [True, False]
            assert (found.chat.role_names, found.chat.found_by) == (
                ("assistant",),
                "rendered prefixes",
            )


@pytest.mark.parametrize(
    ("array", "content", "gold"),
    [
        ("special", None, "older compare_q"),
        ("roles", [0], "damaged: the roles do not fit"),
        ("roles", [0, 1], "damaged: the roles do not fit"),
    ],
)
def test_a_pack_without_roles_and_special_tokens_or_with_wrong_ones_is_refused(
    tmp_path: Path, array: str, content: list[int] | None, gold: str
) -> None:
    text_tokens.write_pack(tmp_path, Tokens(NUMBERS, NUMBERS, 9, "words", **KINDS["conversations"]))
    file = tmp_path / pack_files.TOKENS
    arrays, texts = pack_files.arrays_of(file)
    arrays.pop(array)
    if content is not None:
        arrays[array] = np.array(content, np.int8)
    save_file(arrays, file, texts)
    message = refusal(text_tokens.of_pack, tmp_path)
    assert message.startswith(f"{file}: ")
    assert gold in message


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_of_kept_tokens_makes_them_again(tmp_path: Path, kind: str) -> None:
    """Without the check, a flipped bit in the name of the array of scored tokens would score a
    whole conversation.
    """
    cache = Cache(tmp_path)
    with cache.write("tokens", "k", ".npz") as file:
        text_tokens.save(file, Tokens(NUMBERS, NUMBERS, 9, "words", **KINDS[kind]), "k")
    shutil.copy(cache.path("tokens", "k", ".npz"), cache.path("tokens", "other", ".npz"))
    assert text_tokens.load(cache, "other") is None
    for _, position in flips([cache.path("tokens", "k", ".npz")], seed=6):
        assert text_tokens.load(cache, "k") is None, position
    assert text_tokens.load(cache, "k") is not None


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
    assert text_tokens.detokenized(page) == gold


A, B = (
    64,
    65,
)  # ids of "a" and "b" in the toy tokenizer: characters of the bytes in sorted order, "!" is 0


def swap(content: dict[str, Any]) -> None:
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def other_a(content: dict[str, Any]) -> None:
    content["model"]["vocab"]["\u0100\u0100"] = content["model"]["vocab"].pop("a")


def renamed(content: dict[str, Any]) -> None:
    """Rename the only special token."""
    content["added_tokens"][0]["content"] = "<|stop|>"


def added(*tokens: str, special: bool) -> Change:
    """Return a change that adds tokens from id 257 on."""
    entries = [
        {"id": 257 + at, "content": token, "special": special, **FLAGS}
        for at, token in enumerate(tokens)
    ]
    return lambda content: content["added_tokens"].extend(entries)


def disagreement(model: Path, data: Path, seen: frozenset[int] = frozenset()) -> str:
    return vocabulary.disagreement(model, data, trusted=False, data_trusted=False, seen=seen)


@pytest.mark.parametrize(
    ("data", "model", "config", "gold"),
    [
        (same, swap, {}, f"token {A} is 'b' in {{model}} and 'a' in {{data}}"),
        (
            added("Wort", special=False),
            added("word", special=False),
            {},
            "token 257 is 'word' in {model} and 'Wort' in {data}",
        ),
        (same, renamed, {"eos_token": "<|stop|>"}, ""),
        (same, other_a, {}, f"token {A} is '\u0100\u0100' in {{model}} and 'a' in {{data}}"),
    ],
)
def test_disagreements(
    tmp_path: Path, data: Change, model: Change, config: dict[str, str], gold: str
) -> None:
    one, other = (
        toy_tokenizer(tmp_path / "data", data),
        toy_tokenizer(tmp_path / "model", model, **config),
    )
    assert disagreement(other, one) == gold.format(data=one, model=other)


def test_special_tokens_that_a_conversation_holds(tmp_path: Path) -> None:
    """The control tokens are in another order; the ordinary tokens are the same."""
    data = toy_tokenizer(tmp_path / "data", added("<|user|>", "<|stop|>", special=True))
    model = toy_tokenizer(tmp_path / "model", added("<|stop|>", "<|user|>", special=True))
    assert disagreement(model, data) == disagreement(model, data, frozenset({A, 256})) == ""
    gold = f"token 258 is '<|user|>' in {model} and '<|stop|>' in {data}"
    assert disagreement(model, data, frozenset({A, 258})) == gold


WORD = {"added_tokens_decoder": {"257": {"content": "word", "special": True, **FLAGS}}}


@pytest.mark.parametrize(
    ("change", "config", "n_plain"),
    [
        (swap, {}, 256),
        (added("word", special=False), {}, 257),
        (added("word", special=False), WORD, 256),
        (same, {"bos_token": "<s>", "additional_special_tokens": ["<x>"]}, 256),
        (
            lambda content: content["model"].update(byte_fallback=True),
            {"tokenizer_class": "LlamaTokenizer"},
            256,
        ),
    ],
)
def test_a_tokenizer_file_says_what_transformers_says(
    tmp_path: Path, change: Change, config: dict[str, Any], n_plain: int
) -> None:
    """Ordinary tokens are the tokens of the bytes, and added tokens that are not special."""
    folder = toy_tokenizer(tmp_path / "a", change, **config)
    found = vocabulary.of_file(folder)
    assert found == vocabulary.plain_tokens(
        vocabulary.load_tokenizer(folder, trust_remote_code=False)
    )
    assert len(found) == n_plain


def test_identity_follows_every_chat_template(tmp_path: Path) -> None:
    """Among additional templates, the tokenizer uses "default", so that a plain text's chat prefix
    depends on it.
    """
    (tmp_path / "a.txt").write_text("ab\n")
    save_toy_tokenizer(tmp_path)
    data = spec(tmp_path, chat_template=True)
    seen = [text_windows.identity(data, tmp_path)]
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    for text in ("one", "two"):
        (folder / "default.jinja").write_text(text)
        assert vocabulary.load_tokenizer(tmp_path, trust_remote_code=False).chat_template == text
        seen.append(text_windows.identity(data, tmp_path))
    (folder / "default.jinja").rename(tmp_path / "default.jinja")  # no tokenizer reads it there
    seen.append(text_windows.identity(data, tmp_path))
    assert len({each["tokenizer"] for each in seen}) == 4
