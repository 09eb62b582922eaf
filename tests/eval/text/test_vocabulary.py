"""What token ids stand for: tokenizers are compared by content, and only where both have an ordinary token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compare_q.eval.text import vocabulary
from tests.support.toy import refusal, save_toy_tokenizer

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
