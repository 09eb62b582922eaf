"""Secrets in texts and options."""

from __future__ import annotations

import pytest

from compare_q.backends.common.message_text import KEYS_OF_OTHER_TOOLS, nearest, printable, redacted

HUB = "hf_" + "aB3" * 10
TEXTS = {
    "https://me:pw@host/x": "https://***@host/x",
    f"https://{HUB}@host/x": "https://***@host/x",
    "http://h/t.jsonl?token=abc&x=1&sig=q#k": "http://h/t.jsonl?token=***&x=1&sig=***#k",
    # ``monkey`` only ends like the name of a secret.
    "http://h/t?key=abc&monkey=5&X-Amz-Signature=zz": (
        "http://h/t?key=***&monkey=5&X-Amz-Signature=***"
    ),
    f"401 for {HUB}: refused": "401 for ***: refused",
    "Authorization: Bearer abcdefghij123": "Authorization: Bearer ***",
    "refused: of-this-machine": "refused: ***",
}
"""Text with secrets -> the text in a message."""
TEXTS_WITHOUT_SECRETS = (
    "hf_llama_3_8b_instruct_w4a16_g128",
    "hf://datasets/owner/name@rev/x.txt",
    "me@host",
    "http://h/a@b?max_tokens=1",
    "/home/of/this/machine",
    "token 5 is 'x'",
)


@pytest.fixture
def secrets_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANY_TOKEN", "of-this-machine")
    # Such variables may hold the path of a file, which is no secret.
    monkeypatch.setenv("SOME_CREDENTIALS", "/home/of/this/machine")


@pytest.mark.usefixtures("secrets_in_environment")
@pytest.mark.parametrize("text", TEXTS)
def test_secrets_leave_no_message(text: str) -> None:
    assert printable(text) == TEXTS[text]


@pytest.mark.usefixtures("secrets_in_environment")
@pytest.mark.parametrize("text", TEXTS_WITHOUT_SECRETS)
def test_other_texts_stay(text: str) -> None:
    assert printable(text) == text


def test_secrets_in_options() -> None:
    harmless = {
        # Tokens of a text, which give no access.
        "bos_token": "<s>",
        "pad_token": "p",
        "boi_token": "<boi>",
        "key": "k",
        "max_tokens": 5,
        "api_key_env": "X",
        # In huggingface_hub, True means the token that is stored on the machine.
        "token": True,
    }
    secrets = {"hf_token": "x", "nested": [{"aws.secret": "x", "S3_API_KEY": "x"}]}
    hidden = {"hf_token": "***", "nested": [{"aws.secret": "***", "S3_API_KEY": "***"}]}
    assert redacted({**harmless, **secrets}) == {**harmless, **hidden}


KEYS = (
    "tokenizer_dir",
    "detokenize",
    "kv_cache_dtype",
    "enforce_eager",
    "reference",
    "replicas",
    "max_model_len",
)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("tokenizer", "tokenizer_dir"),
        ("kv_dtype", "kv_cache_dtype"),
        ("ref", "reference"),
        ("Ctx", "max_model_len"),
        ("enforce_eagr", "enforce_eager"),
        # Its key here, n_gpu_layers, is not a key of this object.
        ("ngl", None),
        ("xyz", None),
    ],
)
def test_a_name_from_elsewhere_is_what_its_user_meant(name: str, meant: str | None) -> None:
    """The suggestion is from a table or the nearest name, and always a key of this object."""
    assert len(KEYS_OF_OTHER_TOOLS) <= 25
    hint = ""
    if meant is not None:
        hint = f" (did you mean {meant!r}?)"
    assert nearest(name, KEYS) == hint
