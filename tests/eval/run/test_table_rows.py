"""What a row says of its model's files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from compare_q.eval.run.rows import file_bytes
from tests.support.checkpoints import write_checkpoint
from tests.support.planned import planned


def test_the_size_of_a_folder_is_that_of_its_weight_files_alone(tmp_path: Path) -> None:
    """With files that replace tensors, and without what the engine does not load."""
    folder = write_checkpoint(tmp_path / "model", {"lm_head.weight": ("BF16", 8, 4)})
    (folder / "tokenizer.json").write_bytes(b"x" * 1000)
    stored = (folder / "model.safetensors").stat().st_size
    assert 64 < stored < 1000
    assert file_bytes(planned("m", "transformers", str(folder), 100)) == stored
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"x" * 500)
    assert file_bytes(planned("m", "transformers", str(folder), 100, override_tensors=(other,))) == stored + 500


def test_the_size_of_a_gguf_file_is_that_of_all_its_splits(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=1)
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
        writer.add_tensor(name, np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) == 2
    for file in files:
        size = file_bytes(planned("m", "llamacpp", str(file), 100))
        assert size == sum(each.stat().st_size for each in files) > 8192


def test_files_that_are_not_here_have_no_size() -> None:
    assert file_bytes(planned("m", "fake", "anything", 100)) is None
