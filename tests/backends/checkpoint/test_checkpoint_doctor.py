"""The doctor reports every fault with the name of its layer, and none in a good checkpoint.

Single checks use headers made by hand, and compare tensors with a config whose experts are stored
one by one and loaded into one tensor.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compare_q.backends.checkpoint import checkpoint_doctor
from compare_q.backends.checkpoint.checkpoint_doctor import (
    Finding,
    Report,
    differing_tokens,
    examine,
)
from compare_q.backends.checkpoint.contents import Contents, compare
from compare_q.backends.checkpoint.folder import Checkpoint
from compare_q.backends.checkpoint.gguf import GgufModel, GgufTensor
from compare_q.backends.checkpoint.tokenizers import Tokens, of_folder
from tests.support.broken import FAULTS
from tests.support.checkpoints import ENDS, Entries, Q, safetensors_bytes, write_checkpoint
from tests.support.toy import save_llama
from tests.support.transformers_models import changed

EXPERTS = "model.layers.3.mlp.experts"


@pytest.fixture(scope="module")
def good_model(quantized: Callable[..., Path]) -> Path:
    """NVFP4 with quantized activations, calibrated."""
    return quantized("NVFP4")


def examined(folder: Path, reference: Path) -> Report:
    return examine(folder, reference, compare(Checkpoint(folder)))


def test_good_checkpoints_have_no_finding(good_model: Path, toy_model: Path) -> None:
    for folder in (good_model, toy_model):
        report = examined(folder, toy_model)
        assert report.findings == ()
        assert report.unchecked == ()
    facts = dict(examined(good_model, toy_model).facts)
    # Each of the two layers has seven matrices.
    assert facts["layers"].startswith(
        "14 matrices in nvfp4 g16, activations nvfp4 g16: model.layers.*.mlp.down_proj, "
    )
    assert facts["head"] == "bfloat16: lm_head"
    assert facts["embedding"] == "bfloat16: model.embed_tokens"
    assert facts["KV cache"] == "in the model's dtype"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_fault_is_found(
    fault: Callable[[Path, Path], Path], good_model: Path, toy_model: Path, tmp_path: Path
) -> None:
    report = examined(fault(good_model, tmp_path / "broken"), toy_model)
    severity, text = FAULTS[fault]
    worst = report.findings[0]
    assert worst.severity == severity
    assert text in str(worst)
    assert report.is_wrong == (severity == "wrong")
    for finding in report.findings:
        assert len(str(finding).splitlines()) == 1


def number(value: float) -> bytes:
    return struct.pack("<f", value)


def experts(folder: Path, quantization: dict[str, Any], *input_scales: float | None) -> Checkpoint:
    """FP8 experts, each with or without a scale of its activations."""
    entries: Entries = {}
    values = {}
    for at, value in enumerate(input_scales):
        name = f"{EXPERTS}.{at}.down_proj"
        entries |= {f"{name}.weight": ("F8_E4M3", 4, 4), f"{name}.weight_scale": ("F32", 1)}
        if value is not None:
            entries[f"{name}.input_scale"] = ("F32", 1)
            values[f"{name}.input_scale"] = number(value)
    config = {"quantization_config": quantization}
    return Checkpoint(write_checkpoint(folder, entries, config, values))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "2.down_proj: no scale of its activations"),
        (0.0, "2.down_proj.input_scale: the scale of its activations is zero"),
        (float("nan"), "is NaN"),
        (float("inf"), "is infinite"),
        (-1.0, "is negative"),
    ],
)
def test_experts_that_no_token_reached(tmp_path: Path, value: float | None, text: str) -> None:
    (finding,) = checkpoint_doctor.input_scales(experts(tmp_path, {}, 0.5, 0.25, value, value))
    assert finding.severity == "wrong"
    assert finding.more == 1
    assert f"model.safetensors: {EXPERTS}." in str(finding)
    assert text in str(finding)


# With "local", scales of groups are computed at run time, and the global scale is stored.
STATIC = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local"}


def mixed(*algorithms: str) -> dict[str, Any]:
    """Return ModelOpt's config with one algorithm per expert."""
    layers = {}
    for at, name in enumerate(algorithms):
        layers[f"{EXPERTS}.{at}.down_proj"] = {"quant_algo": name}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


@pytest.mark.parametrize(
    ("quantization", "scales", "severities"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, [None], ["wrong"]),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, [None], []),
        ({"config_groups": {"a": {"input_activations": STATIC}}}, [None], ["wrong"]),
        (
            {
                "config_groups": {
                    "a": {"input_activations": STATIC},
                    "b": {"input_activations": None},
                }
            },
            [None],
            [],
        ),
        ({"quantization": {"quant_algo": "NVFP4"}}, [None], ["wrong"]),
        (mixed("NVFP4", "NVFP4", "W4A16_NVFP4"), [0.5, 0.25, None], []),
        (mixed("NVFP4", "NVFP4", "NVFP4"), [0.5, 0.25, None], ["wrong"]),
    ],
)
def test_configs_that_ask_for_input_scales(
    tmp_path: Path, quantization: dict[str, Any], scales: list[float | None], severities: list[str]
) -> None:
    """A config requires input scales of all layers, or (mixed precision) of each layer.

    The last expert has no input scale.
    """
    findings = checkpoint_doctor.input_scales(experts(tmp_path, quantization, *scales))
    assert [finding.severity for finding in findings] == severities


@pytest.mark.parametrize(
    ("k_scale", "v_scale", "method", "severities"),
    [
        (1.0, 1.0, "fp8", ["warning"]),
        # modelopt writes 1.0 in place of every smaller scale.
        (1.0, 1.0, "modelopt", ["note"]),
        (1.0, 0.03, "fp8", []),
        (0.03, float("nan"), "fp8", ["wrong"]),
    ],
)
def test_scales_of_the_kv_cache(
    tmp_path: Path, k_scale: float, v_scale: float, method: str, severities: list[str]
) -> None:
    values = {
        "model.layers.0.self_attn.k_scale": number(k_scale),
        "model.layers.0.self_attn.v_scale": number(v_scale),
    }
    config = {"quantization_config": {"quant_method": method}}
    folder = write_checkpoint(tmp_path, dict.fromkeys(values, ("F32", 1)), config, values)
    findings = checkpoint_doctor.kv_scales(Checkpoint(folder))
    assert [finding.severity for finding in findings] == severities


def test_quantized_against_the_config(tmp_path: Path) -> None:
    checkpoint = experts(tmp_path, {"ignore": ["re:.*experts.*", "lm_head"]}, 0.5)
    (finding,) = checkpoint_doctor.unexpected_quantization(checkpoint)
    assert finding.severity == "wrong"
    assert finding.where == f"model.safetensors: {EXPERTS}.0.down_proj"


def test_integers_without_a_scale(tmp_path: Path) -> None:
    """A matrix in a quantized type needs a scale beside it; a bias is none."""
    entries: Entries = {**ENDS, f"{Q}.weight": ("I8", 4, 4), f"{Q}.bias": ("F32", 4)}
    (finding,) = checkpoint_doctor.dtypes(Checkpoint(write_checkpoint(tmp_path / "bare", entries)))
    assert (finding.severity, finding.where) == ("wrong", f"model.safetensors: {Q} (I8)")
    scaled = {**entries, f"{Q}.weight_scale": ("F32", 4, 1)}
    assert (
        list(checkpoint_doctor.dtypes(Checkpoint(write_checkpoint(tmp_path / "scaled", scaled))))
        == []
    )


def test_code_of_a_checkpoint_does_not_run(mixture: Path) -> None:
    """The config names a class in a file of the checkpoint; Transformers' own class is built."""
    config = json.loads((mixture / "config.json").read_text())
    mine = {
        "architectures": ["MineForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "mine.MineForCausalLM"},
    }
    (mixture / "config.json").write_text(json.dumps(config | mine))
    (mixture / "mine.py").write_text(
        f"open({str(mixture / 'ran')!r}, 'w').close()\nclass MineForCausalLM: pass\n"
    )
    assert compare(Checkpoint(mixture)) == NOTHING
    assert not (mixture / "ran").exists()


def test_where_index_and_files_disagree(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a.weight": ("BF16", 2, 2), "b.weight": ("BF16", 2, 2)})
    weight_map = {"a.weight": "model.safetensors", "c.weight": "model.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "extra.safetensors").write_bytes(safetensors_bytes({"d.weight": ("BF16", 2, 2)}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    checkpoint = Checkpoint(tmp_path)
    findings = [
        *checkpoint_doctor.strays_and_pickles(checkpoint),
        *checkpoint_doctor.index(checkpoint),
    ]
    assert places_of(findings) == [
        ("warning", "extra.safetensors"),
        ("note", "pytorch_model.bin"),
        ("warning", "model.safetensors: b.weight"),
        ("wrong", "model.safetensors.index.json: c.weight"),
    ]


def places_of(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(finding.severity, finding.where) for finding in findings]


def test_tokens_that_differ(toy_model: Path, tmp_path: Path) -> None:
    file = "tokenizer.json"
    reference = of_folder(toy_model)
    # 256 bytes and a special token.
    assert len(reference.vocabulary) == 257
    assert places_of(differing_tokens(reference, reference)) == []
    one = Tokens(file, {0: "x", 1: "b"}, "m", special={"eos_token": "a"})
    other = Tokens(file, {0: "a", 1: "b", 2: "c"}, "n", {"eos_token": "b", "x": 1}, "{{}}")
    assert places_of(differing_tokens(one, other)) == [
        ("wrong", file),
        ("wrong", file),
        ("wrong", "tokenizer_config.json"),
        ("wrong", "chat template"),
    ]
    findings = differing_tokens(Tokens(file, template="{{ b }}"), Tokens("", template="{{ a }}"))
    assert places_of(findings) == [("warning", "chat template")]
    findings = differing_tokens(of_folder(tmp_path), reference)
    assert places_of(findings)[0] == ("warning", file)


@pytest.mark.parametrize(
    ("name", "mine", "reference", "severities"),
    [
        ("pad_token", "</s>", "<unk>", ["note"]),
        ("unk_token", "<unk>", "</s>", ["note"]),
        ("bos_token", "<s>", "</s>", ["wrong"]),
        # The order of several ends means nothing, nor does a list of one.
        ("config.json: eos_token_id", [1, 2], [2, 1], []),
        ("config.json: eos_token_id", [1], 1, []),
        ("config.json: eos_token_id", [1, 2], 1, ["wrong"]),
        ("config.json: eos_token_id", [[1]], [1], ["wrong"]),
        ("add_bos_token", True, False, ["wrong"]),
    ],
)
def test_special_tokens(name: str, mine: Any, reference: Any, severities: list[str]) -> None:
    findings = differing_tokens(
        Tokens("tokenizer.json", special={name: mine}),
        Tokens("tokenizer.json", special={name: reference}),
    )
    assert [finding.severity for finding in findings] == severities


NOTHING = Contents([], [], [], [], [])


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A Qwen3-MoE of two experts in FP8 blocks, as DeepSeek stores them."""
    sizes = {
        # The blocks of 128 x 128 need matrices of this size.
        "hidden_size": 128,
        "head_dim": 64,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 128,
    }
    unquantized = save_llama(tmp_path / "unquantized", "Qwen3Moe", **sizes)
    tensors: dict[str, torch.Tensor | None] = {}
    for name, weight in load_file(unquantized / "model.safetensors").items():
        if "_proj." in name:
            blocks = weight.float().reshape(len(weight) // 128, 128, -1, 128)
            scale = blocks.abs().amax((1, 3)) / 448
            codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            tensors |= {name: codes.reshape(weight.shape), f"{name}_scale_inv": scale}
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
    }
    return changed(unquantized, tmp_path / "blocks", config, **tensors)


def test_whole_and_without_an_expert(mixture: Path) -> None:
    assert compare(Checkpoint(mixture)) == NOTHING
    weights = load_file(mixture / "model.safetensors")
    lost = "model.layers.1.mlp.experts.0.down_proj"
    del weights[f"{lost}.weight"]
    del weights[f"{lost}.weight_scale_inv"]
    save_file(weights, mixture / "model.safetensors", {"format": "pt"})
    assert compare(Checkpoint(mixture)).missing == ["model.layers.1.mlp.experts.down_proj"]


def test_a_config_of_another_size(mixture: Path) -> None:
    config = json.loads((mixture / "config.json").read_text())
    size = config["vocab_size"]
    hidden = config["hidden_size"]
    config["vocab_size"] = size + 1
    (mixture / "config.json").write_text(json.dumps(config))
    contents = compare(Checkpoint(mixture))
    assert sorted(name for name, *_ in contents.shapes) == ["lm_head", "model.embed_tokens"]
    (finding,) = checkpoint_doctor.differing_tensors(Checkpoint(mixture), contents)
    shapes = f"[{size}, {hidden}] (BF16), and the config asks for [{size + 1}, {hidden}]"
    assert finding.what == f"has the shape {shapes}"
    assert finding.more == 1


def sparse(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """compressed-tensors' 2:4, a format that compare_q does not know."""
    rows, columns = weight.shape
    # 0x55 marks every other one of eight weights.
    mask = torch.full((rows, columns // 8), 0x55, dtype=torch.uint8)
    return {
        "compressed": weight[:, ::2].clone(),
        "bitmask": mask,
        "shape": torch.tensor([rows, columns]),
    }


def quark(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """AMD Quark's int4."""
    rows, columns = weight.shape
    packed = torch.zeros(columns, rows // 8, dtype=torch.int32)
    return {"weight": packed, "weight_scale": torch.ones(columns // 32, rows)}


@pytest.mark.parametrize(
    ("store", "unchecked", "facts"),
    [
        (quark, "", ["14 matrices in int4 g32: model.layers.*.mlp.down_proj"]),
        (
            sparse,
            "model.layers.0.mlp.down_proj.bitmask: in a format that is not known "
            "(and 13 more like it)",
            [],
        ),
    ],
)
def test_packed_weights_are_there(
    store: Callable[[torch.Tensor], dict[str, torch.Tensor]],
    unchecked: str,
    facts: list[str],
    toy_model: Path,
    tmp_path: Path,
) -> None:
    """A matrix in another format does not count as missing, even if the format is unknown."""
    parts: dict[str, torch.Tensor | None] = {}
    for name, weight in load_file(toy_model / "model.safetensors").items():
        if name.endswith("proj.weight"):
            parts[name] = None
            for part, tensor in store(weight).items():
                parts[f"{name.removesuffix('.weight')}.{part}"] = tensor
    folder = changed(toy_model, tmp_path / "packed", {"quant_method": "none-such"}, **parts)
    assert compare(Checkpoint(folder)) == replace(NOTHING, unchecked=unchecked)
    layers = []
    for title, text in examine(folder).facts:
        if title == "layers":
            layers.append(text.partition(",")[0])
    assert layers == facts


BLOCKS = {f"blk.{n}.{part}.weight" for n in range(4) for part in ("attn_q", "ffn_up")}


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        (BLOCKS, []),
        (BLOCKS - {"blk.1.ffn_up.weight"}, [("wrong", "m.gguf: blk.1.ffn_up.weight")]),
        (
            BLOCKS - {"blk.2.attn_q.weight", "blk.2.ffn_up.weight"},
            [("wrong", "m.gguf: blk.2.attn_q.weight")],
        ),
        (
            BLOCKS | {"blk.4.attn_q.weight", "blk.4.ffn_up.weight"},
            [("wrong", "m.gguf: blk.4")],
        ),
        # blocks may alternate
        (BLOCKS - {"blk.1.ffn_up.weight", "blk.3.ffn_up.weight"}, []),
        # the first may differ
        (BLOCKS - {"blk.0.ffn_up.weight"} | {"blk.0.ffn_norm.weight"}, []),
    ],
)
def test_blocks_of_gguf(names: set[str], wrong: list[tuple[str, str]]) -> None:
    tensors = tuple(GgufTensor(name, (4, 4), "f32", 64) for name in sorted(names))
    assert places_of(checkpoint_doctor.uneven_gguf_blocks(model_of(tensors, 4))) == wrong


def model_of(tensors: tuple[GgufTensor, ...], block_count: int) -> GgufModel:
    """Return a GGUF model whose header counts ``block_count`` blocks."""
    fields = {"general.architecture": "llama", "llama.block_count": block_count}
    return GgufModel((Path("m.gguf"),), fields, tensors, "")


def test_a_count_of_blocks_that_no_file_can_have_takes_no_memory() -> None:
    """A header of 256 bytes may count 4 billion blocks, and may have tensors of many blocks."""
    tensors = (GgufTensor("blk.0.attn_q.weight", (4, 4), "f32", 64),)
    # The largest count that 32 bits can hold.
    findings = checkpoint_doctor.uneven_gguf_blocks(model_of(tensors, 2**32 - 1))
    assert places_of(findings) == [("wrong", "m.gguf: block_count")]
    many = tuple(GgufTensor(f"blk.{n * 7}.{n}.weight", (4, 4), "f32", 64) for n in range(5_000))
    for count in (0, 4, 4_000):
        (finding,) = checkpoint_doctor.uneven_gguf_blocks(model_of(many, count))
        assert finding.severity == "wrong"
