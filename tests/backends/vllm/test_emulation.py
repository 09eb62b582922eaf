"""``"emulate": true`` of vllm_score: which layers it is about, and where it is refused; unequal NVFP4 scales."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backends.checkpoint import nvfp4_scales
from backends.vllm import install
from backends.vllm.backend import VllmScoreBackend
from backends.vllm.options import emulation_arguments, engine_arguments
from tests.support.toy import Ran, refusal
from tests.support.vllm_engine import request_for

pytestmark = pytest.mark.usefixtures("stand_in_vllm")

COMPRESSED_TENSORS = {"quant_method": "compressed-tensors"}


def test_unequal_scales_end_the_run_before_it_starts(
    write_specs: Callable[..., tuple[Path, Path]], compare_q: Callable[..., Ran], toy_model: Path, tmp_path: Path
) -> None:
    """The toy with an NVFP4 MLP, whose two matrices that engines fuse differ in their global scale."""
    folder = tmp_path / "unequal"
    shutil.copytree(toy_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": COMPRESSED_TENSORS}))
    tensors = load_file(folder / "model.safetensors")
    for name, scale in (("gate_proj", 1.0), ("up_proj", 2.0)):
        layer = f"model.layers.0.mlp.{name}"
        rows, columns = tensors.pop(f"{layer}.weight").shape
        tensors[f"{layer}.weight_packed"] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        tensors[f"{layer}.weight_scale"] = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
        tensors[f"{layer}.weight_global_scale"] = torch.tensor([scale])
    save_file(tensors, folder / "model.safetensors")
    data, models = write_specs([{"load_fn": "vllm_score", "label": "x", "model_dir": str(folder)}])
    ran = compare_q("-d", data, "-m", models, "--check")
    assert ran.status == 2
    unequal = "x: model_dir: model.layers.0.mlp: gate_proj and up_proj have unequal weight_global_scale (1, 2)"
    assert unequal in ran.err + ran.out, ran.err


def with_scales(folder: Path, *names: str) -> Path:
    """A checkpoint of one-byte NVFP4 layers, each with the scales that are named."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": COMPRESSED_TENSORS}))
    tensors = {f"{name.rpartition('.')[0]}.weight_packed": torch.zeros(1, dtype=torch.uint8) for name in names}
    save_file(tensors | {name: torch.ones(1) for name in names}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("names", "arguments"),
    [
        (("o_proj.weight_global_scale",), {}),
        (("o_proj.weight_global_scale", "o_proj.input_global_scale"), {"linear_backend": "emulation"}),
        (
            ("mlp.experts.0.w2.weight_global_scale", "mlp.experts.0.w2.input_global_scale"),
            {"linear_backend": "emulation", "moe_backend": "emulation"},
        ),
        (
            ("o_proj.weight_global_scale", "o_proj.input_global_scale", "mlp.experts.0.w2.weight_global_scale"),
            {"linear_backend": "emulation"},
        ),
    ],
)
def test_what_is_emulated(names: tuple[str, ...], arguments: dict[str, str], tmp_path: Path) -> None:
    """Activations that are to be rounded; a weight-only layer is what its scheme says anyway."""
    folder = with_scales(tmp_path / "x", *names)
    VllmScoreBackend.check(request_for(folder, emulate=True))
    assert emulation_arguments(folder, nvfp4_scales.nvfp4_layers(folder)) == arguments
    for name in arguments:
        said = refusal(VllmScoreBackend.check, request_for(folder, emulate=True, **{name: "marlin"}))
        assert said == f"engine.{name}: chosen by engine.emulate; give one of the two"


def test_emulate_is_not_an_argument_of_vllm(toy_model: Path) -> None:
    assert "emulate" not in engine_arguments(request_for(toy_model, emulate=True), {}, cpu=False)


def test_nothing_to_emulate(toy_model: Path, tmp_path: Path) -> None:
    VllmScoreBackend.check(request_for(toy_model, emulate=False))
    assert "engine.emulate: nothing to emulate: no layer of" in refusal(
        VllmScoreBackend.check, request_for(toy_model, emulate=True)
    )
    assert "engine.emulate: must be true or false (got 'yes')" in refusal(
        VllmScoreBackend.check, request_for(toy_model, emulate="yes")
    )


def test_a_vllm_without_emulation_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = with_scales(tmp_path / "x", "o_proj.weight_global_scale", "o_proj.input_global_scale")
    monkeypatch.setattr(install, "arguments", lambda: frozenset({"enforce_eager", "dtype"}))
    said = refusal(VllmScoreBackend.check, request_for(folder, emulate=True))
    assert "engine.linear_backend: the installed vLLM has no such argument" in said


MX = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
QUARK = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
NVFP4_EXPERT = "mlp.experts.0.w2.weight_global_scale"


def with_config(folder: Path, quantization: dict[str, Any], name: str) -> Path:
    """A checkpoint of one tensor."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    save_file({name: torch.zeros(1, dtype=torch.uint8)}, folder / "model.safetensors")
    return folder


def compressed(weights: Any, activations: Any) -> dict[str, Any]:
    return COMPRESSED_TENSORS | {"config_groups": {"group_0": {"weights": weights, "input_activations": activations}}}


def quark() -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": QUARK, "input_tensors": QUARK}}


@pytest.mark.parametrize(
    ("quantization", "name", "missing", "said"),
    [
        (compressed(MX, None), "o_proj.weight_packed", "", "nothing to emulate: no layer of"),
        (compressed({**MX, "num_bits": 8}, {**MX, "num_bits": 8}), "o_proj.weight", "",
         "vLLM's emulation of MXFP8 leaves activations unquantized; leave it out"),
        (compressed(MX, MX), "o_proj.weight_packed", "file", "this vLLM has no emulation of MXFP4; 0.32 has"),
        (compressed(MX, MX), "o_proj.weight_packed", "package",
         "vLLM emulates MXFP4 by a package that is missing: pip install amd-quark"),
        (compressed(MX, MX), "mlp.experts.0.w2.weight_packed", "",
         "vLLM emulates MXFP4 experts of Quark only, and these are of compressed-tensors; leave it out"),
        (quark(), "mlp.experts.0.w2.weight", "", ""),
        (compressed(MX, MX), "o_proj.weight_packed", "", ""),
    ],
)  # fmt: skip
def test_mx_activations_are_emulated_or_refused_by_name(
    quantization: dict[str, Any], name: str, missing: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "emulates_mxfp4", lambda: missing != "file")
    versions = {} if missing == "package" else {"amd-quark": "0.11"}
    monkeypatch.setattr("backends.vllm.options.installed_versions", lambda names: versions)
    folder = with_config(tmp_path / "x", quantization, name)
    if said:
        assert f"engine.emulate: {said}" in refusal(VllmScoreBackend.check, request_for(folder, emulate=True))
    else:
        VllmScoreBackend.check(request_for(folder, emulate=True))
        experts = {"moe_backend": "emulation"} if "experts" in name else {}
        assert emulation_arguments(folder, {}) == {"linear_backend": "emulation"} | experts


def test_what_no_kernel_for_cpus_takes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "is_cpu_build", lambda: True)
    monkeypatch.setattr(install, "has_cpu_router", lambda: False)
    mxfp4 = with_config(tmp_path / "mxfp4", compressed(MX, None), "o_proj.weight_packed")
    said = refusal(VllmScoreBackend.check, request_for(mxfp4))
    assert said == "model_dir: vLLM has no kernel for MXFP4 layers on a CPU; score it on a GPU"
    VllmScoreBackend.check(request_for(with_config(tmp_path / "oss", {"quant_method": "mxfp4"}, "experts.w2_blocks")))
    experts = with_scales(tmp_path / "nvfp4", NVFP4_EXPERT)
    assert "mlp.experts.0.w2: this vLLM cannot be given a kernel for NVFP4 experts on a CPU; install" in refusal(
        VllmScoreBackend.check, request_for(experts)
    )
    monkeypatch.setattr(install, "has_cpu_router", lambda: True)
    VllmScoreBackend.check(request_for(experts))
