"""Headers, shards and damaged files, and stamps."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

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


def test_stamp_sees_weights_that_keep_header_size_and_time(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {"model.layers.0.mlp.up_proj.weight": ("BF16", 512, 1024), **ENDS})
    file = folder / "model.safetensors"
    first, time = checkpoint.stamp(folder), file.stat().st_mtime_ns
    data = bytearray(file.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 100_000] = b"\x01" * 100_000
    file.write_bytes(data)
    os.utime(file, ns=(time, time))
    assert checkpoint.stamp(folder) != first


def test_a_copy_has_another_stamp_and_the_same_content(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", ENDS)
    copied = Path(shutil.copytree(folder, tmp_path / "b"))
    for file in copied.iterdir():
        os.utime(file, (1, 1))
    assert checkpoint.stamp(copied) != checkpoint.stamp(folder)
    assert checkpoint.stamp(copied, times=False) == checkpoint.stamp(folder, times=False)
    (copied / "config.json").write_text('{"vocab_size": 255}')
    assert checkpoint.stamp(copied, times=False) != checkpoint.stamp(folder, times=False)
