"""Relative errors of matrices: by hand in float64, and of a GGUF model beside its Hugging Face folder."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from benchmarks.toy_moe_files import MoeShape, make
from compare_q.backends.checkpoint.contents import Checkpoint
from compare_q.backends.checkpoint.doctor import comparison
from compare_q.backends.checkpoint.doctor.comparison import LayerError, layer_errors
from compare_q.backends.checkpoint.gguf import read_model
from compare_q.eval.cli import doctor
from tests.support.checkpoints import finish_gguf, gguf_tokenizer
from tests.support.toy import TOY_VOCAB, refusal
from tests.support.transformers_models import changed

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
