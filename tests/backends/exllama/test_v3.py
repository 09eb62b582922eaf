"""The ExLlamaV3 engine: on a stand-in of its API, held against the installed source, and on a GPU the real one."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import backends
from backends.base import Layer, LayerGroup, LoadRequest, Task, Window
from backends.checkpoint.config import CheckpointConfig
from backends.common.errors import ModelError
from backends.common.packages import installed_versions
from backends.exllama.v3 import ExLlamaV3Backend
from backends.hf.backend import TransformersBackend
from backends.reference.head import Head, head_logits
from backends.reference.reading import open_reference
from eval.run import scoring
from tests.support.toy import TOY_VOCAB, Ran, brute_force, refusal, save_toy_tokenizer, toy_windows

SOURCE = importlib.util.find_spec("exllamav3")
HIDDEN, PADDED = 64, 384


class SafetensorsCollection:
    """Stand-in; ``knows_files`` False is an exllamav3 that only takes folders."""

    knows_files = True

    def __init__(self, directory: str) -> None:
        self.tensor_files = [directory]
        self.open = True

    def add_tensor_files(self, directory: str, warn_if_override: bool = True) -> None:
        self.tensor_files += [directory] if self.knows_files else []

    def close(self) -> None:
        self.open = False


class Config:
    seq_len: int | None = None

    def __init__(self, directory: str) -> None:
        self.stc = SafetensorsCollection(directory)
        self.vocab_size = TOY_VOCAB

    @staticmethod
    def from_directory(directory: str, **kwargs: Any) -> Config:
        return Config(directory)

    def override_dynamic_seq_len(self, new_max_position_embeddings: int) -> None:
        self.seq_len = new_max_position_embeddings


class LinearFP16:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.bias = weight, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class LinearEXL3(LinearFP16):
    K: float = 4
    _fused_reconstruct: bool | None = None


class Linear:
    dispatch_cache: ClassVar[dict[str, Any]] = {}

    def __init__(self, key: str, inner: LinearFP16) -> None:
        self.key, self.inner, self.device = key, inner, torch.device("cpu")
        self.in_features_unpadded, self.softcap, self.pre_scale, self.post_scale = HIDDEN, 0.0, 1.0, 1.0

    def forward(self, x: torch.Tensor, params: dict[str, Any], out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.inner.forward(x)


class Attention(Linear):
    """Anything that is no Linear."""


class Model:
    failure: ClassVar[Exception | None] = None
    last: ClassVar[Any] = None

    def __init__(self, config: Config) -> None:
        Model.last = self
        self.config, self.loaded, self.unloaded, self.params = config, {}, False, {}
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(TOY_VOCAB, HIDDEN, generator=generator).half()
        head = torch.randn(HIDDEN, PADDED, generator=generator).half() / 4
        head[:, TOY_VOCAB:] += 8.0  # a quantized head has noise where it is padded
        self.modules = [Attention("model.layers.0.self_attn", LinearFP16(head)), Linear("lm_head", LinearFP16(head))]
        self.logit_layer_idx = 1

    @staticmethod
    def from_config(config: Config, component: str = "text", **kwargs: Any) -> Model:
        return Model(config)

    def __iter__(self) -> Iterator[Any]:
        yield from self.modules

    def load_gen(
        self, device: Any = None, reserve_per_device: Any = None, use_per_device: Any = None,
        max_chunk_size: int = 2048, max_output_size: int = 32, max_output_factor: int = 1,
    ) -> None:  # fmt: skip
        self.loaded = {name: value for name, value in locals().items() if name != "self" and value is not None}

    def load(self, *args: Any, **kwargs: Any) -> None:
        os.write(1, b"chatter of the engine\n")
        self.load_gen(*args, **kwargs)
        if self.failure is not None:
            raise self.failure

    def forward(self, input_ids: torch.Tensor, params: dict[str, Any] | None = None) -> torch.Tensor:
        self.params = params
        assert input_ids.dtype == torch.int64
        return self.modules[-1].forward(self.embedding[input_ids], {})

    def unload(self) -> None:
        self.unloaded = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The stand-in in place of exllamav3, and a GPU for it."""
    module = types.ModuleType("exllamav3")
    module.Config, module.Model = Config, Model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "exllamav3", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return module


def request(folder: Path, tokens: int = 100, overrides: tuple[Path, ...] = (), **options: Any) -> LoadRequest:
    return LoadRequest("toy", "exllamav3", str(folder), tokens, options, overrides)


def loaded(folder: Path, tokens: int = 100, overrides: tuple[Path, ...] = (), **options: Any) -> ExLlamaV3Backend:
    backend = ExLlamaV3Backend(request(folder, tokens, overrides, **options))
    backend.load()
    return backend


def with_config(folder: Path, toy_model: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**CheckpointConfig.read(toy_model).raw, **changes}))
    return folder


def tensors(file: Path, *names: str) -> Path:
    save_file({name: torch.zeros(2, 2) for name in names}, file)
    return file


def test_missing_engine_is_one_line_with_its_cure(
    compare_q: Callable[..., Ran], write_specs: Any, toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(backends.ENGINES, "exllamav3", "backends.exllama.v3:ExLlamaV3Backend")
    monkeypatch.setattr("backends.common.packages.installed_versions", lambda packages: {})
    spec = {"load_fn": "exllamav3", "fwd_fn": "exllamav3", "label": "EXL3", "model_dir": str(toy_model)}
    data, models = write_specs([spec])
    ran = compare_q("-d", data, "-m", models)
    assert ran.status == 2
    assert "EXL3: load_fn: 'exllamav3' is not installed: pip install 'exllamav3>=1.6' (compiles" in ran.err
    assert "Traceback" not in ran.err


def test_without_a_gpu(toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="exllamav3 needs an NVIDIA GPU; torch sees none"):
        loaded(toy_model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_split": [1.0]}, "engine.gpu_split: unknown key"),
        ({"reserve_per_devise": 1}, "did you mean 'reserve_per_device'"),
        ({"device": "cuda:0", "use_per_device": [20]}, "device and use_per_device exclude each other"),
        ({"device": "gpu"}, "engine.device: "),
        ({"max_seq_len": 99}, "engine.max_seq_len: 99 is too short for windows of 100 tokens"),
    ],
)
def test_bad_options(toy_model: Path, options: dict[str, Any], message: str) -> None:
    assert message in refusal(ExLlamaV3Backend.check, request(toy_model, **options))


def test_formats_that_the_engine_gets_wrong(toy_model: Path, tmp_path: Path) -> None:
    for method in ("modelopt", "awq", "compressed-tensors", "exl2", "fp8"):
        folder = with_config(tmp_path, toy_model, quantization_config={"quant_method": method})
        assert f"exllamav3 does not read {method} models" in refusal(ExLlamaV3Backend.check, request(folder))
    ExLlamaV3Backend.check(
        request(folder := with_config(tmp_path, toy_model, quantization_config={"quant_method": "exl3"}))
    )
    (folder / "config.json").write_bytes((toy_model / "config.json").read_bytes())
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert "does not read modelopt models" in refusal(ExLlamaV3Backend.check, request(folder))


def test_files_that_the_engine_would_load_as_well(toy_model: Path, tmp_path: Path) -> None:
    """It takes every safetensors file of the folder: neither the size nor the key of scores would know of this one."""
    folder = tmp_path / "toy"
    shutil.copytree(toy_model, folder)
    other = folder / "down_proj-4.0bpw.safetensors"
    shutil.copy(folder / "model.safetensors", other)
    assert f"{other}: exllamav3 would load it as well" in refusal(ExLlamaV3Backend.check, request(folder))
    other.rename(folder / "consolidated.safetensors")
    ExLlamaV3Backend.check(request(folder))


def test_longrope_wants_the_length_that_is_served(engine: Any, toy_model: Path, tmp_path: Path) -> None:
    folder = with_config(tmp_path, toy_model, rope_scaling={"rope_type": "longrope"})
    assert "engine.max_seq_len: missing" in refusal(ExLlamaV3Backend.check, request(folder))
    ExLlamaV3Backend.check(request(folder, max_seq_len=4096))
    assert loaded(folder, max_seq_len=4096).model.config.seq_len == 4096


def test_what_the_loader_is_told(engine: Any, toy_model: Path) -> None:
    told = {"max_chunk_size": 300, "max_output_size": 300, "max_output_factor": 4}
    assert loaded(toy_model, 300).model.loaded == told
    assert loaded(toy_model, 300, use_per_device=[20, 0]).model.loaded == {**told, "use_per_device": [20, 0]}


def test_logits_are_cut_to_the_vocabulary(engine: Any, toy_model: Path) -> None:
    backend = loaded(toy_model)
    windows = toy_windows(2, 30, 3)
    for scores, window in zip(scoring.token_scores(backend, windows, Task()), windows, strict=True):
        full = Model.last.forward(torch.from_numpy(window.token_ids).long().unsqueeze(0))[0]
        assert full.shape == (30, PADDED)
        np.testing.assert_allclose(scores.logprob, brute_force(full[:, :TOY_VOCAB], window), atol=1e-5)
    backend.logits(windows[0])
    assert Model.last.params == {"attn_mode": "flash_attn_nc"}


def test_states_and_head_give_the_logits(engine: Any, toy_model: Path, tmp_path: Path) -> None:
    backend = loaded(toy_model)
    head = backend.head()
    assert not isinstance(head, str)
    weight, bias, facts = head
    assert (tuple(weight.shape), bias, facts) == ((TOY_VOCAB, HIDDEN), None, Head(TOY_VOCAB, "float16"))
    logits = backend.logits(toy_windows(1, 20)[0])
    torch.testing.assert_close(head_logits(facts, backend.states(), weight, bias), logits)
    assert kept(backend, tmp_path) == ("states", "")
    module = backend.model.modules[-1]
    module.softcap, module.post_scale = 30.0, 0.5
    assert backend.head()[2] == Head(TOY_VOCAB, "float16", 30.0, 0.5)


def kept(backend: ExLlamaV3Backend, folder: Path) -> tuple[str, str]:
    """Kind of the store that the model leaves behind as a reference, and why."""
    from backends.reference.store import seal

    building = folder / "building"
    building.mkdir()
    windows = toy_windows(1, 20)
    list(scoring.token_scores(backend, windows, Task(record=building)))
    seal(building, folder / "store", {}, 1)
    store = open_reference(folder / "store")
    return store.kind, store.reason


@pytest.mark.parametrize("quantized", [True, False])
def test_a_head_that_cannot_be_recomputed(engine: Any, toy_model: Path, tmp_path: Path, quantized: bool) -> None:
    backend = loaded(toy_model)
    module = backend.model.modules[-1]
    if quantized:
        module.inner = LinearEXL3(module.inner.weight)
    else:
        module.pre_scale = 0.5
    kind, reason = kept(backend, tmp_path)
    assert kind == "logits"
    assert reason == ("its head is a LinearEXL3" if quantized else "its logits are scaled before the soft cap")


def test_layers_and_provenance(engine: Any, toy_model: Path) -> None:
    backend = loaded(toy_model, reserve_per_device=1.5)
    weight = backend.model.modules[-1].inner.weight
    for layer, (bits, ran) in enumerate([(3, True), (3.5, None), (3, True)]):
        inner = LinearEXL3(weight)
        inner.K, inner._fused_reconstruct = bits, ran
        backend.model.modules.insert(layer, Linear(f"model.layers.{layer}.mlp.up_proj", inner))

    def fn_triton_attn_nocache() -> None: ...

    backend.model.modules[0].dispatch_cache = {(0, 1): False}
    backend.model.modules[-2].dispatch_cache = {"fn": fn_triton_attn_nocache, (0, 1): False}
    backend.logits(toy_windows(1, 10)[0])
    up = "model.layers.*.mlp.up_proj"
    assert backend.layers() == (
        LayerGroup(Layer(up, "exl3 3.0 bpw", "float16", "LinearEXL3.reconstruct_hgemm"), 2),
        LayerGroup(Layer(up, "exl3 3.5 bpw", "float16", "LinearEXL3"), 1),
        LayerGroup(Layer("lm_head", "float16", "float16", "LinearFP16"), 1),
    )
    assert backend.provenance() == {
        "model_class": "Model", "dtype": "float16", "devices": ["cpu"], "attention": ["fn_triton_attn_nocache"],
        "batch": "one window at a time", "override_tensors": [], "options": {"reserve_per_device": 1.5},
    }  # fmt: skip


def test_settings_of_the_engine_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXL3_NO_FUSED_RECONSTRUCT", "1")
    assert ExLlamaV3Backend.versions()["EXL3_NO_FUSED_RECONSTRUCT"] == "1"


def test_override_tensors_reach_the_loader(
    engine: Any, toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = (tmp_path / "b.safetensors", tmp_path / "a.safetensors")
    backend = loaded(toy_model, overrides=files)
    assert backend.model.config.stc.tensor_files == [str(toy_model), *map(str, files)]
    assert backend.provenance()["override_tensors"] == [*map(str, files)]
    monkeypatch.setattr(SafetensorsCollection, "knows_files", False)
    with pytest.raises(ModelError, match=r"does not take .*b\.safetensors as override tensors"):
        loaded(toy_model, overrides=files)


def test_override_tensors_that_would_be_mixed(toy_model: Path, tmp_path: Path) -> None:
    quantized = [f"lm_head.{part}" for part in ("suh", "svh", "trellis", "mcg")]
    folder = with_config(tmp_path, toy_model)
    tensors(folder / "model.safetensors", "model.embed_tokens.weight", *quantized)
    assert "must be a .safetensors file" in refusal(ExLlamaV3Backend.check, request(folder, 10, (tmp_path / "x.bin",)))

    def said(*names: str) -> str:
        return refusal(ExLlamaV3Backend.check, request(folder, 10, (tensors(tmp_path / "over.safetensors", *names),)))

    assert "replace lm_head, but not its mcg, suh, svh, trellis" in said("lm_head.weight")
    assert "replace lm_head, but not its mcg" in said("lm_head.mul1", *quantized[:3])
    assert "hold lm_hed, which the model does not have" in said("lm_hed.weight")
    for names in (quantized, ["lm_head.bias"], ["model.embed_tokens.weight"], ["model.embed_tokens.trellis"]):
        whole = tensors(tmp_path / "over.safetensors", *names)
        ExLlamaV3Backend.check(request(folder, 10, (whole,)))


def test_closing(engine: Any, toy_model: Path) -> None:
    backend = loaded(toy_model)
    model = backend.model
    backend.close()
    backend.close()
    assert model.unloaded
    assert not model.config.stc.open
    assert backend.model is None


def test_failed_load_is_one_line_and_leaves_no_memory_limit(
    engine: Any, toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    limits: list[tuple[float, int]] = []
    monkeypatch.setattr(Model, "failure", RuntimeError("Insufficient VRAM\nin split"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: limits.append(given))
    log = tmp_path / "log"
    told = request(toy_model)
    backend = ExLlamaV3Backend(LoadRequest(told.label, told.load_fn, told.model_dir, 100, log_file=log))
    with pytest.raises(ModelError, match=r"exllamav3 could not load .*: Insufficient VRAM in split$"):
        backend.load()
    backend.close()
    assert Model.last.unloaded
    assert limits == [(1.0, 0), (1.0, 1)]
    assert "chatter" in log.read_text()
    assert "chatter" not in capfd.readouterr().out


@pytest.mark.skipif(SOURCE is None, reason="exllamav3 is not installed")
@pytest.mark.parametrize(
    ("file", "stand_in"),
    [
        ("model/model.py", Model), ("model/config.py", Config), ("loader/safetensors.py", SafetensorsCollection),
        ("modules/linear.py", Linear),
    ],
)  # fmt: skip
def test_the_stand_in_has_the_signatures_of_the_source(file: str, stand_in: type) -> None:
    """Every method that the stand-in has takes what the installed one takes, and its attributes are set there."""
    text = (source_folder() / file).read_text(encoding="utf-8")
    (real,) = (
        node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == stand_in.__name__
    )
    methods = {node.name: node for node in real.body if isinstance(node, ast.FunctionDef)}
    for name, method in inspect.getmembers(stand_in, inspect.isfunction):
        if name != "__init__":
            given = methods[name].args
            taken = {
                argument.arg
                for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
                if argument
            }
            assert set(inspect.signature(method).parameters) <= taken, name
    set_there = {node.attr for node in ast.walk(real) if isinstance(node, ast.Attribute)}
    needed = {"Linear": {"inner", "key", "in_features_unpadded", "softcap", "pre_scale", "post_scale"}}
    assert needed.get(real.name, set()) <= set_there


@pytest.mark.skipif(SOURCE is None, reason="exllamav3 is not installed")
def test_what_is_read_of_the_engine_is_in_its_source() -> None:
    for file, *wanted in [
        ("modules/attn.py", 'case "flash_attn_nc":', "self.dispatch_cache = {}"),
        ("modules/attention_fn/dispatch.py", 'hint_key = "fn_qc" if q_cache is not None else "fn"'),
        ("modules/quant/exl3.py", "class LinearEXL3:", "self._fused_reconstruct is None:", "self.K ="),
        ("modules/quant/fp16.py", "class LinearFP16:", "self.weight = weight", "self.bias = bias"),
        ("architecture/llama.py", "self.logit_layer_idx = len(self.modules) - 1"),
    ]:
        text = (source_folder() / file).read_text(encoding="utf-8")
        for words in wanted:
            assert words in text, (file, words)


def source_folder() -> Path:
    assert SOURCE is not None
    assert SOURCE.origin is not None
    return Path(SOURCE.origin).parent


on_a_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and installed_versions(("exllamav3",))),
    reason="no CUDA GPU or exllamav3 not installed",
)


@pytest.fixture(scope="module")
def fitting_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose projections are multiples of 128, as exllamav3 wants them; its head of 320 is padded to 384."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("toy") / "llama-256"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOY_VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.1,
        bos_token_id=256, eos_token_id=256, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    save_toy_tokenizer(folder)
    return folder


ATOL_LOGIT = 0.1
"""Against Transformers in float32, with logits up to 7.6: its own float16 is off by up to 0.025, on a CPU."""


@pytest.mark.engine
@on_a_gpu
@pytest.mark.parametrize("options", [{}, {"device": "cuda:0"}])
def test_logits_of_the_real_engine(fitting_toy: Path, options: dict[str, Any]) -> None:
    peer = TransformersBackend(LoadRequest("toy", "transformers", str(fitting_toy), 300, {"dtype": "float32"}))
    backend = ExLlamaV3Backend(request(fitting_toy, 300, **options))
    peer.load()
    backend.load()
    for length in (20, 300):  # fewer rows than 32 take other kernels
        (window,) = toy_windows(1, length)
        logits, expected = backend.logits(window), peer.logits(window)
        assert tuple(logits.shape) == (length, TOY_VOCAB)
        torch.testing.assert_close(logits.float(), expected.to(logits.device), atol=ATOL_LOGIT, rtol=0.0)
    assert {(each.layer.weights, each.layer.kernel) for each in backend.layers()} == {("float16", "LinearFP16")}
    assert sum(each.count for each in backend.layers()) == 2 * 7 + 1
    assert backend.provenance()["attention"]
    peer.close()
    backend.close()


@pytest.mark.engine
@on_a_gpu
def test_a_later_token_does_not_move_an_earlier_score(fitting_toy: Path) -> None:
    backend = ExLlamaV3Backend(request(fitting_toy, 200))
    backend.load()
    (window,) = toy_windows(1, 200)
    changed = window.token_ids.copy()
    changed[150:] = (changed[150:] + 1) % 256
    first, second = backend.logits(window).clone(), backend.logits(Window(1, changed))
    assert float((first[:150] - second[:150]).abs().max()) < ATOL_LOGIT
    assert float((first[150:] - second[150:]).abs().max()) > 1.0
    backend.close()


@pytest.mark.engine
@on_a_gpu
def test_the_real_engine_as_a_reference_of_itself(fitting_toy: Path, tmp_path: Path) -> None:
    backend = ExLlamaV3Backend(request(fitting_toy, 200))
    backend.load()
    assert kept(backend, tmp_path) == ("states", "")
    task = Task(tmp_path / "store", TOY_VOCAB)
    (scores,) = scoring.token_scores(backend, toy_windows(1, 20), task)
    assert scores.kld is not None
    assert np.abs(scores.kld).max() < 1e-4
    backend.close()
