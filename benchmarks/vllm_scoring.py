"""Measure the cost and check the correctness of scoring in vLLM's workers.

Costs are ratios to prefill alone:

    python benchmarks/vllm_scoring.py --output scoring.json

The shape is Llama 3.1 8B's with dummy weights, 64 windows of 2,048 random tokens.  Each round runs
every path once, so that a drift of the clock moves all of them; ratios are medians over rounds.
Correctness is checked on two small models with the same vocabulary of 128,256: in-worker scores
against ``prompt_logprobs=0``, and KL divergence against float64 from whole logits that the same
engine returns.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from compare_q.backends.base import PlannedModel, ScoreRequest, Window  # noqa: E402
from compare_q.backends.common import machine  # noqa: E402
from compare_q.backends.reference import store as reference  # noqa: E402
from compare_q.backends.reference.comparison import ReferenceWindows, StoredRows  # noqa: E402
from compare_q.backends.vllm.driver import VllmDriver  # noqa: E402
from compare_q.backends.vllm.scoring_plan import EXTRA_ARGS_KEY, ScoringPlan  # noqa: E402
from compare_q.backends.vllm.vllm_engine import VllmEngine  # noqa: E402
from compare_q.backends.vllm.vllm_scores import own_logprobs, token_scores  # noqa: E402

VOCAB = 128_256
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 128,
}
SMALL = {
    **LLAMA_8B,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 2816,
}
# Eager: compiled, prefill gains at most 0.8 %, and a load takes 33 to 46 s longer.
ENGINE = {
    "max_num_batched_tokens": 16384,
    "max_num_seqs": 64,
    "gpu_memory_utilization": 0.5,
    "enforce_eager": True,
}


def windows_of(count: int, length: int) -> list[Window]:
    """Windows of random tokens."""
    generator = np.random.default_rng(0)
    windows = []
    for index in range(count):
        # Llama 3's special tokens have the ids from 128,000.
        token_ids = generator.integers(0, 128000, length, dtype=np.int32)
        windows.append(Window.scored_from(index, token_ids))
    return windows


def opened(folder: Path, **options: Any) -> VllmEngine:
    """A loaded engine; its log is written next to the model."""
    model = PlannedModel(
        label=folder.name,
        engine="vllm_score",
        load_fn="vllm_score",
        model_dir=str(folder),
        max_tokens=2048,
        options={**ENGINE, **options},
        log_file=folder.with_suffix(".log"),
    )
    engine = VllmEngine(model)
    engine.load()
    return engine


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of a call that waits for its results."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def throughput(folder: Path, count: int, rounds: int) -> dict[str, Any]:
    """Prefill, prompt_logprobs=0, perplexity, recording and KLD, in one engine."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    engine = opened(folder, load_format="dummy")
    windows = windows_of(count, 2048)
    driver = engine.driver
    route = engine.probe.result(windows)
    store = folder / "store"
    store.mkdir()
    recording = ScoringPlan(record=str(store))
    record_seconds = seconds(lambda: list(token_scores(driver, windows, recording)))
    reference.seal(store, {}, [window.digest for window in windows])
    opened_store = reference.Reader(store)
    plan = ScoringPlan(reference=str(store), vocab_size=VOCAB)
    # The heads are compared once for each engine and store, when the first run begins.
    comparing_heads = seconds(lambda: driver.call("compare_q_begin", vars(plan)))
    driver.end()
    times, reports = seconds_of_paths(driver, windows, plan, rounds)
    largest_klds = []
    for scores in token_scores(driver, windows, plan):
        if scores.kld is not None:
            largest_klds.append(float(np.abs(scores.kld).max()))
    tokens = sum(len(window.token_ids) for window in windows)
    row_bytes = 0
    for name, size in opened_store.manifest.files.items():
        if name.startswith("row"):
            row_bytes += size
    result = {
        "windows": count,
        "tokens_a_window": 2048,
        "rounds": rounds,
        "engine": ENGINE,
        "seconds": times,
        "tokens_a_second": {
            name: round(tokens / statistics.median(values)) for name, values in times.items()
        },
        "ratio_to_prefill": {
            name: ratio_to_prefill(times["prefill"], values) for name, values in times.items()
        },
        "scorer": reports,
        "checked_against_prompt_logprobs": vars(route),
        "kld_of_the_reference_against_itself": max(largest_klds),
        "store": {
            "bytes": opened_store.stored_bytes,
            "bytes_a_token_without_head": round(row_bytes / tokens, 1),
            "record_seconds": record_seconds,
            "comparing_heads_seconds": comparing_heads,
            "verify_seconds": seconds(opened_store.verify),
            "read_seconds": read_seconds(opened_store, windows),
            "recompute_seconds": statistics.median(times["prefill"]),
        },
    }
    engine.close()
    return result


def seconds_of_paths(
    driver: VllmDriver, windows: list[Window], plan: ScoringPlan, rounds: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return path -> its seconds in each round, and path -> report of its last scoring run."""
    reports: dict[str, Any] = {}

    def score(plan: ScoringPlan, name: str) -> None:
        list(token_scores(driver, windows, plan))
        reports[name] = driver.report

    # As a list of dicts instead of flat, they cost the driver about twice as much per token.
    own_scores = {"prompt_logprobs": 0, "flat_logprobs": True}
    paths = {
        "prefill": lambda: list(driver.run(windows, None)),
        "prompt_logprobs_0": lambda: list(driver.run(windows, None, **own_scores)),
        "ppl": lambda: score(ScoringPlan(), "ppl"),
        "kld": lambda: score(plan, "kld"),
    }
    times: dict[str, list[float]] = {name: [] for name in paths}
    for number in range(rounds + 1):
        for name, path in paths.items():
            duration = seconds(path)
            # The first round warms up.
            if number > 0:
                times[name].append(duration)
    return times, reports


def ratio_to_prefill(prefill: list[float], values: list[float]) -> float:
    """Return the median over rounds of how fast a path is, relative to prefill."""
    ratios = [base / value for base, value in zip(prefill, values, strict=True)]
    return round(statistics.median(ratios), 4)


def read_seconds(store: reference.Reader, windows: list[Window]) -> float:
    """Return the time that reading all windows of a store takes."""
    digests = {window.index: window.digest for window in windows}
    stored_windows = ReferenceWindows(store, digests, pin=False)

    def read() -> None:
        for window in windows:
            stored_windows.get(StoredRows(window.index, 2047, 0, 2047)).sum()

    duration = seconds(read)
    stored_windows.close()
    return duration


def small_models(folder: Path) -> tuple[Path, Path]:
    """Save two random models; return their folders.

    The logits of the first have a standard deviation near 3; the second has noise in every matrix.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    keys = dict(SMALL)
    for key in ("architectures", "model_type", "dtype"):
        del keys[key]
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**keys, initializer_range=0.03)).bfloat16()
    with torch.no_grad():
        # States have a root mean square of 1, so logits get 3 * 0.03 * sqrt(1024), about 2.9.
        model.lm_head.weight.mul_(3.0)
    model.save_pretrained(folder / "small")
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            if weight.ndim == 2:
                weight.add_(torch.randn_like(weight) * weight.std() * 0.1)
    model.save_pretrained(folder / "noisy")
    del model
    return folder / "small", folder / "noisy"


def whole_logits(engine: VllmEngine, window: Window, chunk_rows: int, file: Path) -> Any:
    """Logits [L, V] of one window, computed in the chunks that the scorer takes."""
    from safetensors.torch import load_file
    from vllm import SamplingParams

    engine.llm.collective_rpc("compare_q_keep_logits", args=(chunk_rows,))
    params = SamplingParams(
        max_tokens=1,
        detokenize=False,
        # Rows of a cached prefix are not computed, so they would have no logits.
        skip_reading_prefix_cache=True,
        extra_args={EXTRA_ARGS_KEY: True},
    )
    engine.llm.generate({"prompt_token_ids": window.token_ids.tolist()}, params, use_tqdm=False)
    engine.llm.collective_rpc("compare_q_save_logits", args=(str(file),))
    return load_file(file)["logits"]


def correctness(folder: Path) -> dict[str, Any]:
    """In-worker scores of one window of 2,048 tokens, compared with vLLM's own and with float64."""
    import torch

    (window,) = windows_of(1, 2048)
    store = folder / "small.store"
    store.mkdir()
    logits: dict[str, Any] = {}
    scores_of: dict[str, Any] = {}
    vllm_logprobs: Any = None
    # "small" comes first: its store is the reference of both.
    for path in small_models(folder):
        engine = opened(path)
        if path.name == "small":
            list(engine.score([window], ScoreRequest(record=store)))
            reference.seal(store, {}, [window.digest])
        (scores,) = engine.score([window], ScoreRequest(reference=store, vocab_size=VOCAB))
        scores_of[path.name] = scores
        chunk = engine.driver.report["chunk_rows"]
        logits[path.name] = whole_logits(engine, window, chunk, folder / f"{path.name}.safetensors")
        if path.name == "noisy":
            ((_, _, output),) = engine.driver.run(
                [window], None, prompt_logprobs=0, flat_logprobs=True
            )
            vllm_logprobs = own_logprobs(window, output.prompt_logprobs)
        engine.close()
    # The last row predicts a token after the window.
    p = logits["small"][:-1].double().log_softmax(-1)
    q = logits["noisy"][:-1].double().log_softmax(-1)
    targets = torch.from_numpy(window.token_ids[1:]).long()[:, None]
    noisy = scores_of["noisy"]
    itself = scores_of["small"]
    exact = {
        "kld": (p.exp() * (p - q)).sum(-1),
        "logprob": q.gather(1, targets)[:, 0],
        "entropy": -(q.exp() * q).sum(-1),
        "ref_logprob": p.gather(1, targets)[:, 0],
    }
    differences = {}
    for name, values in exact.items():
        differences[name] = np.abs(getattr(noisy, name) - values.numpy())
    top_is_wrong = noisy.same_top != (p.argmax(-1) == q.argmax(-1)).numpy()
    top1_is_wrong = noisy.top1 != (q.argmax(-1) == targets[:, 0]).numpy()
    # The scorer's last chunk has one row less, so that its products may be others.
    same_chunks = slice(0, len(targets) // chunk * chunk)
    difference_from_vllm = np.abs(noisy.logprob - vllm_logprobs)
    return {
        "tokens": len(targets),
        "chunk_rows": chunk,
        "mean_kld": float(exact["kld"].mean()),
        "std_of_logits": float(logits["small"][:64].float().std()),
        "largest_difference_from_float64": {
            name: float(values[same_chunks].max()) for name, values in differences.items()
        },
        "largest_difference_from_float64_all_chunks": {
            name: float(values.max()) for name, values in differences.items()
        },
        "mean_kld_in_worker": float(noisy.kld.astype(np.float64).mean()),
        "same_top_wrong": int(top_is_wrong[same_chunks].sum()),
        "top1_wrong": int(top1_is_wrong[same_chunks].sum()),
        "kld_of_the_reference_against_itself": float(np.abs(itself.kld).max()),
        "difference_from_prompt_logprobs": {
            "largest": float(difference_from_vllm.max()),
            "mean": float(difference_from_vllm.mean()),
        },
    }


def main() -> None:
    """Run both, print and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    hardware = machine.hardware(machine.gpus())
    results: dict[str, Any] = {
        "commit": machine.commit(),
        "versions": machine.versions(),
        "hardware": hardware,
    }
    try:
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "correctness": lambda: correctness(folder),
            "throughput": lambda: throughput(folder / "llama-8b", args.windows, args.rounds),
        }
        for name, work in parts.items():
            results[name] = work()
            print(json.dumps({name: results[name]}, indent=1), flush=True)
            args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
