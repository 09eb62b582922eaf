"""The doctor reports every fault with the name of its layer, and none in a good checkpoint; single checks use headers
made by hand, and compare tensors with a config whose experts are stored one by one and loaded into one tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compare_q.backends.checkpoint import doctor
from compare_q.backends.checkpoint.contents import Contents, compare
from compare_q.backends.checkpoint.doctor import Report, differing_tokens, examine
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
        found = examined(folder, toy_model)
        assert (found.findings, found.unchecked) == ((), ())
    facts = dict(examined(good_model, toy_model).facts)
    assert facts["layers"].startswith("14 matrices in nvfp4 g16, activations nvfp4 g16: model.layers.*.mlp.down_proj, ")
    assert facts["head"] == facts["embedding"].replace("model.embed_tokens", "lm_head") == "bfloat16: lm_head"
    assert facts["KV cache"] == "in the model's dtype"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_fault_is_found(
    fault: Callable[[Path, Path], Path], good_model: Path, toy_model: Path, tmp_path: Path
) -> None:
    found = examined(fault(good_model, tmp_path / "broken"), toy_model)
    severity, text = FAULTS[fault]
    worst = found.findings[0]
    assert worst.severity == severity
    assert text in str(worst)
    assert found.is_wrong == (severity == "wrong")
    assert all(len(str(each).splitlines()) == 1 for each in found.findings)


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
    return Checkpoint(write_checkpoint(folder, entries, {"quantization_config": quantization}, values))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "2.down_proj: no scale of its activations"),
        (0.0, "2.down_proj.input_scale: the scale of its activations is zero"),
        (float("nan"), "is NaN"), (float("inf"), "is infinite"), (-1.0, "is negative"),
    ],
)  # fmt: skip
def test_experts_that_no_token_reached(tmp_path: Path, value: float | None, said: str) -> None:
    (found,) = doctor.input_scales(experts(tmp_path, {}, 0.5, 0.25, value, value))
    assert (found.severity, found.more) == ("wrong", 1)
    assert f"model.safetensors: {EXPERTS}." in str(found)
    assert said in str(found)


STATIC = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local"}


def mixed(*algorithms: str) -> dict[str, Any]:
    """ModelOpt's config with one algorithm per expert."""
    own = {f"{EXPERTS}.{at}.down_proj": {"quant_algo": name} for at, name in enumerate(algorithms)}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": own}


@pytest.mark.parametrize(
    ("quantization", "scales", "asked"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, [None], True),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, [None], False),
        ({"config_groups": {"a": {"input_activations": STATIC}}}, [None], True),
        ({"config_groups": {"a": {"input_activations": STATIC}, "b": {"input_activations": None}}}, [None], False),
        ({"quantization": {"quant_algo": "NVFP4"}}, [None], True),
        (mixed("NVFP4", "NVFP4", "W4A16_NVFP4"), [0.5, 0.25, None], False),
        (mixed("NVFP4", "NVFP4", "NVFP4"), [0.5, 0.25, None], True),
    ],
)
def test_configs_that_ask_for_input_scales(
    tmp_path: Path, quantization: dict[str, Any], scales: list[float | None], asked: bool
) -> None:
    """Configs that require input scales for all layers, or (mixed precision) per layer; the last expert has none."""
    checkpoint = experts(tmp_path, quantization, *scales)
    assert [found.severity for found in doctor.input_scales(checkpoint)] == (["wrong"] if asked else [])


@pytest.mark.parametrize(
    ("values", "method", "said"),
    [
        ((1.0, 1.0), "fp8", "warning"),
        ((1.0, 1.0), "modelopt", "note"),  # modelopt writes 1.0 instead of every smaller scale
        ((1.0, 0.03), "fp8", None),
        ((0.03, float("nan")), "fp8", "wrong"),
    ],
)
def test_scales_of_the_kv_cache(tmp_path: Path, values: tuple[float, float], method: str, said: str | None) -> None:
    names = ["model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"]
    stored = dict(zip(names, map(number, values), strict=True))
    config = {"quantization_config": {"quant_method": method}}
    folder = write_checkpoint(tmp_path, dict.fromkeys(names, ("F32", 1)), config, stored)
    assert [each.severity for each in doctor.kv_scales(Checkpoint(folder))] == ([said] if said else [])


def test_quantized_against_the_config(tmp_path: Path) -> None:
    (found,) = doctor.unexpected_quantization(experts(tmp_path, {"ignore": ["re:.*experts.*", "lm_head"]}, 0.5))
    assert found.severity == "wrong"
    assert found.where == f"model.safetensors: {EXPERTS}.0.down_proj"


def test_integers_without_a_scale(tmp_path: Path) -> None:
    """A matrix in a quantized type needs a scale beside it; a bias is none."""
    entries: Entries = {**ENDS, f"{Q}.weight": ("I8", 4, 4), f"{Q}.bias": ("F32", 4)}
    (finding,) = doctor.dtypes(Checkpoint(write_checkpoint(tmp_path / "bare", entries)))
    assert (finding.severity, finding.where) == ("wrong", f"model.safetensors: {Q} (I8)")
    scaled = {**entries, f"{Q}.weight_scale": ("F32", 4, 1)}
    assert list(doctor.dtypes(Checkpoint(write_checkpoint(tmp_path / "scaled", scaled)))) == []


def test_code_of_a_checkpoint_does_not_run(mixture: Path) -> None:
    """The config names a class in a file of the checkpoint; Transformers' own class of the architecture is built."""
    config = json.loads((mixture / "config.json").read_text())
    mine = {"architectures": ["MineForCausalLM"], "auto_map": {"AutoModelForCausalLM": "mine.MineForCausalLM"}}
    (mixture / "config.json").write_text(json.dumps(config | mine))
    (mixture / "mine.py").write_text(f"open({str(mixture / 'ran')!r}, 'w').close()\nclass MineForCausalLM: pass\n")
    assert compare(Checkpoint(mixture)) == NOTHING
    assert not (mixture / "ran").exists()


def test_where_index_and_files_disagree(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"a.weight": ("BF16", 2, 2), "b.weight": ("BF16", 2, 2)})
    weight_map = {"a.weight": "model.safetensors", "c.weight": "model.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "extra.safetensors").write_bytes(safetensors_bytes({"d.weight": ("BF16", 2, 2)}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    checkpoint = Checkpoint(tmp_path)
    found = [*doctor.strays_and_pickles(checkpoint), *doctor.index(checkpoint)]
    assert [(each.severity, each.where) for each in found] == [
        ("warning", "extra.safetensors"),
        ("note", "pytorch_model.bin"),
        ("warning", "model.safetensors: b.weight"),
        ("wrong", "model.safetensors.index.json: c.weight"),
    ]


def tokens_found(mine: Tokens, reference: Tokens) -> list[tuple[str, str]]:
    return [(each.severity, each.where) for each in differing_tokens(mine, reference)]


def test_tokens_that_differ(toy_model: Path, tmp_path: Path) -> None:
    reference, file = of_folder(toy_model), "tokenizer.json"
    assert tokens_found(reference, reference) == []
    assert len(reference.vocabulary) == 257
    one = Tokens(file, {0: "x", 1: "b"}, "m", special={"eos_token": "a"})
    other = Tokens(file, {0: "a", 1: "b", 2: "c"}, "n", {"eos_token": "b", "x": 1}, "{{}}")
    wrong = [("wrong", where) for where in (file, file, "tokenizer_config.json", "chat template")]
    assert tokens_found(one, other) == wrong
    warning = [("warning", "chat template")]
    assert tokens_found(Tokens(file, template="{{ b }}"), Tokens("", template="{{ a }}")) == warning
    assert tokens_found(of_folder(tmp_path), reference)[0] == ("warning", file)


@pytest.mark.parametrize(
    ("name", "mine", "reference", "said"),
    [
        ("pad_token", "</s>", "<unk>", "note"),
        ("unk_token", "<unk>", "</s>", "note"),
        ("bos_token", "<s>", "</s>", "wrong"),
        ("config.json: eos_token_id", [1, 2], [2, 1], None),
        ("config.json: eos_token_id", [1], 1, None),
        ("config.json: eos_token_id", [1, 2], 1, "wrong"),
        ("config.json: eos_token_id", [[1]], [1], "wrong"),
        ("add_bos_token", True, False, "wrong"),
    ],
)
def test_special_tokens(name: str, mine: Any, reference: Any, said: str | None) -> None:
    found = differing_tokens(
        Tokens("tokenizer.json", special={name: mine}), Tokens("tokenizer.json", special={name: reference})
    )
    assert [each.severity for each in found] == ([said] if said else [])


NOTHING = Contents([], [], [], [], [])


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A Qwen3-MoE of two experts in FP8 blocks, as DeepSeek stores them."""
    shape = {
        "hidden_size": 128,
        "head_dim": 64,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 128,
    }
    whole = save_llama(tmp_path / "whole", "Qwen3Moe", **shape)
    tensors: dict[str, torch.Tensor | None] = {}
    for name, weight in load_file(whole / "model.safetensors").items():
        if "_proj." in name:
            blocks = weight.float().reshape(len(weight) // 128, 128, -1, 128)
            scale = blocks.abs().amax((1, 3)) / 448
            packed = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(weight.shape)
            tensors |= {name: packed, f"{name}_scale_inv": scale}
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    ignored = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    return changed(whole, tmp_path / "blocks", {**config, "modules_to_not_convert": ignored}, **tensors)


def test_whole_and_without_an_expert(mixture: Path) -> None:
    assert compare(Checkpoint(mixture)) == NOTHING
    weights = load_file(mixture / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "layers.1.mlp.experts.0.down_proj" not in name}
    assert len(kept) == len(weights) - 2
    save_file(kept, mixture / "model.safetensors", {"format": "pt"})
    assert compare(Checkpoint(mixture)).missing == ["model.layers.1.mlp.experts.down_proj"]


def test_a_config_of_another_size(mixture: Path) -> None:
    config = json.loads((mixture / "config.json").read_text())
    (mixture / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    different = compare(Checkpoint(mixture))
    assert sorted(name for name, *_ in different.shapes) == ["lm_head", "model.embed_tokens"]
    (found,) = doctor.differing_tensors(Checkpoint(mixture), different)
    size, hidden = config["vocab_size"], config["hidden_size"]
    what = f"has the shape [{size}, {hidden}] (BF16), and the config asks for [{size + 1}, {hidden}]"
    assert (found.what, found.more) == (what, 1)


def sparse(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """compressed-tensors' 2:4, a format that compare_q does not know."""
    rows, columns = weight.shape
    mask = torch.full((rows, columns // 8), 0x55, dtype=torch.uint8)
    return {"compressed": weight[:, ::2].clone(), "bitmask": mask, "shape": torch.tensor([rows, columns])}


def quark(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """AMD Quark's int4."""
    rows, columns = weight.shape
    packed = torch.zeros(columns, rows // 8, dtype=torch.int32)
    return {"weight": packed, "weight_scale": torch.ones(columns // 32, rows)}


@pytest.mark.parametrize(
    ("store", "unchecked", "facts"),
    [
        (quark, "", ["14 matrices in int4 g32: model.layers.*.mlp.down_proj"]),
        (sparse, "model.layers.0.mlp.down_proj.bitmask: in a format that is not known (and 13 more like it)", []),
    ],
)
def test_packed_weights_are_there(
    store: Callable[[torch.Tensor], dict[str, torch.Tensor]], unchecked: str, facts: list[str], toy_model: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """A layer's matrix in another format does not count as missing, even if the format is unknown."""
    parts: dict[str, torch.Tensor | None] = {}
    for name, weight in load_file(toy_model / "model.safetensors").items():
        if name.endswith("proj.weight"):
            own = {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in store(weight).items()}
            parts |= {name: None} | own
    folder = changed(toy_model, tmp_path / "packed", {"quant_method": "none-such"}, **parts)
    assert compare(Checkpoint(folder)) == replace(NOTHING, unchecked=unchecked)
    assert [text.partition(",")[0] for title, text in examine(folder).facts if title == "layers"] == facts


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (lambda names: names, []),
        (lambda names: names - {"blk.1.ffn_up.weight"}, ["m.gguf: blk.1.ffn_up.weight"]),
        (lambda names: {name for name in names if not name.startswith("blk.2.")}, ["m.gguf: blk.2.attn_q.weight"]),
        (lambda names: names | {"blk.4.attn_q.weight", "blk.4.ffn_up.weight"}, ["m.gguf: blk.4"]),
        (lambda names: names - {f"blk.{n}.ffn_up.weight" for n in (1, 3)}, []),  # blocks may alternate
        (lambda names: names - {"blk.0.ffn_up.weight"} | {"blk.0.ffn_norm.weight"}, []),  # the first may differ
    ],
)
def test_blocks_of_gguf(changed: Callable[[set[str]], set[str]], expected: list[str]) -> None:
    names = changed({f"blk.{n}.{part}.weight" for n in range(4) for part in ("attn_q", "ffn_up")})
    tensors = tuple(GgufTensor(name, (4, 4), "f32", 64) for name in sorted(names))
    fields = {"general.architecture": "llama", "llama.block_count": 4}
    found = list(doctor.uneven_gguf_blocks(GgufModel((Path("m.gguf"),), fields, tensors, "")))
    assert [(each.severity, each.where) for each in found] == [("wrong", where) for where in expected]


def test_a_count_of_blocks_that_no_file_can_have_takes_no_memory() -> None:
    """A header of 256 bytes may count 4 billion blocks, and may have tensors of many blocks."""
    tensors = (GgufTensor("blk.0.attn_q.weight", (4, 4), "f32", 64),)
    fields = {"general.architecture": "llama", "llama.block_count": 2**32 - 1}
    (found,) = doctor.uneven_gguf_blocks(GgufModel((Path("m.gguf"),), fields, tensors, ""))
    assert (found.severity, found.where) == ("wrong", "m.gguf: block_count")
    many = tuple(GgufTensor(f"blk.{n * 7}.{n}.weight", (4, 4), "f32", 64) for n in range(5_000))
    for count in (0, 4, 4_000):
        fields["llama.block_count"] = count
        (found,) = doctor.uneven_gguf_blocks(GgufModel((Path("m.gguf"),), fields, many, ""))
        assert found.severity == "wrong"
