"""Text -> tokens: bytes of each token, what the methods ask of a tokenizer beside the text's own tokens, and ordinary
tokens by their ids, which a model and the text must have alike."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compare_q.backends.common import packages
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs.reading import parse_data_spec
from compare_q.eval.specs.types import DataSpec
from compare_q.eval.text import corpus, tokens, vocabulary, windows
from compare_q.eval.text.tokens import Chat, Requests, Tokens
from tests.support.flips import flips
from tests.support.toy import refusal, save_toy_tokenizer

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


@pytest.mark.parametrize("text", ["", " ", "one", "one two\n\nthree", " led and trailed \n", "a\u00a0b\u2028c"])
def test_words_are_lm_evals(text: str) -> None:
    assert tokens.n_words(text) == len(re.split(r"\s+", text))


def test_bytes_of_a_real_tokenizer(tmp_path: Path, with_bos: Path) -> None:
    """A byte-level token is a byte, but of a character's several tokens the first has all."""
    found = tokenized(tmp_path, with_bos, "aé😀 b\n")
    assert found.sizes.tolist() == [0, 1, 2, 0, 4, 0, 0, 0, 1, 1, 1]
    assert (found.n_bytes, found.n_words) == (10, 3)
    assert found.ends.tolist() == [11]


def test_a_tokenizer_in_python_tells_no_bytes(tmp_path: Path, toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = vocabulary.load_tokenizer(toy_model, trust_remote_code=False)

    class Slow:
        is_fast = False
        added_tokens_decoder = real.added_tokens_decoder
        get_vocab = real.get_vocab

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": real(text)["input_ids"]}

    monkeypatch.setattr(vocabulary, "load_tokenizer", lambda folder, trust_remote_code: Slow())
    found = tokenized(tmp_path, toy_model, "abc")
    assert (found.sizes, len(found.ids), found.n_bytes) == (None, 3, 3)


def test_llamacpp_reads_carriage_returns(tmp_path: Path, toy_model: Path) -> None:
    """llama-perplexity tokenizes the file's bytes and drops the last newline, not the carriage return before it."""
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfab\r\ncd\r\n")
    count = {m: len(tokenized(tmp_path, toy_model, "", m, path="b.txt").ids) for m in ("llamacpp", "gptq", "exllamav3")}
    assert count == {"llamacpp": 3 + 9 - 2, "gptq": 3 + 6, "exllamav3": 3 + 6}


def test_llamacpp_finds_bos_in_what_the_tokenizer_does(tmp_path: Path, toy_model: Path, with_bos: Path) -> None:
    assert tokenized(tmp_path, toy_model, "ab", "llamacpp").lead is None  # though it has a bos_token in its config
    found = tokenized(tmp_path, with_bos, "ab", "llamacpp")
    assert (found.lead, found.ids.tolist()) == (END + 1, [END + 1, *tokenized(tmp_path, toy_model, "ab").ids])


@pytest.mark.parametrize("single", ["<|bos|> $A <|end|>", "<|bos|> <|end|> $A", "$A <|end|>"])
def test_llamacpp_refuses_what_it_cannot_reproduce(tmp_path: Path, single: str) -> None:
    tokenizer = vocabulary.load_tokenizer(templated(tmp_path / "more", single), trust_remote_code=False)
    assert "adds more than BOS" in refusal(tokens.lead_of, tokenizer, "llamacpp")


def test_special_tokens_in_the_text_are_text_for_llamacpp(tmp_path: Path, with_bos: Path) -> None:
    text = "a<|end|><|bos|>b"
    assert tokenized(tmp_path, with_bos, text).ids[1:].tolist()[1:3] == [END, END + 1]
    found = tokenized(tmp_path, with_bos, text, "llamacpp")
    assert len(found.ids) == 1 + len(text)
    assert not {END, END + 1} & set(found.ids[1:].tolist())


def test_a_tokenizer_that_cannot_read_special_tokens_as_text_is_refused(toy_model: Path) -> None:
    real = vocabulary.load_tokenizer(toy_model, trust_remote_code=False)

    class Stubborn:
        is_fast = False
        added_tokens_decoder = real.added_tokens_decoder

        def __call__(self, text: str, split_special_tokens: bool = False) -> Any:
            return real(text)

    problem = refusal(tokens.encode, Stubborn(), "a<|end|>b", "llamacpp", None)
    assert problem.startswith("dataset: its text holds '<|end|>', which llama-perplexity reads as plain text")
    assert len(tokens.encode(Stubborn(), "a<|en", "llamacpp", None)["input_ids"]) == 5
    tokens.check_plain(real, "a\ufffd", [0, END])  # one that stands for an unknown character is not written in the text


@pytest.mark.parametrize(("bos", "eos", "gold"), [(5, 6, 5), (0, 6, 0), (None, 6, 6)])
def test_lm_eval_begins_with_bos_or_eos(bos: int | None, eos: int | None, gold: int) -> None:
    assert tokens.lead_of(SimpleNamespace(bos_token_id=bos, eos_token_id=eos), "lm_eval") == gold


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


def test_a_page_is_scored_detokenized_and_counted_as_it_is(tmp_path: Path, toy_model: Path) -> None:
    page = " = Title = \n \n It was 8 @,@ 600 , he said . \n"
    (tmp_path / "a.jsonl").write_text(json.dumps({"page": page}) + "\n")
    keys = {"path": "a.jsonl", "text_column": "page", "detokenize": "wikitext"}
    found = tokenized(tmp_path, toy_model, "", "lm_eval", **keys)
    shown = " = Title =\n\nIt was 8,600, he said.\n"
    assert found.ids.tolist() == tokenized(tmp_path, toy_model, shown).ids.tolist()
    assert (found.n_bytes, found.n_words) == (len(page), len(re.split(r"\s+", page)))
    assert found.sizes.sum() == len(shown)


def test_identity_follows_the_method(tmp_path: Path, toy_model: Path) -> None:
    (tmp_path / "a.txt").write_text("ab\n")
    specs = [spec(tmp_path, method) for method in ("exllamav3", "llamacpp", "lm_eval", "gptq", "once")]
    specs.append(spec(tmp_path, "lm_eval", detokenize="wikitext"))
    assert len({json.dumps(windows.identity(each, toy_model)) for each in specs}) == 6


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


def test_identity_tells_builds_of_one_version_apart(
    tmp_path: Path, toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what tokenizes, and of lm-eval: a working copy of either, say."""
    (tmp_path / "a.txt").write_text("ab\n")
    task = {"tokenizer_dir": "t", "dataset": "lm_eval", "task": "odd", "eval_len": 250}
    specs = [spec(tmp_path), parse_data_spec(task, tmp_path / "d.json")]
    before = [windows.identity(each, toy_model) for each in specs]
    monkeypatch.setattr(packages, "origin", lambda distribution: f" of {distribution.name}")
    text, questions = (windows.identity(each, toy_model) for each in specs)
    assert text["versions"]["tokenizers"] == before[0]["versions"]["tokenizers"] + " of tokenizers"
    assert questions["text"]["lm_eval"] == before[1]["text"]["lm_eval"] + " of lm_eval"


def test_a_chat_prefix_is_the_same_every_day(tmp_path: Path) -> None:
    """Llama 3.2's template prints today's date, which would change the tokens under their key."""
    save_toy_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ strftime_now('%d %b %Y') }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = vocabulary.load_tokenizer(tmp_path, trust_remote_code=False)
    assert tokenizer.decode(tokens.chat_prefix(tokenizer)) == "26 Jul 2024"


@pytest.mark.parametrize("sizes", [None, np.array([1, 2, 3], np.int32)])
@pytest.mark.parametrize("lead", [None, 0, 7])
def test_stored_tokens_come_back(tmp_path: Path, sizes: Any, lead: int | None) -> None:
    """Arrays only: ``load`` takes no pickle."""
    text = Tokens(
        np.arange(3, dtype=np.int32), np.array([8], np.int32), 9, "words", lead, np.array([1, 3]), sizes, 6, 2
    )
    cache = Cache(tmp_path)
    with cache.write("tokens", "k", ".npz") as file:
        tokens.save(file, text)
    loaded = tokens.load(cache, "k")
    for name, value in vars(text).items():
        np.testing.assert_array_equal(getattr(loaded, name), value, strict=isinstance(value, np.ndarray))
    assert tokens.load(cache, "other") is None


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
        ("the end .", "the end ."),  # nothing follows the full stop, so its space stays
        ("( a ) [ b ] { c }", "(a) [b] {c}"),
        ('he said " no " .', 'he said "no" .'),
        ("the ' 90s and ' 80s", "the '90s and' 80s"),  # a pair of quotes, as far as the expression can tell
        ("the dogs ' food", "the dogs' food"),
        ("the dogs ' food , Teddy 's", "the dogs'food, Teddy's"),  # likewise
        ("Teddy 's Story", "Teddy's Story"),
        (" = A = \n = = B = = \n = = = C = = = ", " = A =\n== B ==\n=== C === "),
        ("= = = = D = = = =", "==== D ===="),
        ("a \n b \n c", "a\nb\nc"),
        ("20 ° C , 5 N north", "20°C, 5 1 north"),  # lm-eval's slip: N stands for a number in PTB, not here
        ("/' 9/ and 99", "/'[0-9]/ and 99"),  # its slip with years
        ("", ""),
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


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    text = refusal(vocabulary.load_tokenizer, tmp_path, trust_remote_code=False)
    assert text.startswith(f"tokenizer_dir: {tmp_path}: no usable tokenizer: ")
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert "no usable tokenizer" in refusal(vocabulary.load_tokenizer, tmp_path, trust_remote_code=False)


def test_digest_follows_content_and_not_order() -> None:
    """`printf '[[0, "a"], [1, "b"]]' | sha256sum` gives the first."""
    digest = vocabulary.digest({0: "a", 1: "b"})
    assert digest == "a010d841c0f55ced1472d0df0cb314ac888c74c1076d8e6069d34bd9e47e9474"
    assert vocabulary.digest({1: "b", 0: "a"}) == digest
    others = [{0: "b", 1: "a"}, {0: "a"}, {0: "a", 2: "b"}, {0: "a", 1: "b", 2: "c"}, {0: "a", 1: "ß"}]
    assert len({digest, *(vocabulary.digest(other) for other in others)}) == 6


def renamed(content: dict[str, Any]) -> None:
    """Another name of the one special token."""
    content["added_tokens"][0]["content"] = "<|stop|>"


@pytest.mark.parametrize(
    ("data", "model", "config", "gold"),
    [
        ("same", "same", {}, ""),
        ("same", "swapped", {}, f"token {A} is 'b' in {{model}} and 'a' in {{data}}"),  # the lowest id
        ("swapped", "same", {}, f"token {A} is 'a' in {{model}} and 'b' in {{data}}"),
        ("same", "word", {}, ""),  # an id that only one has
        ("word", "same", {}, ""),
        ("Wort", "word", {}, "token 257 is 'word' in {model} and 'Wort' in {data}"),
        ("same", "renamed", {"eos_token": "<|stop|>"}, ""),  # special tokens may differ
        # "a" is the model's EOS by its config, and special in neither file: Transformers decides.
        ("same", "other a", {"eos_token": "\u0100\u0100"}, ""),
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


def test_what_agrees_needs_no_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither do equal files, nor files with other formatting; a tokenizer that may run code is always loaded."""
    data, model = toy_tokenizer(tmp_path / "data", swap), toy_tokenizer(tmp_path / "model", swap)
    spaced = toy_tokenizer(tmp_path / "spaced", swap, indent=3)
    monkeypatch.setattr(vocabulary, "load_tokenizer", lambda *_, **keys: pytest.fail("loaded"))
    assert disagreement(model, data) == disagreement(spaced, data) == ""
    assert vocabulary.disagreement({A: "b", B: "a"}, data, trusted=False, data_trusted=False) == ""
    with pytest.raises(pytest.fail.Exception, match="loaded"):
        vocabulary.disagreement(spaced, data, trusted=False, data_trusted=True)


def in_config(number: int, token: str, *, special: bool) -> dict[str, Any]:
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"added_tokens_decoder": {str(number): {"content": token, "special": special, **flags}}}


@pytest.mark.parametrize(
    ("change", "config", "n_plain"),
    [
        (lambda content: None, {}, 256),
        (swap, {}, 256),
        (added(257, "<image>", special=True), {}, 256),
        (added(257, "word", special=False), {}, 257),
        (added(257, "word", special=False), in_config(257, "word", special=True), 256),
        (lambda content: None, in_config(257, "<pad>", special=True) | {"pad_token": "<pad>"}, 256),
        (lambda content: None, {"bos_token": "<s>", "additional_special_tokens": ["<x>"]}, 256),
        (lambda content: content.update(added_tokens=[]), {}, 256),  # <|end|>, which only the config names
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


def test_a_tokenizer_file_that_cannot_be_read(tmp_path: Path) -> None:
    """Transformers is asked, and may know better; files that hold nonsense are no reason to stop."""
    for number, (name, text) in enumerate(
        [("tokenizer.json", "{"), ("tokenizer_config.json", "[]"), ("tokenizer_config.json", "\xff"),
         ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 3}}')]
    ):  # fmt: skip
        folder = toy_tokenizer(tmp_path / str(number))
        (folder / name).write_text(text)
        assert vocabulary.of_file(folder) is None
    assert vocabulary.of_file(tmp_path) is None


def test_a_folder_without_a_tokenizer_cannot_disagree(tmp_path: Path) -> None:
    data, model = toy_tokenizer(tmp_path / "data"), tmp_path / "model"
    model.mkdir()
    assert disagreement(model, data) == ""
    (model / "tokenizer.json").write_text("{")  # there, and no tokenizer
    assert vocabulary.of_folders((model, False)) == (None,)
    assert disagreement(model, data) == ""
