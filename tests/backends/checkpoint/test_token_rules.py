"""Rules by which a GGUF cuts text into tokens, compared with a tokenizer.json.

These are merges, pre-tokenizer, BOS and prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from compare_q.backends.checkpoint.checkpoint_doctor import differing_tokens
from compare_q.backends.checkpoint.gguf import read_model
from compare_q.backends.checkpoint.token_rules import digests, samples
from compare_q.backends.checkpoint.tokenizers import Tokens, of_folder, of_gguf
from compare_q.backends.llamacpp import LlamacppEngine
from tests.support.checkpoints import finish_gguf
from tests.support.llama_cpp import runs_llama_cpp

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
# GPT-2's pre-tokenizer keeps 1234 in one piece, Qwen2's takes each digit alone.
MERGES = [("Ġ", "w"), ("h", "e"), ("Ġw", "he"), ("1", "2"), ("12", "3"), ("123", "4")]
VOCABULARY = ["<s>", *BYTES, *("".join(pair) for pair in MERGES)]
PLAIN = ["Ġ w", "h e", "Ġw he", "1 2", "12 3", "123 4"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """A byte-level BPE with GPT-2's pre-tokenizer, without BOS."""
    return of_folder(tokenizer(tmp_path_factory.mktemp("reference")))


def tokenizer(folder: Path, *, bos: bool = False) -> Path:
    ids = {token: number for number, token in enumerate(VOCABULARY)}
    bpe = Tokenizer(models.BPE(ids, MERGES))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if bos:
        bpe.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    bpe.save(str(folder / "tokenizer.json"))
    return folder


def header(file: Path, **fields: Any) -> Path:
    """Write the vocabulary of ``reference`` as a GGUF.

    ``fields`` replace parts of it; None leaves one out.
    """
    values = {
        "pre": "gpt-2",
        "merges": PLAIN,
        "add_bos_token": False,
        "add_space_prefix": None,
        **fields,
    }
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, *[1] * (len(VOCABULARY) - 1)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    adding: dict[str, Callable[[Any], None]] = {
        "pre": writer.add_tokenizer_pre,
        "merges": writer.add_token_merges,
        "add_bos_token": writer.add_add_bos_token,
        "add_space_prefix": writer.add_add_space_prefix,
    }
    for name, add in adding.items():
        if values[name] is not None:
            add(values[name])
    finish_gguf(writer, tensors=False)
    return file


def findings_on(file: Path, reference: Tokens, engine_tokens: Any = None) -> list[tuple[str, str]]:
    """Return (severity, text) of the doctor's findings on a GGUF."""
    tokens = of_gguf(read_model(file), engine_tokens)
    findings = differing_tokens(tokens, reference)
    return [(finding.severity, finding.what) for finding in findings]


CASES = [
    ({}, None, ""),
    # Only llama.cpp knows its defaults.
    ({"add_bos_token": None, "pre": None}, None, ""),
    ({"merges": PLAIN[:3]}, "wrong", "it lacks 3 merges of the reference, such as '1 2'"),
    (
        {"merges": [*PLAIN, "a b"]},
        "wrong",
        "it has 1 merge that the reference lacks, such as 'a b'",
    ),
    ({"merges": [*PLAIN[1:], PLAIN[0]]}, "warning", "in another order"),
    ({"merges": [*PLAIN[:4], "1 23", "123 4"]}, "warning", "of other parts"),
    (
        {"add_bos_token": True},
        "wrong",
        "it adds a BOS token before the text, and the reference does not",
    ),
    ({"add_space_prefix": False}, None, ""),
    (
        {"add_space_prefix": True},
        "wrong",
        "it adds a space before the text, and the reference does not",
    ),
]


@pytest.mark.parametrize(("fields", "severity", "expected"), CASES)
def test_rules_in_a_header(
    tmp_path: Path, reference: Tokens, fields: dict[str, Any], severity: str | None, expected: str
) -> None:
    findings = findings_on(header(tmp_path / "model.gguf", **fields), reference)
    if severity is None:
        assert findings == []
        return
    ((actual, text),) = findings
    assert actual == severity
    assert expected in text


def test_a_reference_with_bos(tmp_path: Path) -> None:
    adding = of_folder(tokenizer(tmp_path, bos=True))
    assert findings_on(header(tmp_path / "a.gguf", add_bos_token=True), adding) == []
    ((severity, text),) = findings_on(header(tmp_path / "b.gguf"), adding)
    assert severity == "wrong"
    assert "does not add a BOS token" in text


def test_a_config_that_names_a_class_with_bos_is_not_sure(
    tmp_path: Path, reference: Tokens
) -> None:
    """Transformers' class may add BOS although tokenizer.json does not."""
    (tokenizer(tmp_path) / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "LlamaTokenizerFast"}'
    )
    file = header(tmp_path / "model.gguf", add_bos_token=True)
    assert findings_on(file, of_folder(tmp_path)) == []
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}'
    )
    assert (
        findings_on(file, of_folder(tmp_path)) == []
    )  # its own config and tokenizer.json disagree


def test_pre_tokenizers_of_two_headers(tmp_path: Path) -> None:
    one = header(tmp_path / "one.gguf", pre=None)
    other = of_gguf(read_model(header(tmp_path / "other.gguf")))
    ((severity, text),) = findings_on(one, other)
    assert severity == "wrong"
    assert "its pre-tokenizer is not named, and the reference's is 'gpt-2'" in text


def test_tokens_of_samples(tmp_path: Path, reference: Tokens) -> None:
    """An ordinary text with other tokens is wrong; libraries differ in rare characters."""
    ids = dict(reference.rules.ids)
    tokens = {"ids": ids, "adds_bos": False}
    file = header(tmp_path / "model.gguf", merges=[*PLAIN[1:], PLAIN[0]])
    # The merges are in another order, but make the same tokens.
    assert findings_on(file, reference, tokens) == []
    # The first sample is ordinary text, the last one has emoji and rare spaces.
    for index, severity in ((0, "wrong"), (-1, "warning")):
        sample = list(ids)[index]
        tokens["ids"] = {**ids, sample: "0"}
        ((actual, _),) = findings_on(file, reference, tokens)
        assert actual == severity


@runs_llama_cpp
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ""),
        # llama.cpp's defaults; it adds no space in BPE.
        ({"add_bos_token": None, "add_space_prefix": True}, ""),
        ({"pre": "default"}, "its pre-tokenizer is 'default', and it cuts text into other tokens"),
        ({"pre": "qwen2"}, "its pre-tokenizer is 'qwen2', and it cuts text into other tokens"),
        ({"add_bos_token": True}, "adds a BOS token"),
        ({"merges": PLAIN[:3]}, "it lacks 3 merges"),
    ],
)
def test_tokens_that_llama_cpp_makes(
    tmp_path: Path, reference: Tokens, fields: dict[str, Any], expected: str
) -> None:
    file = header(tmp_path / "model.gguf", **fields)
    tokens = LlamacppEngine.tokens(file, samples())
    assert tokens is not None
    findings = findings_on(file, reference, {**tokens, "ids": digests(tokens["ids"])})
    if not expected:
        assert findings == []
        return
    ((severity, text),) = findings
    assert severity == "wrong"
    assert expected in text
