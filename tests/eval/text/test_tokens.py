"""Text -> tokens: their bytes, the methods' additional tokens, and the check of vocabularies."""

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
from compare_q.eval.text import (
    corpus,
    stored_tokens,
    text_tokens,
    text_windows,
    tokens_cache,
    vocabulary,
)
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
    stride = None
    if method == "exllamav3":
        stride = 2
    return parse_data_spec({**base, "eval_stride": stride, **keys}, folder / "d.json")


def tokenized(
    folder: Path, tokenizer: Path, text: str, method: str = "exllamav3", **keys: Any
) -> Tokens:
    (folder / "a.txt").write_text(text)
    data = spec(folder, method, **keys)
    progress = Progress(quiet=True)
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
    """Write the toy tokenizer with a changed tokenizer.json, and more keys in its config."""
    folder.mkdir()
    save_toy_tokenizer(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    config_file = folder / "tokenizer_config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | config))
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
    # 0.1 s, and 0.1 ms per character.
    for length, limit in ((10, 0.101), (5_000, 0.6)):
        text = "a" * length
        message = refusal(text_tokens.tokenize, [text], folder, data, Progress(quiet=True), 0.1)
        assert message == f"tokenizer_dir: tokenizing a did not end within {limit:g} s"


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
        # Transformers 5.19 puts Metaspace over this byte-level file, as it does for
        # DeepSeek-R1-Distill-Llama-70B: every space is lost (transformers 45488).
        (same, "LlamaTokenizerFast", "llama", True, False),
        (same, "GemmaTokenizerFast", "llama", True, False),
        (no_split, "GPT2TokenizerFast", "gpt2", True, False),
        (no_split, "PreTrainedTokenizerFast", "llama", False, False),
        # Saved after a wrong load.
        (metaspace, "PreTrainedTokenizerFast", "llama", False, True),
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
    """Transformers chooses a class by the configs; some classes replace the rules of the file."""
    from tokenizers import Tokenizer

    folder = toy_tokenizer(tmp_path / "t", change, tokenizer_class=tokenizer_class)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    text = "Two  words, 12345 and\n\nsome 'more' of them: \u00e9\u20ac\u6c49"
    tokens = tokenized(tmp_path, folder, text)
    expected = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert tokens.ids.tolist() == expected
    assert any("tokenizer.json" in note for note in tokens.notes) == differs
    assert any("lose" in note for note in tokens.notes) == loses


@pytest.mark.parametrize(
    ("text", "offsets", "gold"),
    [
        ("aé€😀", [(0, 1), (1, 2), (2, 3), (3, 4)], [1, 2, 3, 4]),
        # One character in three byte-level tokens.
        ("😀a", [(0, 1), (0, 1), (0, 1), (1, 2)], [4, 0, 0, 1]),
        # A BOS has no characters.
        ("ab", [(0, 0), (0, 1), (1, 2)], [0, 1, 1]),
        # The first and the last characters of one, two, three and four bytes.
        (
            "\x7f\x80\u07ff\u0800\uffff\U00010000",
            [(i, i + 1) for i in range(6)],
            [1, 2, 2, 3, 3, 4],
        ),
        # White space without a token counts for the next token, or the last.
        ("a  b ", [(0, 1), (3, 4)], [1, 4]),
        ("", [], []),
    ],
)
def test_byte_sizes(text: str, offsets: list[tuple[int, int]], gold: list[int]) -> None:
    assert text_tokens.byte_sizes(text, offsets).tolist() == gold


def test_bytes_of_a_real_tokenizer(tmp_path: Path, with_bos: Path) -> None:
    """A byte-level token is one byte; the first token of a character has all its bytes."""
    tokens = tokenized(tmp_path, with_bos, "aé😀 b\n")
    assert tokens.sizes.tolist() == [0, 1, 2, 0, 4, 0, 0, 0, 1, 1, 1]
    assert (tokens.n_bytes, tokens.n_words) == (10, 3)
    assert tokens.ends.tolist() == [11]


def add_tokens(content: dict[str, Any]) -> None:
    content["added_tokens"].extend(ADDED)


@pytest.mark.parametrize(
    ("change", "config", "gold"),
    [
        (same, {}, [END]),
        # 258 is not special.
        (add_tokens, {}, [END, 257]),
        (add_tokens, {"pad_token": "plain"}, [END, 257, 258]),
        (same, {"bos_token": "a"}, [64, END]),
    ],
)
def test_special_tokens_are_those_that_are_marked_or_named(
    tmp_path: Path, change: Change, config: dict[str, str], gold: list[int]
) -> None:
    tokens = tokenized(tmp_path, toy_tokenizer(tmp_path / "t", change, **config), "ab")
    assert tokens.special.tolist() == gold
    assert tokens.special.dtype == np.int32


def test_special_tokens_in_the_text_are_text_for_llamacpp(tmp_path: Path, with_bos: Path) -> None:
    text = "a<|end|><|bos|>b"
    assert tokenized(tmp_path, with_bos, text).ids[1:].tolist()[1:3] == [END, END + 1]
    tokens = tokenized(tmp_path, with_bos, text, "llamacpp")
    assert len(tokens.ids) == 1 + len(text)
    assert not {END, END + 1} & set(tokens.ids[1:].tolist())


def test_lm_eval_tokenizes_documents_by_themselves(tmp_path: Path, with_bos: Path) -> None:
    """Each document gets a BOS unless its text begins with BOS.

    An empty document counts as a word, as in lm-eval.
    """
    rows = ["ab c", "", "<|bos|>d", None, " \n"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    tokens = tokenized(tmp_path, with_bos, "", "lm_eval", path="a.jsonl")
    bos = END + 1
    letters = "ab cd\n"
    ids_of_letters = tokenized(tmp_path, with_bos, letters).ids[1:].tolist()
    byte = dict(zip(letters, ids_of_letters, strict=True))
    first = [bos, *(byte[letter] for letter in "ab c")]
    last = [bos, byte[" "], byte["\n"]]
    assert tokens.ids.tolist() == [*first, bos, bos, byte["d"], *last]
    assert (tokens.leading_token, tokens.ends.tolist()) == (bos, [5, 6, 8, 11])
    # The BOS that is in the text itself has the 7 bytes of its characters.
    assert tokens.sizes.tolist() == [0, 1, 1, 1, 1, 0, 7, 1, 0, 1, 1]
    # lm-eval splits at white space: an empty text gives one part, and " \n" gives two.
    assert (tokens.n_bytes, tokens.n_words) == (4 + 0 + 8 + 2, 2 + 1 + 1 + 2)


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
    file = tmp_path / name
    cache = Cache(tmp_path / "cache")
    load = corpus.load_texts

    def racing(*args: Any) -> list[str]:
        old = file.read_text()
        file.write_text(f"{old}\n")
        texts = load(*args)
        if put_back:
            file.write_text(old)
        else:
            file.write_text(f"{old}\n")
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
        stored_tokens.save(file, saved, "k")
    stored_tokens.write_pack(tmp_path, saved)
    for tokens in (stored_tokens.load(cache, "k"), stored_tokens.tokens_of_pack(tmp_path)):
        assert tokens.special.tolist() == [3, 7]
        assert (tokens.top_id, tokens.vocabulary) == (9, "words")
        if kind == "text":
            assert tokens.chat is None
        else:
            assert tokens.chat.roles.tolist() == [0, -1]
            assert tokens.chat.roles.dtype == np.int8
            assert tokens.chat.scored.tolist() == [True, False]
            assert tokens.chat.role_names == ("assistant",)
            assert tokens.chat.turn_method == "rendered prefixes"


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
    stored_tokens.write_pack(
        tmp_path, Tokens(NUMBERS, NUMBERS, 9, "words", **KINDS["conversations"])
    )
    file = tmp_path / pack_files.TOKENS_FILE
    arrays, texts = pack_files.arrays_of(file)
    arrays.pop(array)
    if content is not None:
        arrays[array] = np.array(content, np.int8)
    save_file(arrays, file, texts)
    message = refusal(stored_tokens.tokens_of_pack, tmp_path)
    assert message.startswith(f"{file}: ")
    assert gold in message


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_of_kept_tokens_makes_them_again(tmp_path: Path, kind: str) -> None:
    """Otherwise a flipped bit in an array's name could score a whole conversation."""
    cache = Cache(tmp_path)
    with cache.write("tokens", "k", ".npz") as file:
        stored_tokens.save(file, Tokens(NUMBERS, NUMBERS, 9, "words", **KINDS[kind]), "k")
    # A file of the cache has its key in it, so that another name is noticed.
    shutil.copy(cache.path("tokens", "k", ".npz"), cache.path("tokens", "other", ".npz"))
    assert stored_tokens.load(cache, "other") is None
    for _, position in flips([cache.path("tokens", "k", ".npz")], seed=6):
        assert stored_tokens.load(cache, "k") is None, position
    assert stored_tokens.load(cache, "k") is not None


@pytest.mark.parametrize(
    ("page", "gold"),
    [
        ("8 @,@ 600 well @-@ known , 3 @.@ 5", "8,600 well-known, 3.5"),
        ("a : b ; c . d ! e ? f , g", "a: b; c. d! e? f, g"),
        ("( a ) [ b ] { c }", "(a) [b] {c}"),
        ('he said " no " .', 'he said "no" .'),
        ("the dogs ' food", "the dogs' food"),
        (" = A = \n = = B = = \n = = = C = = = ", " = A =\n== B ==\n=== C === "),
        # lm-eval's rules have these faults, which equal numbers need: N becomes 1, and a digit
        # becomes the text of a pattern.
        ("20 ° C , 5 N north", "20°C, 5 1 north"),
        ("/' 9/ and 99", "/'[0-9]/ and 99"),
    ],
)
def test_pages_of_wikitext(page: str, gold: str) -> None:
    assert text_tokens.detokenized(page) == gold


A = 64
"""Id of "a" in the toy tokenizer: characters of the bytes in sorted order, "!" is 0."""


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
    entries = []
    for number, token in enumerate(tokens, 257):
        entries.append({"id": number, "content": token, "special": special, **FLAGS})
    return lambda content: content["added_tokens"].extend(entries)


def disagreement(model: Path, data: Path, ids_in_chats: frozenset[int] = frozenset()) -> str:
    return vocabulary.disagreement(
        model, data, trusted=False, data_trusted=False, ids_in_chats=ids_in_chats
    )


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
    data_folder = toy_tokenizer(tmp_path / "data", data)
    model_folder = toy_tokenizer(tmp_path / "model", model, **config)
    assert disagreement(model_folder, data_folder) == gold.format(
        data=data_folder, model=model_folder
    )


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
    plain = vocabulary.vocabulary_of_file(folder)
    tokenizer = vocabulary.load_tokenizer(folder, trust_remote_code=False)
    assert plain == vocabulary.plain_tokens(tokenizer)
    assert len(plain) == n_plain


def test_identity_follows_every_chat_template(tmp_path: Path) -> None:
    """The tokenizer uses "default" of the additional templates, also for the chat prefix."""
    (tmp_path / "a.txt").write_text("ab\n")
    save_toy_tokenizer(tmp_path)
    data = spec(tmp_path, chat_template=True)
    identities = [tokens_cache.tokens_identity(data, tmp_path)]
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    for text in ("one", "two"):
        (folder / "default.jinja").write_text(text)
        assert vocabulary.load_tokenizer(tmp_path, trust_remote_code=False).chat_template == text
        identities.append(tokens_cache.tokens_identity(data, tmp_path))
    # No tokenizer reads it there.
    (folder / "default.jinja").rename(tmp_path / "default.jinja")
    identities.append(tokens_cache.tokens_identity(data, tmp_path))
    assert len({identity["tokenizer"] for identity in identities}) == 4
