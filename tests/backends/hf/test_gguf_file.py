"""GGUF files in Transformers: the same logits as the folder's, exchanges, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from compare_q.backends.base import PlannedModel, Trial, Window
from compare_q.backends.checkpoint.gguf import TYPES
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.hf import gguf_file
from compare_q.backends.hf.transformers_engine import TransformersEngine
from tests.support.gguf_toys import FAMILIES, save_gguf
from tests.support.toy import planned, refusal, save_llama, toy_windows
from tests.support.transformers_models import loaded

WINDOWS = toy_windows(2, 40)
KEYS: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4},
    "qwen2": {"num_attention_heads": 4},
    "qwen3": {"num_attention_heads": 4, "head_dim": 128},
}
"""Architecture -> keys of a toy with grouped attention."""
V = "layers.0.self_attn.v_proj"
DOWN = "layers.1.mlp.down_proj"


def logits_of(engine: TransformersEngine, window: Window) -> torch.Tensor:
    """Return the logits of a window in float64."""
    return torch.cat(list(engine.pieces(window))).double()


def plan(file: Path, load_fn: str = "transformers", **options: Any) -> PlannedModel:
    """Return a GGUF file as a model of Transformers."""
    return planned("toy", load_fn, str(file), 100, options)


@pytest.fixture(scope="module")
def q4(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy as GGUF in Q4_0, with embedding and head in Q8_0."""
    types = {"token_embd.weight": "Q8_0", "output.weight": "Q8_0"}
    return save_gguf(toy_model, tmp_path_factory.mktemp("q4") / "q4.gguf", "Q4_0", types=types)


@pytest.fixture
def broken(toy_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Write the toy as a GGUF file with other arguments of ``save_gguf``."""

    def write(**arguments: Any) -> Path:
        return save_gguf(toy_model, tmp_path / "broken.gguf", **arguments)

    return write


@pytest.mark.engine
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_file_of_floats_is_the_folders_model(
    architecture: str, is_tied: bool, tmp_path: Path
) -> None:
    """Biases and norms are random, so that each tensor counts."""
    keys = {"dtype": "float32", "num_key_value_heads": 2, **KEYS[architecture]}
    folder = save_llama(
        tmp_path / "folder", FAMILIES[architecture], tie_word_embeddings=is_tied, **keys
    )
    reference = loaded(folder, dtype="float32")
    with torch.no_grad():
        for parameter in reference.model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    reference.model.save_pretrained(folder)
    file = save_gguf(folder, tmp_path / "toy.gguf", "F32", architecture=architecture)
    gguf_file.check(plan(file))
    engine = loaded(file, dtype="float32")
    for window in WINDOWS:
        assert torch.equal(logits_of(engine, window), logits_of(reference, window))


@pytest.mark.engine
def test_restored_weights_are_the_references(q4: Path, toy_model: Path) -> None:
    """Exchanges give the KLD of plain torch with weights that gguf has dequantized."""
    engine = loaded(q4, dtype="float32")
    reference = loaded(toy_model, dtype="float32")
    modules = {module.name: module for module in engine.exchangeable(reference)}
    assert len(modules) == 2 + 2 * 7
    down = modules[DOWN]
    assert (down.weights, down.n_weights, down.bits) == ("q4_0", 8192, 8192 * 4.5)
    assert down.reference_bits == 8192 * 16
    assert modules["lm_head"].weights == "q8_0"
    trials = [Trial(()), Trial((V,)), Trial((DOWN, "lm_head")), Trial((DOWN,), "reference")]
    scores = list(engine.trials(reference, WINDOWS, trials))
    plain = loaded(toy_model, dtype="float32")
    original = {name: weight.clone() for name, weight in plain.model.state_dict().items()}
    dequantized = dequantized_by_gguf(q4)
    for score in scores:
        trial = trials[score.trial]
        weights = dict(original)
        for name, weight in dequantized.items():
            is_named = name.removesuffix(".weight").removeprefix("model.") in trial.modules
            if is_named == (trial.base == "reference"):
                weights[name] = weight
        plain.model.load_state_dict(weights)
        (window,) = [window for window in WINDOWS if window.index == score.window]
        quantized = logits_of(plain, window).log_softmax(-1)
        plain.model.load_state_dict(original)
        expected = logits_of(plain, window).log_softmax(-1)
        klds = (expected.exp() * (expected - quantized)).sum(-1)
        total = float(klds[window.positions - 1].sum())
        assert score.kld == pytest.approx(total, rel=1e-4, abs=1e-6)
        assert total > 0


def dequantized_by_gguf(file: Path) -> dict[str, torch.Tensor]:
    """Return name in Transformers -> weight; rows of q and k in Transformers' order."""
    weights = {}
    for tensor in gguf.GGUFReader(file).tensors:
        name = gguf_file.name_in_transformers("llama", tensor.name)
        assert name is not None
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weight = torch.from_numpy(np.array(numbers))
        if "q_proj" in name or "k_proj" in name:
            # Two heads of 32 numbers, whose halves are interleaved.
            weight = weight.reshape(2, 16, 2, 64).swapaxes(1, 2).reshape(64, 64)
        weights[name] = weight
    return weights


@pytest.mark.engine
def test_a_tied_head_is_exchanged_alone(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "folder", tie_word_embeddings=True)
    engine = loaded(save_gguf(folder, tmp_path / "toy.gguf", "Q4_0"), dtype="float32")
    reference = loaded(folder, dtype="float32")
    names = [module.name for module in engine.exchangeable(reference)]
    assert {"model.embed_tokens", "lm_head"} <= set(names)
    whole, head, both, everything = engine.trials(
        reference,
        WINDOWS[:1],
        [
            Trial(()),
            Trial(("lm_head",)),
            Trial(("lm_head", "model.embed_tokens")),
            Trial(tuple(names)),
        ],
    )
    assert len({whole.kld, head.kld, both.kld}) == 3
    assert everything.kld == 0.0


@pytest.mark.engine
def test_layers_have_ggmls_types(q4: Path) -> None:
    engine = loaded(q4, "transformers_auto_bf16")
    deque_of_pieces = list(engine.pieces(WINDOWS[0]))
    assert len(deque_of_pieces) == 1
    layers = {(layer.weights, layer.activations, layer.kernel) for layer in engine.layers()}
    assert layers == {
        ("q4_0", "bfloat16", "torch linear (dequantized)"),
        ("q8_0", "bfloat16", "torch linear (dequantized)"),
    }
    assert engine.provenance()["notes"] == [gguf_file.NOTE]


@pytest.mark.engine
def test_other_weights_than_the_files_are_noticed(q4: Path) -> None:
    engine = loaded(q4, dtype="float32")
    checkpoint = engine.checkpoint.headers
    assert isinstance(checkpoint, gguf_file.GgufCheckpoint)
    gguf_file.check_loaded(checkpoint, engine.model)
    weight = engine.model.model.layers[1].self_attn.k_proj.weight
    with torch.no_grad():
        # As if the halves of the heads were still interleaved.
        weight.copy_(weight.reshape(2, 2, 16, 64).swapaxes(1, 2).reshape(64, 64))
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.k_proj.* other weights"):
        gguf_file.check_loaded(checkpoint, engine.model)


@pytest.mark.engine
def test_another_function_than_the_headers_is_noticed(q4: Path) -> None:
    engine = loaded(q4, dtype="float32")
    checkpoint = engine.checkpoint.headers
    assert isinstance(checkpoint, gguf_file.GgufCheckpoint)
    engine.model.config.rope_parameters["rope_theta"] = 5e5
    with pytest.raises(ModelError, match="rope_theta 500,000 for 10,000"):
        gguf_file.check_loaded(checkpoint, engine.model)


def test_what_transformers_ignores_is_refused(broken: Callable[..., Path]) -> None:
    file = broken(fields={"rope.scaling.factor": 4.0})
    assert "llama.rope.scaling.factor, which Transformers ignores" in refusal(
        gguf_file.check, plan(file)
    )
    file = broken(tensors={"blk.0.attn_q.bias": torch.ones(64)})
    assert "blk.0.attn_q.bias, which Transformers ignores" in refusal(gguf_file.check, plan(file))
    file = broken(tensors={"rope_freqs.weight": torch.ones(16)})
    assert "rope_freqs.weight, which Transformers ignores" in refusal(gguf_file.check, plan(file))


def test_unknown_architectures_and_types_are_refused(
    broken: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refusal(gguf_file.check, plan(broken(architecture="gemma3")))
    assert "the architecture gemma3" in message
    assert "name a folder of safetensors" in message
    monkeypatch.setattr(gguf_file, "QUANTIZED", gguf_file.QUANTIZED - {"q8_0"})
    message = refusal(gguf_file.check, plan(broken()))
    assert "Transformers does not dequantize q8_0" in message


def test_other_sizes_of_heads_are_refused(tmp_path: Path) -> None:
    """Transformers gives every Qwen3 heads of 128 numbers."""
    folder = save_llama(tmp_path / "folder", "Qwen3", head_dim=32)
    file = save_gguf(folder, tmp_path / "toy.gguf", architecture="qwen3")
    assert "heads of 32 numbers" in refusal(gguf_file.check, plan(file))


def test_options_that_do_not_fit_are_refused(q4: Path) -> None:
    gguf_file.check(plan(q4))
    assert "engine.streaming" in refusal(gguf_file.check, plan(q4, streaming=True))
    assert "transformers_mm" in refusal(gguf_file.check, plan(q4, "transformers_mm"))


def test_a_shard_is_refused(toy_model: Path, tmp_path: Path) -> None:
    names = ["toy-00001-of-00002.gguf", "toy-00002-of-00002.gguf"]
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    assert "one of 2 shards" in refusal(gguf_file.check, plan(tmp_path / names[0]))


def test_a_folder_with_the_suffix_is_a_folder(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "toy.gguf")
    TransformersEngine.check(plan(folder))
    assert TransformersEngine.files_of(plan(folder)).facts().vocab_size == 320


def test_gguf_dequantizes_the_known_types() -> None:
    sizes = {name: (count, n_bytes) for name, count, n_bytes in TYPES.values()}
    for name in gguf_file.QUANTIZED:
        count, n_bytes = sizes[name]
        ggml_type = gguf.GGMLQuantizationType[name.upper()]
        blocks = np.zeros((1, n_bytes), np.uint8)
        assert gguf.quants.dequantize(blocks, ggml_type).shape == (1, count)


def test_refusals_are_the_users_errors(broken: Callable[..., Path]) -> None:
    with pytest.raises(InputError):
        TransformersEngine.check(plan(broken(architecture="gemma3")))
