"""Headers, shards and damaged files, and stamps."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

from compare_q.backends.base import Storage
from compare_q.backends.checkpoint import files as checkpoint
from compare_q.backends.checkpoint.folder import storage_of
from tests.support.checkpoints import ENDS, LAYER, Q, safetensors_bytes, write_checkpoint
from tests.support.toy import refusal


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    """512 bits in the one shard, 640 of the head in the other; the third file belongs to nothing."""
    folder = write_checkpoint(tmp_path, {f"{LAYER}.mlp.up_proj.weight": ("F32", 8, 4)})
    (folder / "model-1.safetensors").write_bytes(safetensors_bytes({f"{Q}.weight": ("BF16", 8, 4)}))
    (folder / "model-2.safetensors").write_bytes(safetensors_bytes(ENDS))
    index = folder / "model.safetensors.index.json"
    names = {f"{Q}.weight": "model-1.safetensors", **dict.fromkeys(ENDS, "model-2.safetensors")}
    index.write_text(json.dumps({"metadata": {"total_size": 304}, "weight_map": names}))
    (folder / "model.safetensors").rename(folder / "model-3.safetensors")
    assert storage_of(folder) == Storage(16.0, 16.0, 1152)
    (folder / "model-2.safetensors").unlink()
    for function in (checkpoint.weight_files, storage_of, checkpoint.stamp):
        assert str(folder / "model-2.safetensors") in refusal(function, folder)


def test_a_folder_of_which_engines_load_different_files_is_refused(tmp_path: Path) -> None:
    """Transformers loads model.safetensors, vLLM the files of the index; Transformers applies an adapter, vLLM not."""
    folder = write_checkpoint(tmp_path, ENDS)
    (folder / "model-1.safetensors").write_bytes(safetensors_bytes(ENDS))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(ENDS, "model-1.safetensors")}))
    for function in (checkpoint.weight_files, storage_of, checkpoint.stamp):
        assert "two sets of weights" in refusal(function, folder)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(ENDS, "model.safetensors")}))
    assert checkpoint.weight_files(folder) == [folder / "model.safetensors"]
    (folder / "adapter_config.json").write_text("{}")
    assert refusal(checkpoint.weight_files, folder).startswith(f"{folder / 'adapter_config.json'}: an adapter")


def test_without_an_index_the_single_file_is_the_model(tmp_path: Path) -> None:
    """As in Transformers; vLLM would load a second file as well, which makes that one a stray."""
    folder = write_checkpoint(tmp_path, ENDS)
    shutil.copy(folder / "model.safetensors", folder / "model.fp16.safetensors")
    assert checkpoint.weight_files(folder) == [folder / "model.safetensors"]
    assert checkpoint.strays(folder) == [folder / "model.fp16.safetensors"]


@pytest.mark.parametrize(
    ("content", "gold"),
    [
        ("{", "line 1, column 2: not valid JSON"),
        ("[]", "must hold a JSON object"),
        ('{"weight_map": {"a": 5}}', "not a safetensors index"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "not a safetensors index"),
    ],
)
def test_broken_index(tmp_path: Path, content: str, gold: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    text = refusal(checkpoint.weight_files, tmp_path)
    assert text.startswith(f"{tmp_path / 'model.safetensors.index.json'}: {gold}")


def test_weights_stored_twice_are_counted_once(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {**ENDS, f"{Q}.weight": ("BF16", 8, 4)})
    (folder / "consolidated.safetensors").write_bytes(
        safetensors_bytes({"layers.0.attention.wq.weight": ("F32", 8, 4)})
    )
    assert checkpoint.weight_files(folder) == [folder / "model.safetensors"]
    assert storage_of(folder) == Storage(16.0, 16.0, 1152)
    (folder / "model.safetensors").unlink()
    assert checkpoint.weight_files(folder) == [folder / "consolidated.safetensors"]


def test_override_tensors_replace(tmp_path: Path) -> None:
    """q_proj 32 * 16 = 512 bits stays, o_proj 32 * 16 becomes 32 * 8: (512 + 256) / 64 = 12.0."""
    o = f"{LAYER}.self_attn.o_proj.weight"
    folder = write_checkpoint(tmp_path / "m", {**ENDS, f"{Q}.weight": ("BF16", 8, 4), o: ("BF16", 8, 4)})
    override, second = tmp_path / "override.safetensors", tmp_path / "second.safetensors"
    override.write_bytes(safetensors_bytes({o: ("F8_E4M3", 8, 4)}))
    second.write_bytes(safetensors_bytes({o: ("F32", 8, 4)}))
    assert storage_of(folder, [override]) == Storage(12.0, 16.0, 768 + 640)
    assert storage_of(folder, [override, second]) == Storage(24.0, 16.0, 1536 + 640)  # 512 + 1,024
    assert len({checkpoint.stamp(folder, files) for files in ([], [override], [second], [override, second])}) == 4
    for function in (storage_of, checkpoint.stamp):
        assert refusal(function, folder, [tmp_path / "none"]).startswith(f"{tmp_path / 'none'}: ")


def test_stamp_follows_configs_and_weights_and_nothing_else(tmp_path: Path) -> None:
    folder, entries = tmp_path / "a", {**ENDS, f"{Q}.weight": ("BF16", 8, 4)}
    weights = write_checkpoint(folder, entries) / "model.safetensors"
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
        "config.json", "generation_config.json", "quantize_config.json", "hf_quant_config.json", "params.json",
        "consolidated.safetensors.index.json", "code/part.py", "consolidated.safetensors", "pytorch_model.bin",
    ):  # fmt: skip
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('{"bits": 4}')
        seen.add(checkpoint.stamp(folder))
    os.utime(weights, ns=(10**18, 10**18 + 2))
    seen.add(checkpoint.stamp(folder))
    weights.write_bytes(safetensors_bytes({**entries, f"{Q}.weight": ("BF16", 4, 8)}))  # as large, and as old
    os.utime(weights, ns=(10**18, 10**18 + 2))
    seen.add(checkpoint.stamp(folder))
    assert len(seen) == 12


WHOLE = safetensors_bytes({f"{Q}.weight": ("F32", 8, 4)})  # the last 128 bytes are the weights


def framed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def entry(keys: str) -> bytes:
    """A file with one tensor of these keys, and four bytes."""
    return framed(f'{{"a.weight": {{{keys}}}}}'.encode()) + bytes(4)


BAD_FILES = {
    "empty": b"",
    "length alone": WHOLE[:8],
    "cut in the header": WHOLE[:60],
    "last byte missing": WHOLE[:-1],
    "LFS pointer": b"version https://git-lfs.github.com/spec/v1",
    "no JSON": framed(b"not JSON"),
    "list": framed(b"[1]"),
    "number": framed(b'{"a.weight": 5}'),
    "header length beyond the file": struct.pack("<Q", 2**63),
    "nested": framed(b"[" * 100_000),
    "sizes without end": entry(f'"dtype": "F32", "shape": {[10**39] * 9}, "data_offsets": [0, 4]'),
    "bytes that are not the shape's": entry('"dtype": "F32", "shape": [2], "data_offsets": [0, 4]'),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_safetensors_are_named(tmp_path: Path, kind: str) -> None:
    folder = write_checkpoint(tmp_path, {})
    (folder / "model.safetensors").write_bytes(BAD_FILES[kind])
    assert refusal(storage_of, folder).startswith(f"{folder / 'model.safetensors'}: ")


def test_stamp_sees_weights_that_keep_header_size_and_time(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {"model.layers.0.mlp.up_proj.weight": ("BF16", 512, 1024), **ENDS})
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
