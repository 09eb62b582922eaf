"""vllm_score in a real vLLM: scores against brute force, ranks, the probe, refusals, noise."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import compare_q_vllm
from compare_q.backends.base import TokenScores, Window
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.hf.transformers_engine import TransformersEngine
from compare_q.backends.reference import comparison
from compare_q.backends.reference import store as reference
from compare_q.backends.vllm import installed_vllm, vllm_scores
from compare_q.backends.vllm import vllm_engine as vllm_score
from compare_q.backends.vllm.probe import plan_of
from compare_q.backends.vllm.scoring_plan import ScoringPlan
from compare_q.backends.vllm.vllm_engine import VllmEngine
from tests.support.stores import recorded, window_of
from tests.support.toy import (
    ATOL_BATCH,
    ATOL_LOGPROB,
    GPU,
    TOY_CONTEXT,
    TOY_VOCAB,
    brute_force,
    planned,
    toy_windows,
    with_config,
)
from tests.support.vllm_engine import (
    EXACT_TOLERANCE,
    FIELDS,
    WINDOWS,
    against,
    assert_exact,
    engine,
    scores_of,
)
from tests.support.vllm_spy import BY, EDITED

pytestmark = pytest.mark.engine
TWO_DEVICES = pytest.mark.skipif(
    GPU and torch.cuda.device_count() < 2, reason="tensor parallelism needs two GPUs"
)


def own_logits(engine: VllmEngine, window: Window) -> torch.Tensor:
    """The engine's logits [L, V]."""
    return compare_q_vllm.fwd_vllm_score(engine, torch.from_numpy(window.token_ids).long()[None])[0]


def assert_same(
    scores: dict[int, TokenScores], gold: dict[int, TokenScores], atol: float = ATOL_BATCH
) -> None:
    """Assert that every score of every window is the same."""
    assert scores.keys() == gold.keys()
    for index in gold:
        for field in FIELDS:
            values = getattr(scores[index], field)
            gold_values = getattr(gold[index], field)
            assert (values is None) is (gold_values is None)
            if values is not None:
                np.testing.assert_allclose(values, gold_values, atol=atol, rtol=0)


def test_scores_against_float64(toy_engine: VllmEngine, toy_logits: Any) -> None:
    """A second run has bit-identical scores: the scheduler is paused while windows are queued."""
    toy_engine.route = None  # probe it with these windows
    scores = scores_of(toy_engine, WINDOWS)
    assert sorted(scores) == [0, 1, 2, 3, 4, 5]
    for window in WINDOWS:
        assert_exact(scores[window.index], toy_logits(window), window, ATOL_LOGPROB)
    assert_same(scores_of(toy_engine, WINDOWS), scores, atol=0.0)
    provenance = toy_engine.provenance()
    # The provenance goes into results.json.
    json.dumps(provenance)
    assert provenance["dtype"] == "float32"
    assert provenance["enforce_eager"] is True
    assert provenance["max_num_batched_tokens"] == 64
    assert provenance["model_class"] == "LlamaForCausalLM"
    # The probe takes the longest windows.
    longest = sorted(len(window.token_ids) for window in WINDOWS)[-2:]
    assert longest == [100, 150]
    checked = 99 + 149
    if installed_vllm.is_cpu_build():
        # On a CPU the probe takes 64 tokens of each window, the first of which has no prediction.
        checked = 2 * 63
    assert provenance["scorer"]["checked"] == checked
    assert provenance["scorer"]["largest"] < ATOL_BATCH
    assert provenance["scorer"]["gathered"] is False


def test_a_model_is_probed_once(toy_engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate scores in several commands, one for each window of batch 1."""
    scores_of(toy_engine, WINDOWS)
    monkeypatch.setattr(toy_engine.probe, "result", lambda windows: pytest.fail("probed again"))
    scores_of(toy_engine, WINDOWS[:1])


def test_a_warm_model_scores_the_same(
    toy_engine: VllmEngine, toy_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe has run then, and nothing else is different."""
    request = against(toy_store)
    gold = scores_of(toy_engine, WINDOWS, request)
    toy_engine.route = None
    # As on a GPU: the first windows of the reference are read.
    monkeypatch.setattr(toy_engine.driver, "on_cpu", False)
    n_created = 0
    create = comparison.ReferenceWindows.__init__

    def counted(*args: Any, **keys: Any) -> None:
        nonlocal n_created
        n_created += 1
        create(*args, **keys)

    monkeypatch.setattr(comparison.ReferenceWindows, "__init__", counted)
    toy_engine.warm_up(WINDOWS, request)
    monkeypatch.setattr(toy_engine.probe, "result", lambda windows: pytest.fail("probed again"))
    assert_same(scores_of(toy_engine, WINDOWS, request), gold, atol=0.0)
    assert n_created == 1
    with pytest.raises(InputError, match="holds no reference"):
        toy_engine.warm_up(WINDOWS, against(toy_store / "missing"))


def test_repeated_and_shared_beginnings_are_scored_in_full(
    toy_engine: VllmEngine, noisy_engine: VllmEngine
) -> None:
    """vLLM caches prefixes by default; positions of a cached prefix would not be scored."""
    (window,) = toy_windows(1, 200)
    again = [window, replace(window, index=1), Window.scored_from(2, window.token_ids[:120])]
    for backend in (toy_engine, noisy_engine):
        assert backend.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching is True
        scores = scores_of(backend, again)
        assert [len(scores[index].logprob) for index in range(3)] == [199, 199, 119]
        np.testing.assert_allclose(scores[1].logprob, scores[0].logprob, atol=ATOL_BATCH)
        np.testing.assert_allclose(scores[2].logprob, scores[0].logprob[:119], atol=ATOL_BATCH)


def test_preempted_windows_are_scored_all_the_same(
    toy_engine: VllmEngine, noisy_model: Path, noisy_engine: VllmEngine, logs: Path, tmp_path: Path
) -> None:
    """The KV cache has four blocks of 128 tokens; four windows of 200 tokens start.

    Each grows by 40 tokens per step.  When they need a second block, they preempt each other.
    """
    windows = toy_windows(6, 200)
    store = recorded(toy_engine, windows, tmp_path)
    gold = scores_of(noisy_engine, windows, against(store))
    # vLLM never uses one of the blocks, its null block, so that four are left.
    options = {"num_gpu_blocks_override": 5, "block_size": 128, "long_prefill_token_threshold": 40}
    # A step of 160 tokens has 40 of each of four windows.
    with engine(
        noisy_model, logs / "tiny.log", max_num_batched_tokens=160, max_num_seqs=6, **options
    ) as backend:
        scores = scores_of(backend, windows, against(store))
        assert backend.provenance()["scorer"]["recomputed_positions"] > 0
    assert_same(scores, gold)


def test_divergence_against_float64(
    toy_engine: VllmEngine, noisy_engine: VllmEngine, toy_store: Path
) -> None:
    store = reference.Reader(toy_store)
    store.verify()
    assert store.contents == "states"
    assert store.head.vocab_size == TOY_VOCAB
    assert store.head.dtype == "float32"
    scores_by_window = scores_of(noisy_engine, WINDOWS, against(toy_store))
    mean_kld = np.mean([scores.kld.mean() for scores in scores_by_window.values()])
    # Errors of the divergence would not show if the two models were nearly equal.
    assert 0.01 < mean_kld < 10
    assert noisy_engine.provenance()["scorer"]["reference_head"].startswith("a copy, ")
    for window in WINDOWS[-2:]:
        ref = own_logits(toy_engine, window)
        assert_exact(
            scores_by_window[window.index],
            own_logits(noisy_engine, window),
            window,
            EXACT_TOLERANCE,
            ref,
        )


def test_a_model_against_itself_is_zero_and_its_head_is_shared(
    toy_engine: VllmEngine, toy_store: Path
) -> None:
    scores_by_window = scores_of(toy_engine, WINDOWS, against(toy_store))
    assert max(np.abs(scores.kld).max() for scores in scores_by_window.values()) < 1e-6
    assert all(scores.same_top.all() for scores in scores_by_window.values())
    assert toy_engine.provenance()["scorer"]["reference_head"] == "the model's own, bit for bit"
    for scores in scores_by_window.values():
        np.testing.assert_allclose(scores.ref_logprob, scores.logprob, atol=ATOL_BATCH)


def test_a_reference_from_transformers_gives_the_same(
    toy_model: Path, noisy_engine: VllmEngine, toy_store: Path, tmp_path: Path
) -> None:
    backend = TransformersEngine(
        planned("hf", "transformers", str(toy_model), 200, {"dtype": "float32"})
    )
    backend.load()
    store = recorded(backend, WINDOWS, tmp_path)
    backend.close()
    scores = scores_of(noisy_engine, WINDOWS, against(store))
    assert_same(scores, scores_of(noisy_engine, WINDOWS, against(toy_store)), ATOL_LOGPROB)


def test_a_target_outside_the_shared_vocabulary_is_refused_as_by_engines_of_logits(
    toy_model: Path, toy_engine: VllmEngine, toy_store: Path
) -> None:
    window = WINDOWS[0]
    largest = int(window.targets.max())
    other = TransformersEngine(
        planned("hf", "transformers", str(toy_model), 200, {"dtype": "float32"})
    )
    other.load()
    for backend in (toy_engine, other):
        with pytest.raises(
            ModelError, match=rf"^window 0: token {largest} is outside the {largest} logits$"
        ):
            list(backend.score([window], against(toy_store, vocab_size=largest)))
        assert len(list(backend.score([window], against(toy_store, vocab_size=largest + 1)))) == 1
    other.close()


def test_an_error_in_the_worker_names_the_file_and_leaves_the_engine_alive(
    toy_engine: VllmEngine, toy_store: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(toy_store, broken)
    digest = WINDOWS[3].digest
    window_of(broken, digest).unlink()
    with pytest.raises(ModelError, match=rf"scoring failed in vLLM's worker: .*row\.{digest}"):
        scores_of(toy_engine, WINDOWS, against(broken))
    assert len(scores_of(toy_engine, WINDOWS)) == len(WINDOWS)


def test_an_interrupted_run_leaves_no_threads(
    toy_engine: VllmEngine, toy_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that stops, a damaged store, and statistics that fail.

    Each run reads ahead and writes in threads.
    """
    (tmp_path / "record").mkdir()
    request = against(toy_store).model_copy(
        update={"record": tmp_path / "record", "record_key": "k"}
    )
    gold = scores_of(toy_engine, WINDOWS, against(toy_store))
    broken = tmp_path / "broken"
    shutil.copytree(toy_store, broken)
    window_of(broken, WINDOWS[3].digest).unlink()
    before = threading.active_count()
    stopped = toy_engine.score(WINDOWS, request)
    next(stopped)
    stopped.close()  # type: ignore[attr-defined]
    assert threading.active_count() <= before
    with pytest.raises(ModelError) as damaged:
        scores_of(toy_engine, WINDOWS, against(broken))
    assert threading.active_count() <= before
    plan = plan_of(request, toy_engine.probe.result(WINDOWS), 1)
    with monkeypatch.context() as patch:
        patch.setattr("compare_q.backends.scoring.token_statistics.scores", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError) as failed:
            list(vllm_scores.token_scores(toy_engine.driver, WINDOWS, plan))
    # Both exceptions are still held here, with their frames.
    assert threading.active_count() <= before, (damaged, failed)
    assert_same(scores_of(toy_engine, WINDOWS, against(toy_store)), gold, atol=0.0)


def test_soft_cap_is_part_of_the_head(tmp_path: Path, logs: Path) -> None:
    """Gemma 2 caps its logits in the LogitsProcessor and ties its head."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=TOY_VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=TOY_CONTEXT,
        query_pre_attn_scalar=32,
        final_logit_softcapping=3.0,
        sliding_window=64,
        initializer_range=0.3,
        dtype="bfloat16",
    )
    Gemma2ForCausalLM(config).bfloat16().save_pretrained(tmp_path / "gemma")
    with engine(tmp_path / "gemma", logs / "gemma.log") as backend:
        store = reference.Reader(recorded(backend, WINDOWS, tmp_path))
        assert (store.contents, store.head.soft_cap) == ("states", 3.0)
        scores = scores_of(backend, WINDOWS, against(store.path))
        window = WINDOWS[-1]
        logits = own_logits(backend, window)
        # Logits far below the cap would be the same without it.
        assert 2.0 < float(logits.abs().max()) <= 3.0
        assert_exact(scores[window.index], logits, window, EXACT_TOLERANCE, logits)


@pytest.fixture(scope="module")
def two_ranks(noisy_model: Path, logs: Path) -> Iterator[VllmEngine]:
    """The toy with noise on two ranks, whose gathers of logits are counted."""
    with ExitStack() as stack:
        # Only for its load: other engines run in this process, with the usual extension.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vllm_score, "EXTENSION", "tests.support.vllm_spy.SpyExtension")
            ranks = engine(noisy_model, logs / "tp.log", tensor_parallel_size=2)
            backend = stack.enter_context(ranks)
        yield backend


@TWO_DEVICES
def test_two_ranks_equal_one_and_gather_nothing(
    toy_engine: VllmEngine,
    noisy_engine: VllmEngine,
    two_ranks: VllmEngine,
    toy_store: Path,
    tmp_path: Path,
) -> None:
    """Scores and the store of a TP=2 run.

    Only one row per request is gathered, for vLLM's own token.
    """
    gold = scores_of(noisy_engine, WINDOWS, against(toy_store))
    scores_by_window = scores_of(two_ranks, WINDOWS, against(toy_store))
    assert_same(scores_by_window, gold, 10 * ATOL_BATCH)
    for window in WINDOWS[-2:]:
        ref = own_logits(toy_engine, window)
        logits = own_logits(two_ranks, window)
        assert_exact(scores_by_window[window.index], logits, window, EXACT_TOLERANCE, ref)
    plan = ScoringPlan(reference=str(toy_store), vocab_size=TOY_VOCAB)
    two_ranks.llm.collective_rpc("compare_q_spied")
    list(vllm_scores.token_scores(two_ranks.driver, WINDOWS, plan))
    for spied in map(json.loads, two_ranks.llm.collective_rpc("compare_q_spied")):
        assert spied["inside"] == 0
        assert 0 < spied["all"] <= len(WINDOWS)
    assert two_ranks.provenance()["scorer"]["gathered"] is False
    store = reference.Reader(recorded(two_ranks, WINDOWS, tmp_path))
    # Each rank writes its half of the 320 entries.
    assert list(store.manifest.heads) == [0, 160]
    scores_by_window = scores_of(noisy_engine, WINDOWS, against(store.path))
    assert max(np.abs(scores.kld).max() for scores in scores_by_window.values()) < 1e-5
    assert noisy_engine.provenance()["scorer"]["reference_head"] == "the model's own, bit for bit"


@TWO_DEVICES
def test_logits_that_are_edited_after_the_gather_are_gathered(
    noisy_engine: VllmEngine, two_ranks: VllmEngine, tmp_path: Path
) -> None:
    """The head alone does not compute the served logits: a reference keeps logits instead.

    It returns them exactly.  From now on, the two ranks edit their logits.
    """
    two_ranks.llm.collective_rpc("compare_q_edit")
    two_ranks.route = None  # probe it again
    edited = scores_of(two_ranks, WINDOWS)
    assert two_ranks.provenance()["scorer"]["gathered"] is True
    for window in WINDOWS[-2:]:
        logits = own_logits(noisy_engine, window)
        logits[:, EDITED] += BY
        assert_exact(edited[window.index], logits, window, ATOL_LOGPROB)
    store = reference.Reader(recorded(two_ranks, WINDOWS, tmp_path))
    assert (store.contents, store.reason) == ("logits", "its logits are not its head's alone")
    itself = scores_of(two_ranks, WINDOWS, against(store.path))
    assert not any(scores.kld.any() for scores in itself.values())


@pytest.mark.parametrize("shift", ["by one token", "by half a nat"])
def test_scores_that_are_not_vllms_own_stop_the_run(
    toy_engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, shift: str
) -> None:
    own_logprobs = vllm_scores.own_logprobs

    def shifted(*args: Any) -> Any:
        if shift == "by one token":
            return np.roll(own_logprobs(*args), 1)
        return own_logprobs(*args) - 0.5

    monkeypatch.setattr(vllm_scores, "own_logprobs", shifted)
    monkeypatch.setattr(toy_engine, "route", None)  # probe it again
    with pytest.raises(
        ModelError, match=r"scores differ from vLLM's own prompt_logprobs by .* \(rounding explains"
    ):
        scores_of(toy_engine, WINDOWS)


def test_a_text_that_repeats_one_word_is_scored(
    toy_model: Path, logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's embeddings of the word's tokens are equal, so that its logits repeat."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(toy_model, tmp_path / "alike")
    tensors = load_file(tmp_path / "alike" / "model.safetensors")
    for name, tensor in tensors.items():
        if "embed_tokens" in name:
            tensor[:] = tensor[7].clone()
        if "o_proj" in name:
            # Attention's output would differ in the last bits.
            tensor.zero_()
    save_file(tensors, tmp_path / "alike" / "model.safetensors", {"format": "pt"})
    word = Window.scored_from(0, np.tile(np.array([5, 6, 7], np.int32), 30))
    other = Window.scored_from(1, np.arange(60, dtype=np.int32))
    doubted: list[int] = []
    check = vllm_scores.check_repetition

    def noted(*args: Any, **keys: Any) -> None:
        doubted.append(args[1].index)
        check(*args, **keys)

    monkeypatch.setattr(vllm_scores, "check_repetition", noted)
    with engine(tmp_path / "alike", logs / "alike.log", 100) as backend:
        scores = scores_of(backend, [word, other])
        assert {0, 1} <= set(doubted)
        assert sorted(scores) == [0, 1]
        logits = own_logits(backend, word)
        assert_exact(scores[0], logits, word, EXACT_TOLERANCE)


def test_an_architecture_is_inspected_in_this_process(toy_engine: VllmEngine) -> None:
    """vLLM starts no other Python; an unknown architecture changes nothing."""
    from vllm import ModelRegistry

    assert type(ModelRegistry.models["LlamaForCausalLM"]).__name__ == "_RegisteredModel"
    vllm_score.register_architectures({"architectures": ["NoSuchModel"]}, {})
    vllm_score.register_architectures({}, {"hf_overrides": {"architectures": ["Qwen2ForCausalLM"]}})
    assert "NoSuchModel" not in ModelRegistry.models
    assert type(ModelRegistry.models["Qwen2ForCausalLM"]).__name__ == "_RegisteredModel"


Spoil = Callable[[torch.Tensor], torch.Tensor]


def spoil(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, changed: Spoil, *, always: bool = False
) -> None:
    """Make vLLM's model runner change states.

    In steps without a request for ``prompt_logprobs``, or ``always``.
    """
    (runner,) = engine.llm.collective_rpc(lambda worker: worker.model_runner)
    step = runner._get_prompt_logprobs_dict

    def spoiled(states: torch.Tensor, *arguments: Any) -> Any:
        if always or not runner.num_prompt_logprobs:
            states = changed(states)
        return step(states, *arguments)

    monkeypatch.setattr(runner, "_get_prompt_logprobs_dict", spoiled)


def trimmed(states: torch.Tensor) -> torch.Tensor:
    """Set all but the last 40 rows to zero.

    DeepSeek-V4.1's last layers do so for tokens before their window.
    """
    # The toy's steps have 64 tokens, so that some rows of each full step are lost.
    return torch.cat([torch.zeros_like(states[:-40]), states[-40:]])


NO_STATES = r"window \d: vLLM computed no hidden states for \d+ of its positions"
in_this_process = pytest.mark.skipif(GPU, reason="on a GPU the model runner is in another process")


@in_this_process
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (trimmed, NO_STATES),
        (
            lambda states: states.roll(1, 0),
            "requests without prompt_logprobs score otherwise in vLLM, by .* nats",
        ),
        (
            lambda states: states[:1].expand_as(states),
            "window 0: vLLM's logits are the same at 8 different tokens",
        ),
    ],
)
def test_the_probe_runs_what_scoring_runs(
    toy_engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, changed: Spoil, message: str
) -> None:
    spoil(toy_engine, monkeypatch, changed)
    monkeypatch.setattr(toy_engine, "route", None)  # probe it again
    with pytest.raises(ModelError, match=message):
        scores_of(toy_engine, toy_windows(2, 100))


@in_this_process
def test_windows_without_states_are_never_scored(
    toy_engine: VllmEngine, toy_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a reference whose states are also zero, such windows would have a KLD of 0."""
    monkeypatch.setattr(toy_engine, "route", toy_engine.probe.result(WINDOWS))
    spoil(toy_engine, monkeypatch, trimmed)
    with pytest.raises(ModelError, match=NO_STATES):
        next(iter(toy_engine.score(WINDOWS, against(toy_store))))


@in_this_process
def test_kernels_that_add_in_another_order_every_time(
    toy_engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe measures how much scores differ between runs, and allows this difference."""
    generator = torch.Generator().manual_seed(0)

    def shaken(states: torch.Tensor) -> torch.Tensor:
        return states * (1 + 0.01 * torch.randn(states.shape, generator=generator))

    spoil(toy_engine, monkeypatch, shaken, always=True)
    assert toy_engine.probe.result(toy_windows(2, 100)).states


def test_refused_checkpoint_gives_the_reason(toy_model: Path, tmp_path: Path) -> None:
    """The config states another size than the file has: one line reports it."""
    broken = with_config(toy_model, tmp_path / "broken", intermediate_size=160)
    reason = pytest.raises(ModelError, match=r"vLLM refused .*broken: .*exceeds dimension size")
    with reason as failure, engine(broken, tmp_path / "log"):
        pass
    assert "root cause" not in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.skipif(GPU, reason="TF32 products hide noise of this size")
def test_noise_is_that_of_transformers(
    toy_model: Path, toy_engine: VllmEngine, floor_engine: VllmEngine
) -> None:
    """A layer's noise is the same for the same elements, in any engine, steps and order."""
    from compare_q.backends.hf.transformers_engine import TransformersEngine

    windows = toy_windows(3, 100)
    options = {"dtype": "float32", "noise": "bf16", "noise_seed": 3}
    backend = TransformersEngine(planned("hf", "transformers", str(toy_model), 100, options))
    backend.load()
    gold = {}
    for window in reversed(windows):
        gold[window.index] = np.array(brute_force(backend.logits(window), window))
    noisy = scores_of(floor_engine, windows)
    plain = scores_of(toy_engine, windows)
    for index in gold:
        np.testing.assert_allclose(noisy[index].logprob, gold[index], atol=ATOL_LOGPROB, rtol=0)
        # Equal scores would prove nothing if the noise were as small as the tolerance.
        assert np.abs(plain[index].logprob - gold[index]).mean() > 20 * ATOL_LOGPROB


@pytest.mark.engine
@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"sym": True, "desc_act": False}, ""),
        ({"sym": False, "desc_act": False}, "sym=False"),
        ({"sym": True, "desc_act": True}, "desc_act=True"),
        ({"quant_method": "nonsense"}, "nonsense"),
    ],
)
def test_what_vllm_refuses_by_its_config(
    toy_model: Path, tmp_path: Path, quantization: dict[str, Any], reason: str
) -> None:
    """The refusal is one line with vLLM's reason, without pydantic's text; no weights are read.

    The window is as long as the context.
    """
    config = json.loads((toy_model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        **quantization,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    refusal = VllmEngine.refusal(
        planned("toy", "vllm_score", str(tmp_path), config["max_position_embeddings"])
    )
    assert reason in refusal
    assert bool(refusal) == bool(reason)
    assert len(refusal.splitlines()) <= 1
    assert not any(word in refusal for word in ("input_value", "validation error", "Value error"))
