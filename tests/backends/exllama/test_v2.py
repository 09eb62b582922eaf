"""The ExLlamaV2 engine on a stand-in of its API, held against the installed source; nobody has run the real one."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import backends
from backends.base import Layer, LayerGroup, LoadRequest, Task
from backends.checkpoint.config import CheckpointConfig
from backends.common.errors import ModelError
from backends.common.packages import installed_versions
from backends.exllama.v2 import ExLlamaV2Backend
from eval.run import scoring
from tests.support.toy import TOY_VOCAB, Ran, brute_force, refusal, toy_windows

SOURCE = importlib.util.find_spec("exllamav2")
PADDED = 352


class ExLlamaV2Config:
    def __init__(self, model_dir: str | None = None) -> None:
        self.model_dir, self.architecture, self.vocab_size = model_dir, "LlamaForCausalLM", TOY_VOCAB
        self.max_seq_len, self.max_input_len, self.max_attention_size = 256, 2048, 2048**2
        self.no_sdpa = self.no_flash_attn = self.no_xformers = False

    def arch_compat_overrides(self, quiet: bool = False, warn_only: bool = False) -> None:
        assert quiet
        self.no_xformers = True


class ExLlamaV2Linear:
    def __init__(self, key: str, q_tensors: dict[str, torch.Tensor] | None) -> None:
        self.key, self.q_tensors = key, q_tensors
        self.linear = None if q_tensors else torch.nn.Linear(64, 32, dtype=torch.float16)

    def numel(self) -> int:
        return 64 * 32

    def device(self) -> str:
        return "cuda:0"


class Attention:
    sliding_window = 0

    def device(self) -> str:
        return "cuda:1"


class Embedding:
    def device(self) -> str:
        return "cpu"


class ExLlamaV2Cache:
    def __init__(self, model: ExLlamaV2, batch_size: int = 1, max_seq_len: int = -1, lazy: bool = False) -> None:
        self.told = (batch_size, max_seq_len, lazy)


class ExLlamaV2:
    last: ClassVar[Any] = None

    def __init__(self, config: ExLlamaV2Config, lazy_load: bool = False) -> None:
        ExLlamaV2.last = self
        self.config, self.how, self.unloaded = config, (), False
        words = {"q_weight": torch.zeros(8, 32, dtype=torch.int32)}
        layers = [
            ("0.mlp.up_proj", words),
            ("1.mlp.up_proj", words),
            ("1.mlp.gate_proj", {"qweight": words["q_weight"]}),
        ]
        linears = [ExLlamaV2Linear(f"model.layers.{name}", tensors) for name, tensors in layers]
        self.modules = [Embedding(), Attention(), ExLlamaV2Linear("lm_head", None)]
        self.modules_dict = {module.key: module for module in [*linears, self.modules[-1]]}
        self.table = torch.randn(TOY_VOCAB, PADDED, generator=torch.Generator().manual_seed(0)).half()
        self.table[:, TOY_VOCAB:] = -65504.0

    def load(self, gpu_split: list[float] | None = None, lazy: bool = False) -> None:
        self.how = ("load", gpu_split)

    def load_autosplit(self, cache: ExLlamaV2Cache, reserve_vram: int | list[int] | None = None) -> None:
        torch.set_num_threads(1)  # the import of the real one does
        self.how = ("autosplit", cache.told, reserve_vram)

    def forward(self, input_ids: torch.Tensor, cache: ExLlamaV2Cache | None = None) -> torch.Tensor:
        assert input_ids.dtype == torch.int64
        return self.table[input_ids]

    def unload(self) -> None:
        self.unloaded = True


@pytest.fixture
def attn(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The stand-in in place of exllamav2, and a GPU for it; its module ``attn``, without flash-attn."""
    module, attn = types.ModuleType("exllamav2"), types.ModuleType("exllamav2.attn")
    for each in (ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config):
        setattr(module, each.__name__, each)
    module.attn = attn  # type: ignore[attr-defined]
    attn.has_flash_attn, attn.has_xformers = False, True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "exllamav2", module)
    monkeypatch.setitem(sys.modules, "exllamav2.attn", attn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return attn


def request(folder: Path, tokens: int = 100, **options: Any) -> LoadRequest:
    return LoadRequest("toy", "exllamav2", str(folder), tokens, options)


def loaded(folder: Path, tokens: int = 100, **options: Any) -> ExLlamaV2Backend:
    backend = ExLlamaV2Backend(request(folder, tokens, **options))
    backend.load()
    return backend


def with_config(folder: Path, toy_model: Path, **changes: Any) -> Path:
    config = {**CheckpointConfig.read(toy_model).raw, "rope_theta": 10_000.0, **changes}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return folder


def test_missing_engine_is_one_line_with_its_cure(
    compare_q: Callable[..., Ran], write_specs: Any, toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(backends.ENGINES, "exllamav2", "backends.exllama.v2:ExLlamaV2Backend")
    monkeypatch.setattr("backends.common.packages.installed_versions", lambda packages: {})
    spec = {"load_fn": "exllamav2", "fwd_fn": "exllamav2", "label": "EXL2", "model_dir": str(toy_model)}
    data, models = write_specs([spec])
    ran = compare_q("-d", data, "-m", models)
    assert ran.status == 2
    assert "EXL2: load_fn: 'exllamav2' is not installed: pip install 'exllamav2>=0.3.2,<0.4' (compiles" in ran.err


def test_without_a_gpu(toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="exllamav2 needs an NVIDIA GPU; torch sees none"):
        loaded(toy_model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_splt": [1.0]}, "did you mean 'gpu_split'"),
        ({"gpu_split": []}, "engine.gpu_split: "),
        ({"max_seq_len": 99}, "engine.max_seq_len: 99 is too short for windows of 100 tokens"),
    ],
)
def test_bad_options(toy_model: Path, options: dict[str, Any], message: str) -> None:
    assert message in refusal(ExLlamaV2Backend.check, request(toy_model, **options))


def test_formats_that_the_engine_gets_wrong(toy_model: Path, tmp_path: Path) -> None:
    def quantized(**config: Any) -> LoadRequest:
        return request(with_config(tmp_path, toy_model, quantization_config=config))

    for method in ("awq", "fp8", "exl3"):
        assert f"does not read {method} models" in refusal(ExLlamaV2Backend.check, quantized(quant_method=method))
    assert "GPTQ models of 4 bits; this one has 8" in refusal(
        ExLlamaV2Backend.check, quantized(quant_method="gptq", bits=8)
    )
    ExLlamaV2Backend.check(quantized(quant_method="gptq", bits=4))
    ExLlamaV2Backend.check(quantized(quant_method="exl2", bits=3.5))


def test_rope_as_transformers_5_writes_it(toy_model: Path, tmp_path: Path) -> None:
    """exllamav2 would take its defaults: a theta of 10,000 for a model of 500,000, and no scaling."""
    llama3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0}
    for changes in (
        {"rope_theta": ..., "rope_parameters": llama3},
        {"rope_theta": 500_000.0, "rope_parameters": llama3},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    ):
        folder = with_config(tmp_path, toy_model, **changes)
        assert "exllamav2 does not read its rope_parameters" in refusal(ExLlamaV2Backend.check, request(folder))
    for changes in (
        {"rope_parameters": ..., "rope_scaling": llama3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
        {"rope_parameters": llama3, "rope_scaling": llama3},
    ):
        ExLlamaV2Backend.check(request(with_config(tmp_path, toy_model, **changes)))


def test_nothing_cuts_a_window_and_no_sdpa(attn: types.ModuleType, toy_model: Path) -> None:
    config = loaded(toy_model, 4096).model.config
    assert (config.max_seq_len, config.max_input_len, config.max_attention_size) == (4096, 4096, 4096**2)
    assert config.no_sdpa
    assert loaded(toy_model, 100, max_seq_len=8192).model.config.max_seq_len == 8192
    assert loaded(toy_model, 100).model.config.max_seq_len == 256


def test_how_it_is_split(attn: types.ModuleType, toy_model: Path) -> None:
    assert loaded(toy_model).model.how == ("autosplit", (1, 100, True), 1 << 30)
    assert loaded(toy_model, 1 << 20).model.how[-1] == 4 * 2 * (1 << 20) * TOY_VOCAB
    assert loaded(toy_model, gpu_split=[10, 20]).model.how == ("load", [10.0, 20.0])


def test_threads_are_given_back(attn: types.ModuleType, toy_model: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    loaded(toy_model)
    found = torch.get_num_threads()
    torch.set_num_threads(threads)
    assert found == 3


def test_sliding_window_without_flash_attention(
    attn: types.ModuleType, toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Attention, "sliding_window", 100)
    loaded(toy_model, 99)
    with pytest.raises(
        ModelError, match="windows of 100 tokens reach its sliding window of 100; that needs flash-attn"
    ):
        loaded(toy_model, 100)
    attn.has_flash_attn = True  # type: ignore[attr-defined]
    assert loaded(toy_model, 100).provenance()["attention"] == "flash-attn"


def test_logits_are_cut_to_the_vocabulary(attn: types.ModuleType, toy_model: Path) -> None:
    backend = loaded(toy_model)
    windows = toy_windows(2, 30, 3)
    for scores, window in zip(scoring.token_scores(backend, windows, Task()), windows, strict=True):
        gold = brute_force(backend.model.table[window.token_ids][:, :TOY_VOCAB], window)
        np.testing.assert_allclose(scores.logprob, gold, atol=1e-5)
    assert tuple(backend.logits(windows[0]).shape) == (30, TOY_VOCAB)


def test_layers_and_provenance(attn: types.ModuleType, toy_model: Path) -> None:
    """8 x 32 words of 32 bits for 64 x 32 weights are 4 bits a weight."""
    backend = loaded(toy_model)
    backend.logits(toy_windows(1, 10)[0])
    assert backend.layers() == (
        LayerGroup(Layer("model.layers.*.mlp.up_proj", "exl2 4.0 bpw", "float16", "gemm_half_q_half"), 2),
        LayerGroup(Layer("model.layers.*.mlp.gate_proj", "gptq 4-bit", "float16", "gemm_half_q_half"), 1),
        LayerGroup(Layer("lm_head", "float16", "float16", "torch.matmul"), 1),
    )
    assert backend.provenance() == {
        "architecture": "LlamaForCausalLM", "dtype": "float16", "devices": ["cuda:0", "cuda:1"],
        "attention": "matmul", "batch": "one window at a time", "options": {},
    }  # fmt: skip


def test_closing_and_failing(attn: types.ModuleType, toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = loaded(toy_model)
    backend.close()
    backend.close()
    assert ExLlamaV2.last.unloaded

    def fail(*_: Any) -> None:
        raise RuntimeError("Insufficient VRAM\nfor model")

    monkeypatch.setattr(ExLlamaV2, "load_autosplit", fail)
    backend = ExLlamaV2Backend(request(toy_model))
    with pytest.raises(ModelError, match=r"exllamav2 could not load .*: Insufficient VRAM for model$"):
        backend.load()
    backend.close()
    assert ExLlamaV2.last.unloaded


@pytest.mark.skipif(SOURCE is None, reason="exllamav2 is not installed")
@pytest.mark.parametrize(
    ("file", "stand_in"),
    [
        ("model.py", ExLlamaV2), ("config.py", ExLlamaV2Config), ("cache.py", ExLlamaV2Cache),
        ("linear.py", ExLlamaV2Linear),
    ],
)  # fmt: skip
def test_the_stand_in_has_the_signatures_of_the_source(file: str, stand_in: type) -> None:
    classes = [node for node in ast.parse(text_of(file)).body if isinstance(node, ast.ClassDef)]
    (real,) = (node for node in classes if node.name == stand_in.__name__)
    methods = {node.name: node for node in real.body if isinstance(node, ast.FunctionDef)}
    for name, method in inspect.getmembers(stand_in, inspect.isfunction):
        if (name, file) not in {("__init__", "linear.py"), ("device", "linear.py")}:
            taken = {argument.arg for argument in methods[name].args.args}
            assert set(inspect.signature(method).parameters) <= taken, name


@pytest.mark.skipif(SOURCE is None, reason="exllamav2 is not installed")
def test_what_is_read_of_the_engine_is_in_its_source() -> None:
    for file, *wanted in [
        ("attn.py", "has_flash_attn = False", "has_xformers = False", "not cfg.no_sdpa and", "self.sliding_window ="),
        ("config.py", "self.max_input_len = 2048", "max_attention_size", "self.vocab_size =", "self.architecture ="),
        ("module.py", "def device(self) -> str:", '"q_weight"', '"qweight"'),
        ("linear.py", "self.q_tensors = w", "self.linear = nn.Linear"),
        ("model.py", "x[:, :, -head_padding:] = -65504."),
    ]:
        for words in wanted:
            assert words in text_of(file), (file, words)


def text_of(file: str) -> str:
    assert SOURCE is not None
    assert SOURCE.origin is not None
    return (Path(SOURCE.origin).parent / file).read_text(encoding="utf-8")


@pytest.mark.engine
@pytest.mark.skipif(
    not (torch.cuda.is_available() and installed_versions(("exllamav2",))),
    reason="no CUDA GPU or exllamav2 not installed",
)
def test_a_later_token_does_not_move_an_earlier_score(toy_model: Path) -> None:
    """What its own SDPA path gets wrong."""
    backend = loaded(toy_model, 200)
    (window,) = toy_windows(1, 200)
    changed = window.token_ids.copy()
    changed[150:] = (changed[150:] + 1) % 256
    first, second = backend.logits(window).clone(), backend.logits(type(window)(1, changed))
    assert float((first[:150] - second[:150]).abs().max()) < 0.1
    assert float((first[150:] - second[150:]).abs().max()) > 1.0
    backend.close()
