"""Headers, shards and damaged files; stamps; what the config says."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.base import Storage
from backends.checkpoint import config as checkpoint_config
from backends.checkpoint import files as checkpoint
from backends.checkpoint import stored_bits
from tests.support.toy import refusal

BITS = {
    "I64": 64, "F32": 32, "I32": 32, "BF16": 16, "F16": 16, "I16": 16, "I8": 8, "U8": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F4": 4,
}  # fmt: skip
LAYER = "model.layers.0"
Q = f"{LAYER}.self_attn.q_proj"
Entry = tuple[Any, ...]  # dtype, then the shape
Entries = dict[str, Entry]
# The embedding has 40 weights of 32 bits and the head 40 of 16, so that neither can pass for the other.
ENDS: Entries = {"model.embed_tokens.weight": ("F32", 10, 4), "lm_head.weight": ("BF16", 10, 4)}


def header(entries: Entries, values: dict[str, bytes] | None = None) -> bytes:
    """A safetensors file by hand: any dtype the format knows, zeros unless ``values`` says otherwise."""
    described, body = {}, b""
    for name, (dtype, *shape) in entries.items():
        data = (values or {}).get(name, bytes(math.prod(shape) * BITS[dtype] // 8))
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    raw = json.dumps({"__metadata__": {"format": "pt"}, **described}).encode()
    return struct.pack("<Q", len(raw)) + raw + body


def model(
    folder: Path, entries: Entries, config: dict[str, Any] | None = None, values: dict[str, bytes] | None = None
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {}))
    (folder / "model.safetensors").write_bytes(header(entries, values))
    return folder


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    """512 bits in the one shard, 640 of the head in the other; the third file belongs to nothing."""
    folder = model(tmp_path, {f"{LAYER}.mlp.up_proj.weight": ("F32", 8, 4)})
    (folder / "model-1.safetensors").write_bytes(header({f"{Q}.weight": ("BF16", 8, 4)}))
    (folder / "model-2.safetensors").write_bytes(header(ENDS))
    index = folder / "model.safetensors.index.json"
    names = {f"{Q}.weight": "model-1.safetensors", **dict.fromkeys(ENDS, "model-2.safetensors")}
    index.write_text(json.dumps({"metadata": {"total_size": 304}, "weight_map": names}))
    assert stored_bits.storage_of(folder) == Storage(16.0, 16.0, 1152)
    (folder / "model-2.safetensors").unlink()
    for function in (checkpoint.weight_files, stored_bits.storage_of, checkpoint.stamp):
        assert str(folder / "model-2.safetensors") in refusal(function, folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}'])
def test_broken_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    text = refusal(checkpoint.weight_files, tmp_path)
    assert text.startswith(f"{tmp_path / 'model.safetensors.index.json'}: not a safetensors index")


def test_weights_stored_twice_are_counted_once(tmp_path: Path) -> None:
    folder = model(tmp_path, {**ENDS, f"{Q}.weight": ("BF16", 8, 4)})
    (folder / "consolidated.safetensors").write_bytes(header({"layers.0.attention.wq.weight": ("F32", 8, 4)}))
    assert checkpoint.weight_files(folder) == [folder / "model.safetensors"]
    assert stored_bits.storage_of(folder) == Storage(16.0, 16.0, 1152)
    (folder / "model.safetensors").unlink()
    assert checkpoint.weight_files(folder) == [folder / "consolidated.safetensors"]


def test_override_tensors_replace(tmp_path: Path) -> None:
    """q_proj 32 * 16 = 512 bits stays, o_proj 32 * 16 becomes 32 * 8: (512 + 256) / 64 = 12.0."""
    o = f"{LAYER}.self_attn.o_proj.weight"
    folder = model(tmp_path / "m", {**ENDS, f"{Q}.weight": ("BF16", 8, 4), o: ("BF16", 8, 4)})
    override, second = tmp_path / "override.safetensors", tmp_path / "second.safetensors"
    override.write_bytes(header({o: ("F8_E4M3", 8, 4)}))
    second.write_bytes(header({o: ("F32", 8, 4)}))
    assert stored_bits.storage_of(folder, [override]) == Storage(12.0, 16.0, 768 + 640)
    assert stored_bits.storage_of(folder, [override, second]) == Storage(24.0, 16.0, 1536 + 640)  # 512 + 1,024
    assert len({checkpoint.stamp(folder, files) for files in ([], [override], [second], [override, second])}) == 4


@pytest.mark.parametrize("function", [stored_bits.storage_of, checkpoint.stamp])
def test_missing_override_tensors_are_named(tmp_path: Path, function: Callable[..., object]) -> None:
    folder = model(tmp_path, {**ENDS, f"{Q}.weight": ("BF16", 8, 4)})
    assert refusal(function, folder, [tmp_path / "none.safetensors"]).startswith(f"{tmp_path / 'none.safetensors'}: ")


def test_stamp_follows_configs_and_weights_and_nothing_else(tmp_path: Path) -> None:
    folder, entries = tmp_path / "a", {**ENDS, f"{Q}.weight": ("BF16", 8, 4)}
    weights = model(folder, entries) / "model.safetensors"
    os.utime(weights, ns=(10**18, 10**18 + 1))
    first = checkpoint.stamp(folder)
    for name in ("README.md", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    os.utime(folder / "config.json", (1, 1))
    assert checkpoint.stamp(folder) == first
    shutil.copytree(folder, tmp_path / "b")  # keeps the times of the files
    assert checkpoint.stamp(tmp_path / "b") == first

    seen = {first}
    for name in (
        "config.json",
        "generation_config.json",
        "quantize_config.json",
        "hf_quant_config.json",
        "params.json",
    ):
        (folder / name).write_text('{"bits": 4}')
        seen.add(checkpoint.stamp(folder))
    os.utime(weights, ns=(10**18, 10**18 + 2))
    seen.add(checkpoint.stamp(folder))
    weights.write_bytes(header({**entries, f"{Q}.weight": ("BF16", 4, 8)}))  # as large, and as old
    os.utime(weights, ns=(10**18, 10**18 + 2))
    seen.add(checkpoint.stamp(folder))
    assert len(seen) == 8


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("config", "gold"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 32768, "rope_parameters": {**YARN, "rope_theta": 1e6}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": YARN}, 131072),  # the factor is in it already
        ({"max_position_embeddings": 131072, "rope_scaling": LLAMA3}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {**LLAMA3, "factor": 32.0}}, 131072),  # Llama 3.2
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),  # Vicuna 16k
        ({"model_type": "gemma3_text", "max_position_embeddings": 131072,
          "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 131072),  # Gemma 3: the factor is in it already
        ({"max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 8192),
        ({"max_position_embeddings": 8192, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, 8192),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"max_position_embeddings": 10, "text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"vocab_size": 5}, None),
    ],
)  # fmt: skip
def test_context_length(config: dict[str, Any], gold: int | None) -> None:
    assert checkpoint_config.context_length(config) == gold


@pytest.mark.parametrize(
    ("config", "gold"),
    [
        ({"vocab_size": 32000}, 32000),
        ({"text_config": {"vocab_size": 256000}}, 256000),
        ({"vocab_size": 5, "text_config": {"vocab_size": 256000}}, 256000),
        ({"vocab_size": 5, "text_config": {"hidden_size": 8}}, 5),
        ({"vocab_size": None}, None),
        ({}, None),
    ],
)
def test_vocabulary(config: dict[str, Any], gold: int | None) -> None:
    assert checkpoint_config.vocab_size(config) == gold


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b'"text"', b"\xff\xfe"])
def test_bad_config(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert refusal(checkpoint_config.config_of, tmp_path).startswith(f"{tmp_path / 'config.json'}: ")


WHOLE = header({f"{Q}.weight": ("F32", 8, 4)})  # the last 128 bytes are the weights


def framed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


BAD_FILES = {
    "empty": b"",
    "no whole length": WHOLE[:7],
    "length alone": WHOLE[:8],
    "cut in the header": WHOLE[:60],
    "no weights": WHOLE[:-128],
    "last byte missing": WHOLE[:-1],
    "LFS pointer": b"version https://git-lfs.github.com/spec/v1",
    "no JSON": framed(b"not JSON"),
    "no text": framed(b"\xff\xff"),
    "list": framed(b"[1]"),
    "number": framed(b'{"a.weight": 5}'),
    "no dtype": framed(b'{"a.weight": {}}'),
    "no offsets": framed(b'{"a.weight": {"dtype": "F32", "shape": [1, 1], "data_offsets": null}}'),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_safetensors_are_named(tmp_path: Path, kind: str) -> None:
    folder = model(tmp_path, {})
    (folder / "model.safetensors").write_bytes(BAD_FILES[kind])
    assert refusal(stored_bits.storage_of, folder).startswith(f"{folder / 'model.safetensors'}: ")


def test_stamp_sees_weights_that_keep_header_size_and_time(tmp_path: Path) -> None:
    folder = model(tmp_path, {"model.layers.0.mlp.up_proj.weight": ("BF16", 512, 1024), **ENDS})
    file = folder / "model.safetensors"
    first, time = checkpoint.stamp(folder), file.stat().st_mtime_ns
    data = bytearray(file.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 100_000] = b"\x01" * 100_000
    file.write_bytes(data)
    os.utime(file, ns=(time, time))
    assert checkpoint.stamp(folder) != first


def test_a_copy_has_another_stamp_and_the_same_content(toy_model: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(toy_model, tmp_path / "copy"))
    for file in copied.iterdir():
        os.utime(file, (1, 1))
    assert checkpoint.stamp(copied) != checkpoint.stamp(toy_model)
    assert checkpoint.stamp(copied, times=False) == checkpoint.stamp(toy_model, times=False)
    (copied / "config.json").write_text((copied / "config.json").read_text().replace("256", "255"))
    assert checkpoint.stamp(copied, times=False) != checkpoint.stamp(toy_model, times=False)


def test_quantization_wherever_it_is_kept(tmp_path: Path) -> None:
    folder = model(tmp_path, ENDS)
    assert checkpoint_config.quantization(folder) == {}
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert checkpoint_config.quantization(folder) == {
        "quant_method": "modelopt",
        "quantization": {"quant_algo": "NVFP4"},
    }
    for damaged in ("{", "[1]"):
        (folder / "hf_quant_config.json").write_text(damaged)
        assert "hf_quant_config.json: cannot be read: " in refusal(checkpoint_config.quantization, folder)
    nested = {"text_config": {"quantization_config": {"quant_method": "fp8"}}}
    assert checkpoint_config.quantization(model(tmp_path / "b", ENDS, nested)) == {"quant_method": "fp8"}


def test_strays_are_files_that_are_not_the_models(tmp_path: Path) -> None:
    folder = model(tmp_path, ENDS)
    assert checkpoint.strays(folder) == []
    shutil.copy(folder / "model.safetensors", folder / "extra.safetensors")
    assert checkpoint.strays(folder) == [folder / "extra.safetensors"]
