"""Chat templates on the toy's byte-level tokenizer, and conversations, one with a tool call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.toy import save_toy_tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>"]
"""Ids 257 and 258; the toy's own special token, 256, is its EOS."""

MARKED = """\
{%- if tools %}{{ '<|im_start|>tools\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ '<call>' + call.function | tojson + '</call>' }}{% endfor %}
{{- '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""ChatML, which marks what the assistant generates."""


WEATHER = {
    "messages": [
        {"role": "user", "content": "Rain in Bern?"},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "type": "function",
                    # OpenAI's API has the arguments as a string of JSON.
                    "function": {"name": "weather", "arguments": '{"town": "Bern"}'},
                }
            ],
        },
        {"role": "tool", "content": "dry"},
        # The last character has three bytes, so three tokens.
        {"role": "assistant", "content": "No, it is dry ☀"},
    ],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}],
}
SUMS = {
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And 3+3?"},
        {"role": "assistant", "content": "It is 6."},
    ]
}
QUESTION = {"messages": [{"role": "user", "content": "Is anybody there?"}]}
"""A conversation without an answer."""


def save_chat_tokenizer(folder: Path, template: str) -> Path:
    """Save the toy's tokenizer with two more special tokens, and with this chat template."""
    from tokenizers import Tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    save_toy_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_lines(file: Path, *rows: Any) -> Path:
    """Write a JSON lines file."""
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
