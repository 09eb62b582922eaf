"""Values of stored matrices: against compressed-tensors' own decompression, and by hand in float64; and relative
errors of matrices, also of a GGUF model beside its Hugging Face folder."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from rich.console import Console
from safetensors.torch import load_file, save_file

from compare_q.backends.checkpoint.contents import Checkpoint
from compare_q.backends.checkpoint.doctor import comparison
from compare_q.backends.checkpoint.doctor.comparison import LayerError, layer_errors
from compare_q.backends.checkpoint.doctor.matrices import Matrix, matrix_of
from compare_q.backends.checkpoint.gguf import read_model
from compare_q.eval.cli import doctor
from tests.support.checkpoints import finish_gguf, gguf_tokenizer
from tests.support.toy import TOY_VOCAB, refusal
from tests.support.toy_moe_files import MoeShape, make
from tests.support.transformers_models import changed

ROWS, COLUMNS = 48, 64
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which column AWQ puts into each four bits of a word, as its packing says."""


def checkpoint(folder: Path, parts: dict[str, torch.Tensor], quantization: dict[str, Any] | None = None) -> Checkpoint:
    """A folder whose one module ``layer`` has these parts."""
    save_file({f"layer.{part}": tensor.contiguous() for part, tensor in parts.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization} if quantization else {}))
    return Checkpoint(folder)


def read(checkpoint: Checkpoint) -> np.ndarray:
    """The values of the module."""
    matrix = matrix_of(checkpoint.modules["layer"], checkpoint.config)
    assert isinstance(matrix, Matrix), matrix
    return matrix.numbers


def weights(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


INT = {"num_bits": 4, "type": "int", "symmetric": True}
CASES = {
    "int4 g32": ("pack-quantized", {**INT, "strategy": "group", "group_size": 32}),
    "uint4 g32": ("pack-quantized", {**INT, "strategy": "group", "group_size": 32, "symmetric": False}),
    "int8 channel": ("pack-quantized", {**INT, "num_bits": 8, "strategy": "channel"}),
    "int8 tensor": ("int-quantized", {**INT, "num_bits": 8, "strategy": "tensor"}),
    "fp8 tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8 channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 block 16x16": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 16]}
    ),
    "nvfp4 g16": (
        "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    ),
    "mxfp4 g32": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
                                           "scale_dtype": "torch.uint8"}),
    "mxfp8 g32": ("mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32,
                                      "scale_dtype": "torch.uint8"}),
}  # fmt: skip


def scale_shape(args: dict[str, Any]) -> tuple[int, ...]:
    """The shape of the scales of a [ROWS, COLUMNS] matrix."""
    if args["strategy"] == "block":
        return ROWS // args["block_structure"][0], COLUMNS // args["block_structure"][1]
    return {"tensor": (1,), "channel": (ROWS, 1)}.get(args["strategy"], (ROWS, COLUMNS // args.get("group_size", 1)))


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_compressed_tensors(tmp_path: Path, name: str) -> None:
    form, args = CASES[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args), format=form)
    generator = torch.Generator().manual_seed(1)
    scales = torch.rand(scale_shape(args), generator=generator) * 0.2 + 0.1
    if name.startswith("mx"):
        scales = torch.exp2(torch.randint(-4, 0, scales.shape, generator=generator).float())
    parts = {"weight": weights(), "weight_scale": scales}
    if name.startswith("uint"):
        parts["weight_zero_point"] = torch.randint(-8, 8, scales.shape, generator=generator).to(torch.int8)
    if name.startswith("nvfp4"):
        parts["weight_global_scale"] = torch.tensor([3.5])
        parts["weight_scale"] = (scales * 3.5).to(torch.float8_e4m3fn).float()
    compressor = BaseCompressor.get_value_from_registry(form)
    with torch.compiler.set_stance("force_eager"):  # compiling its packing of FP4 takes 20 s
        stored = compressor.compress(dict(parts), scheme)
        gold = compressor.decompress(dict(stored), scheme)["weight"].double().numpy()
    found = checkpoint(tmp_path, stored, {"config_groups": {"group_0": {"weights": args}}})
    assert found.described("layer") == name
    rtol = 2**-8 if name.startswith(("nv", "mx")) else 1e-6  # compressed-tensors rounds these to bfloat16
    np.testing.assert_allclose(read(found), gold, rtol=rtol, atol=0)
    assert np.abs(gold).max() > 0.5


def gptq(codes: np.ndarray, zeros: np.ndarray, *, less: int) -> dict[str, torch.Tensor]:
    """GPTQ's parts of 4-bit codes [in, out] and zero points [groups, out], a loop for each word."""
    inputs, outputs = codes.shape
    qweight, qzeros = np.zeros((inputs // 8, outputs), np.uint32), np.zeros((len(zeros), outputs // 8), np.uint32)
    for row in range(inputs):
        for column in range(outputs):
            qweight[row // 8, column] |= np.uint32(int(codes[row, column]) << 4 * (row % 8))
    for row in range(len(zeros)):
        for column in range(outputs):
            qzeros[row, column // 8] |= np.uint32(int(zeros[row, column]) - less << 4 * (column % 8))
    return {"qweight": torch.from_numpy(qweight.view(np.int32)), "qzeros": torch.from_numpy(qzeros.view(np.int32))}


@pytest.mark.parametrize("version", ["gptq", "gptq_v2", "act-order"])
def test_gptq_by_hand(tmp_path: Path, version: str) -> None:
    rng = np.random.default_rng(0)
    codes, zeros = rng.integers(0, 16, (32, 16)), rng.integers(1, 16, (4, 16))
    scales = rng.uniform(0.01, 0.1, (4, 16)).astype(np.float16)
    group = rng.permutation(np.repeat(np.arange(4), 8)) if version == "act-order" else np.repeat(np.arange(4), 8)
    gold = (codes - zeros[group]).astype(np.float64) * scales[group].astype(np.float64)
    parts = gptq(codes, zeros, less=0 if version == "gptq_v2" else 1)
    parts |= {"scales": torch.from_numpy(scales), "g_idx": torch.from_numpy(group.astype(np.int32))}
    if version == "gptq":
        del parts["g_idx"]
    found = checkpoint(tmp_path, parts, {"quant_method": "gptq", "bits": 4, "checkpoint_format": version})
    np.testing.assert_allclose(read(found), gold.T, rtol=1e-6)
    assert found.described("layer") == "int4 g8"


def test_awq_by_hand(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    codes, zeros = rng.integers(0, 16, (32, 16)), rng.integers(0, 16, (4, 16))
    scales = rng.uniform(0.01, 0.1, (4, 16)).astype(np.float16)

    def words(found: np.ndarray) -> torch.Tensor:
        packed = np.zeros((len(found), found.shape[1] // 8), np.uint32)
        for row in range(len(found)):
            for word in range(packed.shape[1]):
                for place, column in enumerate(AWQ_PLACES):
                    packed[row, word] |= np.uint32(int(found[row, 8 * word + column]) << 4 * place)
        return torch.from_numpy(packed.view(np.int32))

    group = np.repeat(np.arange(4), 8)
    gold = (codes - zeros[group]).astype(np.float64) * scales[group].astype(np.float64)
    parts = {"qweight": words(codes), "qzeros": words(zeros), "scales": torch.from_numpy(scales)}
    found = checkpoint(tmp_path, parts, {"quant_method": "awq", "bits": 4})
    np.testing.assert_allclose(read(found), gold.T, rtol=1e-6)
    assert found.described("layer") == "uint4 g8"


def test_stacked_experts_of_gpt_oss_by_hand(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 3, 2, 16), np.uint8)
    scales = rng.integers(120, 130, (2, 3, 2), np.uint8)
    values = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    gold = np.zeros((128, 3))  # the inputs of the first expert, those of the second
    for (expert, row, group, byte), both in np.ndenumerate(blocks):
        for half, code in enumerate((both & 15, both >> 4)):
            value = values[code & 7] * (-1 if code & 8 else 1) * 2.0 ** (int(scales[expert, row, group]) - 127)
            gold[64 * expert + 32 * group + 2 * byte + half, row] = value
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    found = Checkpoint(tmp_path)
    matrix = matrix_of(found.modules[name], found.config)
    assert isinstance(matrix, Matrix)
    np.testing.assert_array_equal(matrix.numbers, gold)
    assert matrix.stored == "mxfp4 g32"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_modelopt_scales_inputs_before_its_awq_matrices(tmp_path: Path, dtype: torch.dtype) -> None:
    parts = {"weight": torch.full((2, 16), 2.0).to(dtype), "weight_scale": torch.tensor(0.5)}
    gold = np.ones((2, 16))
    if dtype == torch.uint8:  # codes 1 and 2: 0.5 and 1
        parts = {"weight": torch.tensor([[0x21] * 8] * 2, dtype=dtype), "weight_scale_2": torch.tensor(0.25)}
        parts["weight_scale"], gold = torch.full((2, 1), 2.0).to(torch.float8_e4m3fn), np.array([[0.25, 0.5] * 8] * 2)
    parts["pre_quant_scale"] = torch.arange(1.0, 17)
    np.testing.assert_array_equal(read(checkpoint(tmp_path, parts)), gold * np.arange(1, 17))
    parts["pre_quant_scale"] = torch.ones(15)
    (tmp_path / "other").mkdir()
    assert why_not(checkpoint(tmp_path / "other", parts)).startswith("weight of dtype ")


def test_blocks_at_the_edge_are_cut(tmp_path: Path) -> None:
    ones = torch.ones(20, 24).to(torch.float8_e4m3fn)
    scales = torch.arange(1.0, 7).reshape(2, 3)
    found = checkpoint(tmp_path, {"weight": ones, "weight_scale_inv": scales}, {"weight_block_size": [16, 8]})
    gold = scales.repeat_interleave(16, 0)[:20].repeat_interleave(8, 1)
    np.testing.assert_array_equal(read(found), gold.numpy())
    assert found.described("layer") == "fp8 block 16x8"


def why_not(checkpoint: Checkpoint) -> str:
    """Why the module is not compared."""
    reason = matrix_of(checkpoint.modules["layer"], checkpoint.config)
    assert isinstance(reason, str)
    return reason


def test_what_no_library_dequantizes_is_named(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, {"trellis": torch.zeros(4, 4, 64, dtype=torch.int16)})
    assert found.described("layer") == "exl3 4 bits"
    assert why_not(found) == "exl3 4 bits: neither compressed-tensors nor Transformers dequantizes it"


def test_a_missing_package_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checkpoint(tmp_path, {"weight": torch.zeros(2, 16, dtype=torch.int8), "weight_scale": torch.ones(2, 1)})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refusal(lambda: read(found)) == "compressed_tensors is not installed: pip install compressed-tensors"


def test_bytes_whose_scales_are_floats_are_not_fp4(tmp_path: Path) -> None:
    """ModelOpt's W4A16_AWQ stores two int4 in a byte."""
    parts = {"weight": torch.zeros(32, 128, dtype=torch.uint8), "weight_scale": torch.ones(64, 1).bfloat16()}
    found = checkpoint(tmp_path, parts)
    assert found.described("layer") == "unknown (format weight of dtype U8)"
    assert why_not(found).startswith("format weight of dtype U8: neither ")


Q, HEAD = "model.layers.1.self_attn.q_proj", "lm_head"


def errors_of(model: Path, reference: Path) -> dict[str, LayerError]:
    return {each.name: each for each in layer_errors(Checkpoint(model), Checkpoint(reference))}


@pytest.fixture(scope="module")
def fp8(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with one matrix in FP8 by channel and its head cut to other rows."""
    weights = load_file(toy_model / "model.safetensors")
    weight = weights[f"{Q}.weight"].float()
    scale = weight.abs().amax(1, keepdim=True) / 448
    return changed(
        toy_model, tmp_path_factory.mktemp("fp8") / "model", {},
        **{
            f"{Q}.weight": (weight / scale).to(torch.float8_e4m3fn), f"{Q}.weight_scale": scale,
            f"{HEAD}.weight": weights[f"{HEAD}.weight"][:-1].clone(), "model.layers.0.mlp.up_proj.weight": None,
        },
    )  # fmt: skip


def test_error_and_scale_by_hand(fp8: Path, toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (fp8, toy_model))
    one = (mine[f"{Q}.weight"].double() * mine[f"{Q}.weight_scale"].double()).numpy()
    other = theirs[f"{Q}.weight"].double().numpy()
    for band in (1 << 22, 300):  # the whole matrix, and bands of four rows
        monkeypatch.setattr(comparison, "BAND", band)
        found = errors_of(fp8, toy_model)[Q]
        assert found.stored == "fp8 channel"
        assert found.error == pytest.approx(np.linalg.norm(one - other) / np.linalg.norm(other), rel=1e-6)
        assert found.scale == pytest.approx((one * other).sum() / (other * other).sum(), rel=1e-6)


def test_what_cannot_be_compared_says_why(fp8: Path, toy_model: Path) -> None:
    found = errors_of(fp8, toy_model)
    assert found[HEAD].note == "not compared: shapes 319x64 and 320x64"
    assert found["model.layers.0.mlp.up_proj"].note == "not compared: the model has no such matrix"
    assert found["model.layers.0.mlp.down_proj"].error == 0
    assert comparison.worst_first(list(found.values()))[0].name == Q


def test_layers_of_one_number_are_not_mixed_up(toy_model: Path, tmp_path: Path) -> None:
    """A multi-token-prediction layer and a tower have numbers of their own; other prefixes are the same layer."""
    weights = load_file(toy_model / "model.safetensors")
    up, other = "layers.0.mlp.up_proj.weight", torch.ones_like(weights["model.layers.0.mlp.up_proj.weight"])
    more = {f"mtp.{up}": other, f"vision_tower.encoder.{up}": 2 * other}
    reference = changed(toy_model, tmp_path / "reference", {}, **more)
    found = errors_of(toy_model, reference)
    assert {each.name for each in found.values() if each.note} == {each.removesuffix(".weight") for each in more}
    assert not any(each.error for each in found.values())
    renamed = {name.replace("model.layers", "model.language_model.layers"): each for name, each in weights.items()}
    renamed |= {f"mtp.{up}": other, f"model.vision_tower.encoder.{up}": 2 * other}
    gone = dict.fromkeys(weights, None)
    found = errors_of(changed(toy_model, tmp_path / "renamed", {}, **(gone | renamed)), reference)
    assert all(each.error == 0 for each in found.values())


def test_broken_and_unrelated_weights_are_wrong() -> None:
    errors = [LayerError(name, "int4", 1, value, 1.0) for name, value in [("a", 0.1), ("b", math.nan), ("c", 1.4)]]
    said = [str(found) for found in comparison.findings(errors)]
    assert [line.partition(";")[0] for line in said] == [
        "wrong: b: its dequantized weights are not all finite",
        "wrong: c: relative error 1.4: its weights are not the reference's",
    ]


def test_a_mixture_of_experts_in_three_formats(tmp_path: Path) -> None:
    """The same weights, dequantized by the benchmark's own code, have no error beyond float32's."""
    with torch.compiler.set_stance("force_eager"):  # compiling the packing of FP4 takes 10 s
        folders = make(tmp_path, MoeShape(layers=1, experts=2, chosen=1), ("nvfp4-w4a4", "mxfp4-w4a4", "fp8-block"))
    for kind, words in [("nvfp4", "nvfp4 g16"), ("mxfp4", "mxfp4 g32"), ("fp8-block", "fp8 block 128x128")]:
        quantized = next(folder for name, folder in folders.items() if name.startswith(kind))
        found = errors_of(quantized, folders[f"{kind}-dequantized"])
        assert found["model.layers.0.mlp.experts.1.down_proj"].stored == words
        assert all(each.error is not None and each.error < 1e-6 for each in found.values())
        assert len(found) == 4 + 3 * 2 + 3  # attention, experts; router, embedding and head


def smoothed(folder: Path, to: Path) -> Path:
    """The toy with factors folded into a norm and the matrices after it, and between ``up`` and ``down``."""
    weights = load_file(folder / "model.safetensors")
    generator, layer = torch.Generator().manual_seed(0), "model.layers.1."

    def fold(before: str, after: list[str]) -> None:
        divided = weights[f"{layer}{before}.weight"].float()
        drawn = torch.exp(torch.randn(len(divided), generator=generator))
        weights[f"{layer}{before}.weight"] = divided / drawn.reshape(-1, *[1] * (divided.ndim - 1))
        for name in after:
            weights[f"{layer}{name}.weight"] = weights[f"{layer}{name}.weight"].float() * drawn

    fold("input_layernorm", [f"self_attn.{each}_proj" for each in "qkv"])
    fold("post_attention_layernorm", ["mlp.gate_proj", "mlp.up_proj"])
    fold("mlp.up_proj", ["mlp.down_proj"])
    weights = {name: weight.bfloat16() for name, weight in weights.items()}
    return changed(folder, to, {}, **weights)


def test_folded_smoothing_is_no_error(toy_model: Path, tmp_path: Path) -> None:
    """AWQ and SmoothQuant leave such factors; bfloat16 rounds the norms and the weights, by 0.0017 each."""
    errors = errors_of(smoothed(toy_model, tmp_path / "smoothed"), toy_model)
    assert all(each.error is not None and each.error < 0.005 for each in errors.values())
    said = {name: errors[f"model.layers.1.{name}"].stored.partition(", ")[2] for name in (
        "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    )}  # fmt: skip
    assert list(said.values()) == ["norm folded", "", "norm folded", "norm folded, rows scaled", "columns scaled"]


def test_no_fit_excuses_other_weights_or_a_wrong_scale(toy_model: Path, tmp_path: Path) -> None:
    weights = load_file(toy_model / "model.safetensors")
    down, out = "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj"
    other = {
        f"{down}.weight": torch.randn_like(weights[f"{down}.weight"]),
        f"{out}.weight": 2 * weights[f"{out}.weight"],
    }
    errors = errors_of(changed(toy_model, tmp_path / "model", {}, **other), toy_model)
    assert [each.name for each in errors.values() if each.error] == [down, out]
    assert [found.severity for found in comparison.findings(list(errors.values()))] == ["wrong"]
    assert errors[out].error == errors[out].scale - 1 == 1


def test_gguf_against_its_folder(toy_model: Path, tmp_path: Path) -> None:
    """Queries and keys are in another order there; a file of floats must have no error at all."""
    from demo.gguf_writer import write_gguf

    tokenizer = gguf_tokenizer(tmp_path / "tokenizer.gguf", TOY_VOCAB)
    for kind, least, most in [("BF16", 0.0, 0.0), ("Q8_0", 1e-4, 0.02)]:
        write_gguf(toy_model, tmp_path / f"{kind}.gguf", kind, tokenizer=tokenizer)
        found = list(layer_errors(read_model(tmp_path / f"{kind}.gguf"), Checkpoint(toy_model)))
        layers = [each for each in found if each.name.startswith("model.layers")]
        assert len(layers) == 14
        assert all(each.error is not None and least <= each.error <= most for each in layers), kind


def test_gguf_of_a_language_model_that_the_hub_has_with_a_tower(toy_model: Path, tmp_path: Path) -> None:
    from gguf import GGUFWriter

    weights = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    writer = GGUFWriter(str(tmp_path / "model.gguf"), "qwen35")
    writer.add_block_count(1)
    for name in ("blk.0.ffn_up", "blk.0.ssm_out"):
        writer.add_tensor(f"{name}.weight", weights)
    finish_gguf(writer)
    gone = dict.fromkeys(load_file(toy_model / "model.safetensors"), None)
    layer = "model.language_model.layers.0."
    names = [f"{layer}{each}" for each in ("mlp.up_proj", "linear_attn.out_proj")]
    new = {f"{name}.weight": torch.tensor(weights) for name in names}
    reference = changed(toy_model, tmp_path / "reference", {}, **(gone | new))
    found = {each.name: each for each in layer_errors(read_model(tmp_path / "model.gguf"), Checkpoint(reference))}
    assert found[names[0]].error == 0
    assert found[names[1]].note == "not compared: llama.cpp reorders the heads of its linear attention"


def test_nothing_compared_is_said_after_why() -> None:
    console = Console(file=io.StringIO())
    left_out = [LayerError("a", "", 1, note="not compared: shapes 1x2 and 2x1")]
    assert refusal(lambda: doctor.show(left_out, console)).startswith("--against: no matrix")
    assert console.file.getvalue() == "a: not compared: shapes 1x2 and 2x1\n"
