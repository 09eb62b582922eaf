"""Headers, shards and damaged files, and stamps."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from compare_q.backends.base import Storage
from compare_q.backends.checkpoint import safetensors_files as checkpoint
from compare_q.backends.checkpoint.checkpoint_config import CheckpointConfig
from compare_q.backends.checkpoint.folder import storage_of
from compare_q.backends.common.errors import ModelError
from compare_q.backends.hf.transformers_engine import TransformersEngine
from tests.support.checkpoints import ENDS, LAYER, Q, safetensors_bytes, write_checkpoint
from tests.support.toy import planned, refusal


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    """One shard has 512 bits, the other the head's 640; the third file is not in the index."""
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
    """Transformers loads model.safetensors and an adapter; vLLM loads the index's files alone.

    A message names what was given instead of a model: an adapter, a file, a pointer of Git LFS,
    pickled weights.
    """
    folder = write_checkpoint(tmp_path, ENDS)
    (folder / "model-1.safetensors").write_bytes(safetensors_bytes(ENDS))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(ENDS, "model-1.safetensors")}))
    for function in (checkpoint.weight_files, storage_of, checkpoint.stamp):
        assert "two sets of weights" in refusal(function, folder)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(ENDS, "model.safetensors")}))
    assert checkpoint.weight_files(folder) == [folder / "model.safetensors"]
    (folder / "adapter_config.json").write_text("{}")
    assert refusal(checkpoint.weight_files, folder).startswith(
        f"{folder / 'adapter_config.json'}: an adapter"
    )
    (folder / "config.json").unlink()
    assert refusal(CheckpointConfig.read, folder).startswith(
        f"{folder / 'config.json'}: missing; it holds a LoRA adap"
    )
    single = folder / "model.safetensors"
    assert refusal(CheckpointConfig.read, single).startswith(
        f"{single}: is a file; name the folder"
    )
    for content, reason in (
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS"),
        (b"", "ends too early"),
    ):
        single.write_bytes(content)
        assert reason in refusal(checkpoint.read_header, single)
    single.rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin" in checkpoint.no_weights(folder)


def test_stamp_follows_configs_and_weights_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    entries = {**ENDS, f"{Q}.weight": ("BF16", 8, 4)}
    weights = write_checkpoint(folder, entries) / "model.safetensors"
    # Seconds in float64 cannot hold the last nanosecond of this time.
    os.utime(weights, ns=(10**18, 10**18 + 1))
    first = checkpoint.stamp(folder)
    for name in ("README.md", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    os.utime(folder / "config.json", (1, 1))
    assert checkpoint.stamp(folder) == first
    stamps = {first}
    for name in (
        "config.json",
        "generation_config.json",
        "quantize_config.json",
        "hf_quant_config.json",
        "params.json",
        "consolidated.safetensors.index.json",
        "code/part.py",
        "consolidated.safetensors",
        "pytorch_model.bin",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('{"bits": 4}')
        stamps.add(checkpoint.stamp(folder))
    os.utime(weights, ns=(10**18, 10**18 + 2))
    stamps.add(checkpoint.stamp(folder))
    # Other weights of the same size and time.
    weights.write_bytes(safetensors_bytes({**entries, f"{Q}.weight": ("BF16", 4, 8)}))
    os.utime(weights, ns=(10**18, 10**18 + 2))
    stamps.add(checkpoint.stamp(folder))
    # The first stamp, nine files, another time, and other weights.
    assert len(stamps) == 12


# A file of 1 MiB has 64 samples of 4 KiB, about 16 KiB apart. 100,000 bytes reach some of them; one
# byte in the middle is between two.
@pytest.mark.parametrize(("n_bytes", "is_seen_in_a_copy"), [(1, False), (100_000, True)])
def test_stamp_sees_weights_that_keep_header_size_and_time(
    tmp_path: Path, n_bytes: int, *, is_seen_in_a_copy: bool
) -> None:
    """Even a changed byte between two samples is noticed, by the status-change time.

    A copy has another status-change time.
    """
    folder = write_checkpoint(
        tmp_path, {"model.layers.0.mlp.up_proj.weight": ("BF16", 512, 1024), **ENDS}
    )
    file = folder / "model.safetensors"
    first = checkpoint.stamp(folder)
    content = checkpoint.stamp(folder, times=False)
    time = file.stat().st_mtime_ns
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        stream.write(b"\x01" * n_bytes)
    os.utime(file, ns=(time, time))
    assert checkpoint.stamp(folder) != first
    assert (checkpoint.stamp(folder, times=False) != content) == is_seen_in_a_copy


def test_a_copy_has_another_stamp_and_the_same_content(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", ENDS)
    # This keeps all times that a program can set.
    copied = Path(shutil.copytree(folder, tmp_path / "b"))
    assert checkpoint.stamp(copied) != checkpoint.stamp(folder)
    assert checkpoint.stamp(copied, times=False) == checkpoint.stamp(folder, times=False)
    (copied / "config.json").write_text('{"vocab_size": 255}')
    assert checkpoint.stamp(copied, times=False) != checkpoint.stamp(folder, times=False)


def test_weights_that_change_while_they_are_scored_are_refused(tmp_path: Path) -> None:
    """Files that a user deletes after they are loaded are not an error."""
    file = write_checkpoint(tmp_path, ENDS) / "model.safetensors"
    request = planned("m", "transformers", str(tmp_path), 100)
    engine = TransformersEngine(request.updated(stamp=TransformersEngine.files(request).stamp()))
    engine.check_unchanged()
    engine.check_unchanged()
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x01")
    with pytest.raises(ModelError, match="changed"):
        engine.check_unchanged()
    file.unlink()
    engine.check_unchanged()
