"""llama.cpp: against Transformers on the same weights, its cache and batches, excluded tokens, its refusals."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from backends.base import LoadRequest, LogitsBackend, Task, Window
from backends.checkpoint import gguf as gguf_file
from backends.common.errors import ModelError
from backends.hf.backend import TransformersBackend
from backends.llamacpp.backend import FLOOR, LlamacppBackend, floor
from backends.reference import store as reference
from backends.scoring import statistics
from demo.__main__ import BASE, ROOT, make_models
from demo.smollm2 import GGUF_TO_HF, find_gguf
from eval.run import scoring
from tests.support.toy import TOY_CONTEXT, TOY_VOCAB, brute_force, refusal, toy_windows

needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)
EXACT = {"type_k": "f32", "type_v": "f32", "flash_attn": False}


def toy_tensors(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The toy model's weights in float32 under GGUF's names; q and k rows interleave the halves of each rotary pair."""
    names = {hf: name for name, hf in GGUF_TO_HF.items()}
    names |= {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight").removeprefix("model.layers.")
        layer, _, kind = module.partition(".")
        weight = tensor.float()
        if kind.endswith(("q_proj", "k_proj")):
            weight = weight.reshape(2, 2, 16, 64).transpose(1, 2).reshape(64, 64)
        key = names.get(module) or f"blk.{layer}.{names[kind]}"
        found[f"{key}.weight"] = weight.numpy()
    return found


@pytest.fixture(scope="session")
def toy_gguf(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy model as a float32 GGUF without a tokenizer."""
    file = tmp_path_factory.mktemp("gguf") / "toy.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(TOY_CONTEXT)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(TOY_VOCAB)
    writer.add_tokenizer_model("none")
    for name, weight in toy_tensors(toy_model).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def request(model: object, log: Path | None = None, tokens: int = 100, **options: Any) -> LoadRequest:
    return LoadRequest("m", "llamacpp", str(model), tokens, options, log_file=log)


def loaded(*arguments: Any, **options: Any) -> LlamacppBackend:
    backend = LlamacppBackend(request(*arguments, **options))
    backend.load()
    return backend


@needs_llama_cpp
def test_float32_model_gives_transformers_logits(toy_model: Path, toy_gguf: Path) -> None:
    """Same weights, no quantization anywhere: what differs is the order of float32 operations."""
    ours = loaded(toy_gguf, **EXACT)
    theirs = TransformersBackend(LoadRequest("t", "transformers", str(toy_model), 100, {"dtype": "float32"}))
    theirs.load()
    for window in toy_windows(2, 100, 3):
        logits = ours.logits(window).cpu()
        torch.testing.assert_close(logits, theirs.logits(window).cpu(), atol=2e-3, rtol=0)
        (scores,) = scoring.token_scores(ours, [window], Task())
        np.testing.assert_allclose(scores.logprob, brute_force(logits, window), atol=1e-5)
    assert (ours.facts(ours.request).vocab_size, ours.facts(ours.request).context) == (TOY_VOCAB, TOY_CONTEXT)
    ours.close()
    theirs.close()


@needs_llama_cpp
def test_scores_do_not_depend_on_the_batches(toy_gguf: Path) -> None:
    """Batches of 7 leave a last one of 2.  Flash attention takes another kernel for few tokens: rounding remains."""
    (window,) = toy_windows(1)

    def run(n_batch: int, n_ubatch: int, **options: Any) -> torch.Tensor:
        backend = loaded(toy_gguf, n_batch=n_batch, n_ubatch=n_ubatch, **options)
        logits = backend.logits(window)
        assert backend.provenance()["n_ubatch"] == min(n_ubatch, 100)
        backend.close()
        return logits

    torch.testing.assert_close(run(7, 7, **EXACT), run(512, 512, **EXACT), atol=1e-3, rtol=0)
    torch.testing.assert_close(run(7, 7), run(100, 7), atol=1e-5, rtol=0)
    assert (run(7, 7) - run(512, 512)).abs().mean() < 0.02


@needs_llama_cpp
def test_every_window_begins_with_an_empty_cache(toy_gguf: Path) -> None:
    first, second = toy_windows(2)
    backend, alone = loaded(toy_gguf, **EXACT), loaded(toy_gguf, **EXACT)
    backend.logits(first)
    assert torch.equal(backend.logits(second), alone.logits(second))
    short = Window(2, second.token_ids[:9])
    torch.testing.assert_close(backend.logits(short), alone.logits(second)[:9], atol=1e-3, rtol=0)


@needs_llama_cpp
def test_what_ran(toy_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    backend = loaded(toy_gguf, log, n_threads=1, type_k="q8_0", flash_attn=True, n_ubatch=32)
    backend.logits(toy_windows(1)[0])
    said = backend.provenance()
    assert {
        "n_threads": 1,
        "type_k": "q8_0",
        "type_v": "f16",
        "flash_attn": True,
        "n_ubatch": 32,
    }.items() <= said.items()
    assert sum(said["devices"].values()) == 3  # two layers and the head
    assert said["logits_set_to_floor"]["entries"] == 0
    assert said["notes"] == []
    layers = {(each.layer.name, each.count, each.layer.weights) for each in backend.layers()}
    assert {("output.weight", 1, "f32"), ("blk.*.ffn_down.weight", 2, "f32")} < layers
    assert len(layers) == 8
    assert isinstance(backend.head(), str)
    backend.close()
    out, err = capfd.readouterr()
    assert out + err == ""
    assert "llama_model_loader" in log.read_text()


@needs_llama_cpp
def test_a_reference_is_kept_exactly(toy_gguf: Path, tmp_path: Path) -> None:
    """Its float32 logits, as ggml's head cannot be computed again; a cache in bf16 diverges a little, as in float64."""
    windows, building, store = toy_windows(2), tmp_path / "building", tmp_path / "store"
    ours, other = loaded(toy_gguf, **EXACT), loaded(toy_gguf, **{**EXACT, "type_k": "bf16"})
    building.mkdir()
    list(scoring.token_scores(ours, windows, Task(record=building)))
    reference.seal(building, store, {}, len(windows))
    assert reference.Reader(store).window(0).dtype == torch.float32
    task = Task(reference=store, vocab_size=TOY_VOCAB)
    assert not any(np.any(scores.kld) for scores in scoring.token_scores(ours, windows, task))
    for window, scores in zip(windows, scoring.token_scores(other, windows, task), strict=True):
        p, q = (backend.logits(window)[:-1].double().log_softmax(-1).cpu() for backend in (ours, other))
        exact = (p.exp() * (p - q)).sum(-1).numpy()
        assert 0 < exact.mean() < 1e-2
        assert scores.kld is not None
        np.testing.assert_allclose(scores.kld, exact, atol=1e-6, rtol=0)


@needs_llama_cpp
def test_flash_attention_that_llama_cpp_chose(toy_gguf: Path) -> None:
    assert loaded(toy_gguf).provenance()["flash_attn"] in (True, False)
    assert loaded(toy_gguf, flash_attn=False).provenance()["flash_attn"] is False
    assert loaded(toy_gguf, type_v="q8_0").provenance()["flash_attn"] is True  # it needs it


@needs_llama_cpp
def test_excluded_tokens_leave_every_score_but_the_divergence(toy_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two entries of 99 scored rows, -inf and -3.4e38; one of them is the target of one row, which is left out."""
    (window,) = toy_windows(1)
    backend = loaded(toy_gguf)
    plain = backend._decode
    target = int(window.token_ids[41])
    rare = next(token for token in range(256, TOY_VOCAB) if token != target)

    def decode(*arguments: Any) -> Any:
        rows = plain(*arguments)
        logits = np.ctypeslib.as_array(rows, (100, TOY_VOCAB))
        logits[:, rare] = -np.inf
        logits[40, target] = -3.4e38
        return rows

    monkeypatch.setattr(backend, "_decode", decode)
    logits = backend.logits(window)
    assert (logits[:99, rare] == FLOOR).all()
    assert logits[40, target] == -math.inf
    (scores,) = scoring.token_scores(backend, [window], Task())
    assert [i for i in range(99) if not math.isfinite(scores.logprob[i])] == [40]
    masked = logits.double().cpu()
    masked[:, rare] = -math.inf
    gold = torch.log_softmax(masked, -1)[torch.arange(99), torch.from_numpy(window.token_ids[1:]).long()]
    np.testing.assert_allclose(np.delete(scores.logprob, 40), np.delete(gold.numpy(), 40), atol=2e-5)
    assert backend.provenance()["logits_set_to_floor"] == {"floor": -65504.0, "entries": 200, "targets_left_out": 2}
    (note,) = backend.provenance()["notes"]
    assert note.startswith("198 logits that llama.cpp excludes count as -65504: KL divergence is finite")


def test_floor_by_hand() -> None:
    """Below it: the floor; the target: -inf; all: -inf; NaN stays, as do logits at the floor."""
    inf, nan = math.inf, math.nan
    logits = torch.tensor([
        [1.0, -inf, FLOOR, 2.0], [-inf, 0.0, 0.0, 0.0], [-inf, -3e38, -inf, -inf], [nan, -inf, 0.0, 0.0],
    ])  # fmt: skip
    assert floor(logits, torch.tensor([0, 0, 1, 2])) == (1 + 1 + 4 + 1, 2)
    expected = [[1.0, FLOOR, FLOOR, 2.0], [-inf, 0.0, 0.0, 0.0], [-inf] * 4, [nan, FLOOR, 0.0, 0.0]]
    torch.testing.assert_close(logits, torch.tensor(expected), equal_nan=True, atol=0, rtol=0)
    assert torch.isfinite(torch.tensor(FLOOR).half())
    scores = statistics.window_scores(0, logits, np.array([0, 0, 1, 2]), torch.zeros(4, 4))
    assert scores.kld is not None
    assert [math.isfinite(value) for value in scores.logprob] == [True, False, False, False]
    assert math.isfinite(scores.kld[0])
    assert not np.isfinite(scores.kld[1:]).any()
    untouched = torch.tensor([[0.0, -1e4]])
    assert floor(untouched, torch.tensor([1])) == (0, 0)


@needs_llama_cpp
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"flash_attn": False, "type_v": "q8_0"}, "quantized V cache requires flash_attn to be enabled"),
        ({}, "unknown model"),
    ],
)
def test_refused_model_is_one_line(toy_gguf: Path, tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    file = toy_gguf
    if not options:
        file = tmp_path / "m.gguf"
        file.write_bytes(toy_gguf.read_bytes().replace(b"llama", b"lambo"))
    backend = LlamacppBackend(request(file, tmp_path / "log", **options))
    with pytest.raises(ModelError, match=f"llama.cpp could not load .*{reason}") as failure:
        backend.load()
    assert "\n" not in str(failure.value)
    backend.close()


@needs_llama_cpp
def test_window_longer_than_asked_for_is_one_line(toy_gguf: Path) -> None:
    """The context is padded to 256 tokens."""
    with pytest.raises(ModelError, match=r"window 0: .* gives no logits"):
        loaded(toy_gguf).logits(toy_windows(1, 300)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_gpu_layer": 1}, "did you mean 'n_gpu_layers'"), ({"type_k": "q4_K"}, "engine.type_k: "),
        ({"n_batch": 0}, "engine.n_batch: "), ({"tensor_split": [0.5] * 17}, "engine.tensor_split: "),
    ],
)  # fmt: skip
def test_bad_options(options: dict[str, Any], message: str) -> None:
    assert message in refusal(LlamacppBackend.check, request(find_gguf(), **options))


def test_path_that_is_nowhere() -> None:
    assert "a hub model is owner/repo/file.gguf" in refusal(LlamacppBackend.check, request("/models/nowhere.gguf"))
    assert "a hub model is owner/repo/file.gguf" in refusal(LlamacppBackend.check, request("owner/repo"))


def test_mistyped_relative_path_is_no_hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = request("demo/models/x.gguf")
    assert LlamacppBackend.is_remote(wanted)
    (tmp_path / "demo").mkdir()
    assert not LlamacppBackend.is_remote(wanted)
    assert "model_dir: demo/models/x.gguf: no such path" in refusal(LlamacppBackend.check, wanted)


def test_a_file_here_is_no_hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = request("owner/repo-GGUF/Q8/m-00002-of-00002.gguf")
    LlamacppBackend.check(wanted)
    assert LlamacppBackend.is_remote(wanted)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "repo").mkdir(parents=True)
    (tmp_path / "owner" / "repo" / "m.gguf").touch()
    local = request("owner/repo/m.gguf")
    assert not LlamacppBackend.is_remote(local)
    assert LlamacppBackend.fetch(local) is local


@pytest.fixture(scope="module")
def opticks() -> list[Window]:
    """The first two windows of 1,024 tokens of the demo's text."""
    make_models()
    text = (ROOT / "demo" / "opticks.txt").read_text(encoding="utf-8")[:20_000]
    ids = np.array(AutoTokenizer.from_pretrained(BASE)(text)["input_ids"], np.int32)
    return [Window(row, ids[row * 1024 : (row + 1) * 1024]) for row in range(2)]


def perplexity(backend: LogitsBackend, windows: list[Window]) -> float:
    backend.load()
    scores = list(scoring.token_scores(backend, windows, Task()))
    backend.close()
    return math.exp(-float(np.concatenate([each.logprob for each in scores]).mean(dtype=np.float64)))


@needs_llama_cpp
@pytest.mark.engine
def test_quantized_model_is_as_good_as_its_dequantized_weights(opticks: list[Window]) -> None:
    """SmolLM2's Q4_1 in llama.cpp, and the same weights unpacked: what is left are activations rounded to 8 bits."""
    ours = LlamacppBackend(request(find_gguf(), tokens=1024))
    theirs = TransformersBackend(LoadRequest("t", "transformers", str(BASE), 1024, {"dtype": "float32"}))
    quantized, plain = perplexity(ours, opticks), perplexity(theirs, opticks)
    assert quantized == pytest.approx(plain, rel=0.005)
    assert quantized != plain
    assert [(each.layer.name, each.count, each.layer.weights) for each in ours.layers()] == [
        ("token_embd.weight", 1, "q8_0"),
        *((f"blk.*.{name}.weight", 30, "q4_1") for name in
          ("ffn_down", "ffn_gate", "ffn_up", "attn_k", "attn_output", "attn_q", "attn_v")),
    ]  # fmt: skip
    assert gguf_file.read_model(find_gguf()).storage() == ours.storage()
