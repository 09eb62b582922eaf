"""Checks of a model's tensors before it loads.

Tensors that are missing, left over, stored twice or zeros are refused or noted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compare_q.backends.checkpoint import contents, zeros
from compare_q.backends.checkpoint.folder import Checkpoint, HuggingFaceFolder
from compare_q.backends.checkpoint.lacking_parts import lacking_parts
from compare_q.backends.common.errors import InputError, ModelError
from tests.support.checkpoints import Entries, write_checkpoint
from tests.support.stored_formats import CASES, entries_of
from tests.support.toy import Run, Specs, planned, save_llama
from tests.support.transformers_models import changed

PRESETS = ("W4A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16", "NVFP4")
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {},
    "Gemma2": {},
    "Starcoder2": {},
    "Phi3": {},
    "Granite": {},
    "Olmo2": {},
    "GPTNeoX": {},
    "StableLm": {},
    "Cohere": {"tie_word_embeddings": True},
    "Mixtral": {"num_local_experts": 2},
    "Qwen3Moe": {"num_experts": 2, "moe_intermediate_size": 32},
    "HrmText": {},
    "OPT": {"ffn_dim": 128, "word_embed_proj_dim": 64, "pad_token_id": 1},
    "Lfm2Moe": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "num_dense_layers": 1,
        "layer_types": ["full_attention", "conv"],
    },
    "Bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
    },
}
"""Model types of Transformers -> keys of their configs."""


def notes_of(folder: Path) -> list[str]:
    return contents.checked(HuggingFaceFolder(planned("m", "transformers", str(folder), 100)))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_tensor_is_needed(
    preset: str, quantized: Callable[..., Path], tmp_path: Path
) -> None:
    """Each tensor is left out in turn, and the message names the tensor or its module."""
    source = quantized(preset)
    assert notes_of(source) == []
    for at, name in enumerate(load_file(source / "model.safetensors")):
        broken = changed(source, tmp_path / str(at), {}, **{name: None})
        with pytest.raises(ModelError) as refused:
            notes_of(broken)
        assert name.rpartition(".")[0].removeprefix("model.") in str(refused.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_intact_models_have_no_note(family: str, tmp_path: Path) -> None:
    """Models with a separate head, with fused names, and with experts that Transformers stacks."""
    pad = {"pad_token_id": 0} if family in ("Phi3", "Cohere") else {}
    folder = save_llama(tmp_path, family, **pad, **FAMILIES[family])
    assert notes_of(folder) == []
    tensors = load_file(folder / "model.safetensors")
    weights = [name for name in tensors if name.endswith("weight")]
    # It has no norms.
    if family == "HrmText":
        del tensors[weights[0]]
        expected = "lm_head"
    else:
        norms = [name for name in weights if "norm" in name]
        del tensors[norms[0]]
        expected = "norm"
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=expected):
        notes_of(folder)


def edited(source: Path, folder: Path, **keys: int) -> Path:
    """Copy a model, and replace keys of its config."""
    changed(source, folder, {})
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_is_left_over(toy_model: Path, tmp_path: Path) -> None:
    """A decoder layer or head that is left over is refused.

    Biases and multi-token-prediction modules cause a note, but biases of zeros do not.
    """
    with pytest.raises(ModelError, match=r"model\.layers\.1\.\S+ \(and 6 more like it\) is stored"):
        notes_of(edited(toy_model, tmp_path / "short", num_hidden_layers=1))
    with pytest.raises(ModelError, match="lm_head"):
        notes_of(edited(toy_model, tmp_path / "tied", tie_word_embeddings=True))
    names = [f"model.layers.{layer}.self_attn.q_proj.bias" for layer in (0, 1)]
    biases = {name: torch.full((64,), 0.5, dtype=torch.bfloat16) for name in names}
    (note,) = notes_of(changed(toy_model, tmp_path / "biased", {}, **biases))
    assert note.startswith("2 modules or biases are stored and not loaded")
    assert note.endswith(names[0])
    zero_biases = {name: 0 * biases[name] for name in names}
    assert notes_of(changed(toy_model, tmp_path / "zero", {}, **zero_biases)) == []
    draft = {"mtp.fc.weight": torch.randn(64, 64)}
    (note,) = notes_of(changed(toy_model, tmp_path / "mtp", {}, **draft))
    assert note.endswith("mtp.fc")


@pytest.mark.parametrize(
    ("preset", "config", "rows"),
    [
        ("", {"intermediate_size": 64}, 0),
        ("", {"num_key_value_heads": 1}, 0),
        ("", {"vocab_size": 300}, 0),
        ("", {}, 2),
        ("W4A16", {"intermediate_size": 64}, 0),
        ("W8A8", {"num_key_value_heads": 1}, 0),
        ("FP8_DYNAMIC", {}, 2),
    ],
)
def test_sizes_that_the_config_contradicts(
    preset: str,
    config: dict[str, int],
    rows: int,
    toy_model: Path,
    quantized: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """vLLM would load the first rows of a matrix that is too large.

    ``rows``: number of repetitions of one matrix.
    """
    source = edited(quantized(preset) if preset else toy_model, tmp_path / "edited", **config)
    name = "model.layers.1.mlp.up_proj.weight"
    weight = {}
    if rows:
        weight[name] = torch.cat([load_file(source / "model.safetensors")[name]] * rows)
    with pytest.raises(ModelError, match="has the shape"):
        notes_of(changed(source, tmp_path / "broken", {}, **weight))


def test_one_name_in_two_files(toy_model: Path, tmp_path: Path) -> None:
    folder = changed(toy_model, tmp_path / "twice", {})
    tensors = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    first = next(iter(tensors))
    save_file(tensors, folder / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] * 2}, folder / "model-00002-of-00002.safetensors")
    (folder / "model.safetensors").unlink()
    # Only files that the index names are read, so it must name both.
    index = dict.fromkeys(tensors, "model-00001-of-00002.safetensors") | {
        first: "model-00002-of-00002.safetensors"
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(
        InputError, match=f"has the tensor {name}, as model-00001-of-00002.safetensors has"
    ):
        notes_of(folder)


@pytest.mark.parametrize(
    ("name", "rows", "is_wrong"),
    [
        ("model.layers.1.mlp.up_proj.weight", slice(None), True),
        ("model.layers.1.mlp.up_proj.weight", slice(40, 60), True),
        ("model.layers.0.self_attn.q_proj.weight", slice(7, 9), None),
        ("model.embed_tokens.weight", slice(310, None), False),
        ("model.embed_tokens.weight", slice(100, 200), True),
    ],
)
def test_zeros(
    toy_model: Path, tmp_path: Path, name: str, rows: slice, is_wrong: bool | None
) -> None:
    """All bytes are checked.

    Two rows of zeros are accepted, and a few at the end of an embedding are padding.
    """
    weight = load_file(toy_model / "model.safetensors")[name]
    weight[rows] = 0
    folder = changed(toy_model, tmp_path / "zeros", {}, **{name: weight})
    runs = zeros.find(Checkpoint(folder).placed(), whole=True)
    expected = [] if is_wrong is None else [(name, is_wrong)]
    assert [(run.name, run.wrong) for run in runs] == expected
    if is_wrong:
        with pytest.raises(ModelError, match="zeros"):
            notes_of(folder)


@pytest.mark.parametrize(("part", "value"), [("weight", 0.5), ("weight_packed", -0x77777778)])
def test_one_repeated_number(
    toy_model: Path, quantized: Callable[..., Path], tmp_path: Path, part: str, value: float
) -> None:
    """0x88888888 is eight zeros of W4A16, which stores zero as 8."""
    source = toy_model if part == "weight" else quantized("W4A16")
    name = f"model.layers.1.mlp.up_proj.{part}"
    weight = load_file(source / "model.safetensors")[name]
    folder = changed(source, tmp_path / "repeated", {}, **{name: torch.full_like(weight, value)})
    with pytest.raises(ModelError, match=f"{name}: all one repeated number"):
        notes_of(folder)


def test_zeros_in_every_layer_are_meant(toy_model: Path, tmp_path: Path) -> None:
    weights = {}
    for name, weight in load_file(toy_model / "model.safetensors").items():
        if "o_proj" in name:
            weight[20:40] = 0
            weights[name] = weight
    (note,) = notes_of(changed(toy_model, tmp_path / "pruned", {}, **weights))
    assert "rows 20 to 39 of 64 are zeros" in note


def test_a_scale_of_zeros(quantized: Callable[..., Path], tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight_scale"
    scale = torch.zeros_like(load_file(quantized("W8A8") / "model.safetensors")[name])
    with pytest.raises(ModelError, match=f"{name}: all zeros"):
        notes_of(changed(quantized("W8A8"), tmp_path / "zeros", {}, **{name: scale}))


OPTIONAL = {"bias", "k_scale", "v_scale"}


def layers_of(folder: Path, case: str, config: dict[str, object], without: str = "") -> Checkpoint:
    """Write three kinds of matrices in three layers, all in one stored format.

    ``without``: the tensor that is missing.
    """
    cases = {}
    for layer in range(3):
        for kind in ("attn.q", "mlp.up", "mlp.down"):
            cases[f"model.layers.{layer}.{kind}"] = case
    entries, values = stored_as(cases)
    entries.pop(without, None)
    config = {"quantization_config": {"quant_method": "none"}} | config
    return Checkpoint(write_checkpoint(folder, entries, config, values))


def stored_as(cases: dict[str, str]) -> tuple[Entries, dict[str, bytes]]:
    """Return entries and values of modules; ``cases``: module -> name of its stored format."""
    entries: Entries = {}
    values = {}
    for module, case in cases.items():
        entries |= entries_of(CASES[case], module)
        for part, value in CASES[case].values.items():
            values[f"{module}.{part}"] = value
    return entries, values


@pytest.mark.parametrize(
    "case", [case for case in CASES if "unquantized" not in case and "unpadded" not in case]
)
def test_formats_of_unknown_models(case: str, tmp_path: Path) -> None:
    """If Transformers does not know the model, layers are compared with each other.

    Every stored format is accepted.
    """
    config = CASES[case].config
    assert lacking_parts(layers_of(tmp_path, case, config)) == []
    for name in CASES[case].parts.keys() - OPTIONAL:
        for module in ("model.layers.1.mlp.up", "model.layers.2.attn.q"):
            lacking = lacking_parts(layers_of(tmp_path, case, config, f"{module}.{name}"))
            assert lacking == [f"{module}.{name}"], name


def group(target: str, **weights: object) -> dict[str, object]:
    """A group of compressed-tensors' config: int4 in groups of 32."""
    return {
        "targets": [target],
        "weights": {
            "num_bits": 4,
            "type": "int",
            "group_size": 32,
            "strategy": "group",
            "symmetric": True,
        }
        | weights,
    }


@pytest.mark.parametrize(
    ("second", "other"),
    [
        ("int4 asymmetric", {"symmetric": False}),
        ("int8 packed", {"num_bits": 8, "strategy": "channel"}),
    ],
)
def test_mixtures_that_the_config_asks_for(
    second: str, other: dict[str, object], tmp_path: Path
) -> None:
    cases = {f"model.layers.{layer}.q_proj": "int4 g32" if layer else second for layer in range(3)}
    entries, values = stored_as(cases)
    groups = {"a": group("re:.*layers.0.*", **other), "b": group("re:.*layers.[12].*")}
    config = {
        "quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}
    }
    assert lacking_parts(Checkpoint(write_checkpoint(tmp_path, entries, config, values))) == []
    points = "model.layers.0.q_proj.weight_zero_point"
    if entries.pop(points, None):
        assert lacking_parts(Checkpoint(write_checkpoint(tmp_path, entries, config, values))) == [
            points
        ]


@pytest.mark.parametrize(
    ("case", "part", "quantization"),
    [
        (
            "int4 g32",
            "weight_scale",
            {"quant_method": "compressed-tensors", "config_groups": {"a": group("Linear")}},
        ),
        (
            "nvfp4 a16",
            "weight_global_scale",
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": group("Linear", type="float", group_size=16, strategy="tensor_group")
                },
            },
        ),
        (
            "int4 g32",
            "weight_zero_point",
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": group("Linear", symmetric=False)},
            },
        ),
        ("modelopt nvfp4", "weight_scale_2", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        ("modelopt nvfp4", "input_scale", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        ("nf4", "weight.absmax", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ("gptq 4", "scales", {"quant_method": "gptq", "bits": 4, "group_size": 32}),
        ("awq", "qzeros", {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}),
        ("int8 w8a8", "weight_scale", {}),
    ],
)
def test_what_no_layer_has(
    case: str, part: str, quantization: dict[str, object], tmp_path: Path
) -> None:
    """If no other layer has the tensor, the format or the config determines that it is missing."""
    intact = layers_of(tmp_path, case, {"quantization_config": quantization})
    entries: Entries = {}
    for name, tensor in intact.tensors.items():
        if not name.endswith(f".{part}"):
            entries[name] = (tensor.dtype, *tensor.shape)
    folder = write_checkpoint(tmp_path, entries, {"quantization_config": quantization})
    # Three matrices in each of three layers.
    assert len(lacking_parts(Checkpoint(folder))) == 9


@pytest.mark.engine
def test_a_run_refuses_it_in_every_engine(
    quantized: Callable[..., Path], tmp_path: Path, compare_q: Run, write_specs: Specs
) -> None:
    """Every engine refuses the model before it loads; the command ``check`` reports the same."""
    name = "model.layers.1.self_attn.q_proj.weight_scale"
    folder = str(changed(quantized("W8A8"), tmp_path / "broken", {}, **{name: None}))
    specs = [
        {"load_fn": engine, "label": engine, "model_dir": folder}
        for engine in ("vllm_score", "transformers_auto_bf16")
    ]
    data, models = write_specs(specs)
    ran = compare_q("-d", data, "-m", models)
    assert ran.status == 2
    assert all(f"error: {spec['label']}: {folder}: no {name}" in ran.err for spec in specs)
    checked = compare_q("check", "-d", data, "-m", models)
    assert checked.status == 1
    assert checked.out.count(f"{name}: missing") == 2
