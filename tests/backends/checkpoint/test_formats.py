"""Stored bits, weights and words of one matrix in every format, by hand; of downloads; of formats not known; and of
files that real writers wrote, counted in the files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from compare_q.backends.base import Storage
from compare_q.backends.checkpoint.folder import storage_of
from compare_q.backends.layers.schemes import declared, kv_cache
from tests.support import DATA
from tests.support.checkpoints import ENDS, LAYER, Entries, Q, write_checkpoint
from tests.support.downloads import DOWNLOADS
from tests.support.format_table import PAGE, TABLE, look, table
from tests.support.stored_formats import CASES, EXL3, HEADS, SIZES, Case, entries_of


def stored(folder: Path, case: Case, entries: Entries, module: str) -> Storage:
    """The storage of a model with these tensors; its counted tensors take as many bytes on disk as the case says."""
    values = {f"{module}.{part}": value for part, value in case.values.items()}
    config = {**case.config, **({"quantization_config": case.quantization} if case.quantization else {})}
    found = storage_of(write_checkpoint(folder, entries, config, values))
    raw = (folder / "model.safetensors").read_bytes()
    described = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    spans = [described[f"{module}.{part}"]["data_offsets"] for part in case.counted.split()]
    assert sum(end - begin for begin, end in spans) * 8 == case.bits
    return found


@pytest.mark.parametrize("name", CASES)
def test_layer(tmp_path: Path, name: str) -> None:
    """Alone, with a bf16 head (640 bits) or a float32 embedding as the head (1,280); beside a bf16 layer (512 / 32)."""
    case = CASES[name]
    layer, tied = entries_of(case, Q), {"model.embed_tokens.weight": ENDS["model.embed_tokens.weight"]}
    bpw = case.bits / case.weights
    assert stored(tmp_path, case, {**ENDS, **layer}, Q) == Storage(bpw, 16.0, case.bits + 640)
    assert stored(tmp_path, case, {**tied, **layer}, Q) == Storage(bpw, 32.0, case.bits + 1280)
    both = {**ENDS, **layer, f"{LAYER}.self_attn.o_proj.weight": ("BF16", 8, 4)}
    gold = Storage((case.bits + 512) / (case.weights + 32), 16.0, case.bits + 512 + 640)
    assert stored(tmp_path, case, both, Q) == gold


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("exl3 2.5 bits", "exl3 signs", "exl3 unpadded")]
)
def test_head(tmp_path: Path, name: str) -> None:
    """Quantized heads, and one tied to a quantized embedding; the layer is 512 bits for 32 weights."""
    case = HEADS.get(name, CASES[name])
    layer = {f"{Q}.weight": ("BF16", 8, 4), "model.embed_tokens.weight": ENDS["model.embed_tokens.weight"]}
    gold = Storage(16.0, case.bits / case.weights, case.bits + 512)
    assert stored(tmp_path, case, {**layer, **entries_of(case, "lm_head")}, "lm_head") == gold
    if not name.startswith("exl"):
        del layer["model.embed_tokens.weight"]
        module = "model.embed_tokens"
        assert stored(tmp_path, case, {**layer, **entries_of(case, module)}, module) == gold


@pytest.mark.parametrize("name", CASES)
def test_a_tensor_that_nobody_knows(tmp_path: Path, name: str) -> None:
    """One more tensor of one dimension beside the weight: it may be bits of it, so the size is not known."""
    entries = {**ENDS, **entries_of(CASES[name], Q), f"{Q}.zeta": ("F16", 4)}
    found = stored(tmp_path, CASES[name], entries, Q)
    assert found == Storage(note=f"{Q}.zeta: stored in a format that compare_q cannot size")


@pytest.mark.parametrize(
    ("config", "rows", "columns", "weights"),
    [
        ({"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}, 640, 256, 576 * 192),
        ({"hidden_size": 2048, "num_attention_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
          "qk_nope_head_dim": 128, "v_head_dim": 128}, 2048, 640, 2048 * 576),
        ({"hidden_size": 256, "num_attention_heads": 3, "head_dim": 90}, 256, 640, 256 * 540),
        ({"hidden_size": 256, "linear_num_key_heads": 2, "linear_key_head_dim": 50, "linear_num_value_heads": 2,
          "linear_value_head_dim": 60}, 256, 512, 256 * 440),
        ({"text_config": {"hidden_size": 200}, "hidden_size": 256}, 256, 256, 200 * 200),
        ({"hidden_size": 600, "intermediate_size": 620}, 640, 640, None),
        ({}, 640, 640, None),
    ],
)  # fmt: skip
def test_exl3_sizes(tmp_path: Path, config: dict[str, Any], rows: int, columns: int, weights: int | None) -> None:
    """A trellis says the padded size only; the true one is that in the config which is padded to it, if one is."""
    layer = {"trellis": ("I16", rows // 16, columns // 16, 16), "suh": ("F16", rows), "svh": ("F16", columns)}
    entries = {**ENDS, **{f"{Q}.{part}": entry for part, entry in layer.items()}}
    found = storage_of(write_checkpoint(tmp_path, entries, {**config, "quantization_config": EXL3}))
    bits = rows * columns + 16 * (rows + columns)
    if weights is None:
        assert found == Storage(note=f"{Q}.trellis: padded, and config.json does not say from which size")
    else:
        assert found == Storage(bits / weights, 16.0, bits + 640)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"weight": ("U8", 16, 1), "weight.absmax": ("F32", 1), "weight.quant_map": ("F32", 16)}, "weight"),
        ({"weight": ("U8", 16, 16), "weight_scale": ("F32", 16, 1)}, "weight"),
        ({"weight": ("I8", 8, 64), "weight_scale_inv": ("BF16", 8, 1)}, "weight"),
        ({"weight": ("I8", 8, 32), "scale": ("F32", 8, 2)}, "weight"),
        ({"weight_packed": ("I32", 64, 8), "weight_scale": ("BF16", 64, 2)}, "weight_packed"),
        ({"B": ("I32", 4, 128), "s": ("F16", 1, 64)}, "B"),  # AutoGPTQ's Marlin
        ({"compressed": ("BF16", 8, 32), "bitmask": ("U8", 8, 8), "shape": ("I64", 2, 1)}, "bitmask"),  # 2:4
        ({"weight_packed": ("I32", 4, 128), "scale_packed": ("F16", 1, 64), "meta": ("I16", 4, 128)}, "meta"),
        ({"qweight": ("U8", 256, 128), "scales": ("U8", 256, 8), "weight_global_scale": ("F32", 1)},
         "weight_global_scale"),  # FP-Quant
        ({"_weight_qdata": ("I32", 1, 8, 32, 4), "_weight_scale_and_zero": ("BF16", 8, 8, 2)},
         "_weight_scale_and_zero"),
        ({"qweight": ("I32", 8, 64), "scales": ("F16", 2, 64)}, "qweight"),
        ({"q_weight": ("I32", 7, 224), "q_scale": ("I32", 2, 28)}, "q_weight"),
        ({"codes": ("I16", 8, 4)}, "codes"),
        ({"weight": ("U8", 2, 64), "weight_scale": ("BF16", 1)}, "weight"),
        ({"weight": ("I8", 256, 256), "weight_scale_inv": ("F32", 2, 2)}, "weight"),
    ],
)  # fmt: skip
def test_unknown_formats_are_not_guessed(tmp_path: Path, parts: Entries, named: str) -> None:
    entries = {**ENDS, **{f"{Q}.{part}": entry for part, entry in parts.items()}}
    found = storage_of(write_checkpoint(tmp_path, entries, SIZES))
    assert found == Storage(note=f"{Q}.{named}: stored in a format that compare_q cannot size")


@pytest.mark.parametrize("name", DOWNLOADS)
def test_sizes_schemes_and_kv_cache(name: str) -> None:
    """Beside a head of 640 bits at 16 bits a weight."""
    download = DOWNLOADS[name]
    storage, config = look(download)
    assert storage == Storage(download.bits / download.weights, 16.0, download.bits + 640)
    stated = declared(config.quantization)
    assert tuple(stated.of(layer) for layer in download.layers) == download.schemes
    assert kv_cache(config.quantization) == download.kv


def test_page_has_this_table() -> None:
    """If it has not: ``python -m tests.support.format_table`` writes it."""
    found = TABLE.search(PAGE.read_text("utf-8"))
    assert found is not None
    assert found[0] == table()


def test_real_bitsandbytes_header(tmp_path: Path) -> None:
    """Two matrices of a model that bitsandbytes 0.50.2 quantized (nf4, nested scales), as its file describes them.

    64 x 64: 16,384 bits, 64 scales of 8, codes 16 * 32 and 256 * 32, one scale of 32: 25,632.  64 x 128: 32,768 + 128
    * 8 + 8,736 = 42,528.  Head 320 x 64 of 16 bits.
    """
    listed = json.loads((DATA / "bitsandbytes_nf4.json").read_text())
    entries = {name: entry[:2] if ".quant_state." in name else entry for name, entry in listed.items()}
    values = {name: entry[2].encode() for name, entry in listed.items() if ".quant_state." in name}
    found = storage_of(write_checkpoint(tmp_path, entries, {}, values))
    assert found == Storage((25632 + 42528) / (4096 + 8192), 16.0, 25632 + 42528 + 327680)


# The toy model has 2 layers: 64 x 64 four times, 128 x 64 twice, 64 x 128: 81,920 weights, 1,152 rows, 14 matrices.
WRITERS = {
    "W4A16": (81_920 * 4 + 2_560 * 16, "weight_packed weight_scale"),
    "W4A16_ASYM": (81_920 * 4 + 2_560 * 16 + 2_560 * 4, "weight_packed weight_scale weight_zero_point"),
    "W8A8": (81_920 * 8 + 1_152 * 16, "weight weight_scale"),
    "FP8_DYNAMIC": (81_920 * 8 + 1_152 * 16, "weight weight_scale"),
    "NVFP4A16": (81_920 * 4 + 5_120 * 8 + 14 * 32, "weight_packed weight_scale weight_global_scale"),
    "NVFP4": (81_920 * 4 + 5_120 * 8 + 14 * 32, "weight_packed weight_scale weight_global_scale"),
    "MXFP4A16": (81_920 * 4 + 2_560 * 8, "weight_packed weight_scale"),
    "MXFP8A16": (81_920 * 8 + 2_560 * 8, "weight weight_scale"),
}


def bytes_in(folder: Path, parts: str) -> int:
    """Bytes of the layers' tensors of these names, as safetensors itself reads them."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        found = [name for name in file.keys() if "_proj." in name and name.rpartition(".")[2] in parts.split()]  # noqa: SIM118
        return sum(file.get_tensor(name).nbytes for name in found)


@pytest.mark.engine
@pytest.mark.parametrize("preset", WRITERS)
def test_real_compressed_tensors(quantized: Callable[..., Path], preset: str) -> None:
    """Files that compressed-tensors wrote; groups of 32 (of 16 in NVFP4), 1 global scale a matrix, head 16 bits."""
    bits, parts = WRITERS[preset]
    assert storage_of(quantized(preset)) == Storage(bits / 81_920, 16.0, bits + 20_480 * 16)
    assert bytes_in(quantized(preset), parts) * 8 == bits
