"""Measure the cost and check the correctness of scoring in vLLM's workers; costs are ratios to
prefill alone.

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
from compare_q.backends.vllm.scoring_plan import TAG, ScoringPlan  # noqa: E402
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
ENGINE = {
    "max_num_batched_tokens": 16384,
    "max_num_seqs": 64,
    "gpu_memory_utilization": 0.5,
    "enforce_eager": True,
}


def windows_of(count: int, length: int) -> list[Window]:
    """Windows of random tokens."""
    generator = np.random.default_rng(0)
    return [
        Window.scored_from(i, generator.integers(0, 128000, length, dtype=np.int32))
        for i in range(count)
    ]


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
    engine, windows = opened(folder, load_format="dummy"), windows_of(count, 2048)
    run: VllmDriver = engine.driver
    route = engine.probe.result(windows)
    store = folder / "store"
    store.mkdir()
    recording = seconds(lambda: list(token_scores(run, windows, ScoringPlan(record=str(store)))))
    reference.seal(store, {}, [window.digest for window in windows])
    opened_store = reference.Reader(store)
    scorer: dict[str, Any] = {}
    plan = ScoringPlan(reference=str(store), vocab_size=VOCAB)
    comparing_heads = seconds(
        lambda: run.call("compare_q_begin", vars(plan))
    )  # once for each engine and store
    run.end()

    def scored(plan: ScoringPlan, name: str) -> None:
        list(token_scores(run, windows, plan))
        scorer[name] = run.report

    paths = {
        "prefill": lambda: list(run.run(windows, None)),
        "prompt_logprobs_0": lambda: list(
            run.run(windows, None, prompt_logprobs=0, flat_logprobs=True)
        ),
        "ppl": lambda: scored(ScoringPlan(), "ppl"),
        "kld": lambda: scored(plan, "kld"),
    }
    times: dict[str, list[float]] = {name: [] for name in paths}
    for number in range(rounds + 1):
        for name, path in paths.items():
            taken = seconds(path)
            if number:  # the first round warms up
                times[name].append(taken)
    against_itself = [
        scores.kld for scores in token_scores(run, windows, plan) if scores.kld is not None
    ]
    tokens = sum(len(window.token_ids) for window in windows)
    prefill = times["prefill"]
    digests = {window.index: window.digest for window in windows}
    stored_windows = ReferenceWindows(opened_store, digests, pin=False)
    found = {
        "windows": count,
        "tokens_a_window": 2048,
        "rounds": rounds,
        "engine": ENGINE,
        "seconds": times,
        "tokens_a_second": {
            name: round(tokens / statistics.median(taken)) for name, taken in times.items()
        },
        "ratio_to_prefill": {
            name: round(statistics.median(p / t for p, t in zip(prefill, taken, strict=True)), 4)
            for name, taken in times.items()
        },
        "scorer": scorer,
        "checked_against_prompt_logprobs": vars(route),
        "kld_of_the_reference_against_itself": max(
            float(np.abs(kld).max()) for kld in against_itself
        ),
        "store": {
            "bytes": opened_store.stored_bytes,
            "bytes_a_token_without_head": round(
                sum(
                    size
                    for name, size in opened_store.manifest.files.items()
                    if name.startswith("row")
                )
                / tokens,
                1,
            ),
            "record_seconds": recording,
            "comparing_heads_seconds": comparing_heads,
            "verify_seconds": seconds(opened_store.verify),
            "read_seconds": seconds(
                lambda: [
                    stored_windows.get(StoredRows(i, 2047, 0, 2047)).sum() for i in range(count)
                ]
            ),
            "recompute_seconds": statistics.median(prefill),
        },
    }
    stored_windows.close()
    engine.close()
    return found


def small_models(folder: Path) -> tuple[Path, Path]:
    """A random model whose logits have a standard deviation near 3, and the same with noise in
    every matrix.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    keys = {
        key: value
        for key, value in SMALL.items()
        if key not in ("architectures", "model_type", "dtype")
    }
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(LlamaConfig(**keys, initializer_range=0.03)).bfloat16()
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)
    paths = folder / "small", folder / "noisy"
    model.save_pretrained(paths[0])
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * 0.1 if weight.ndim == 2 else 0)
    model.save_pretrained(paths[1])
    del model
    return paths


def whole_logits(engine: VllmEngine, window: Window, chunk_rows: int, file: Path) -> Any:
    """Logits [L, V] of one window, computed in the chunks that the scorer takes."""
    from safetensors.torch import load_file
    from vllm import SamplingParams

    engine.llm.collective_rpc("compare_q_keep_logits", args=(chunk_rows,))
    params = SamplingParams(
        max_tokens=1, detokenize=False, skip_reading_prefix_cache=True, extra_args={TAG: True}
    )
    engine.llm.generate({"prompt_token_ids": window.token_ids.tolist()}, params, use_tqdm=False)
    engine.llm.collective_rpc("compare_q_save_logits", args=(str(file),))
    return load_file(file)["logits"]


def correctness(folder: Path) -> dict[str, Any]:
    """In-worker scores against vLLM's own, and KL divergence against float64, of one window of
    2,048 tokens.
    """
    import torch

    (window,) = windows_of(1, 2048)
    store = folder / "small.store"
    store.mkdir()
    logits, found = {}, {}
    own: Any = None
    for path in small_models(folder):
        engine = opened(path)
        if path.name == "small":
            list(engine.score([window], ScoreRequest(record=store)))
            reference.seal(store, {}, [window.digest])
        (scores,) = engine.score([window], ScoreRequest(reference=store, vocab_size=VOCAB))
        found[path.name] = scores
        chunk = engine.driver.report["chunk_rows"]
        logits[path.name] = whole_logits(engine, window, chunk, folder / f"{path.name}.safetensors")
        if path.name == "noisy":
            ((_, _, finished),) = engine.driver.run(
                [window], None, prompt_logprobs=0, flat_logprobs=True
            )
            own = own_logprobs(window, finished.prompt_logprobs)
        engine.close()
    p, q = (logits[name][:-1].double().log_softmax(-1) for name in ("small", "noisy"))
    targets = torch.from_numpy(window.token_ids[1:]).long()[:, None]
    noisy, itself = found["noisy"], found["small"]
    assert noisy.kld is not None
    assert itself.kld is not None
    exact = {
        "kld": (p.exp() * (p - q)).sum(-1),
        "logprob": q.gather(1, targets)[:, 0],
        "entropy": -(q.exp() * q).sum(-1),
        "ref_logprob": p.gather(1, targets)[:, 0],
    }
    same_chunks = slice(
        0, len(targets) // chunk * chunk
    )  # the scorer's last chunk has one row less
    return {
        "tokens": len(targets),
        "chunk_rows": chunk,
        "mean_kld": float(exact["kld"].mean()),
        "std_of_logits": float(logits["small"][:64].float().std()),
        "largest_difference_from_float64": {
            name: float(
                np.abs(getattr(noisy, name)[same_chunks] - value.numpy()[same_chunks]).max()
            )
            for name, value in exact.items()
        },
        "largest_difference_from_float64_all_chunks": {
            name: float(np.abs(getattr(noisy, name) - value.numpy()).max())
            for name, value in exact.items()
        },
        "mean_kld_in_worker": float(noisy.kld.astype(np.float64).mean()),
        "same_top_wrong": int(
            (noisy.same_top != (p.argmax(-1) == q.argmax(-1)).numpy())[same_chunks].sum()
        ),
        "top1_wrong": int(
            (noisy.top1 != (q.argmax(-1) == targets[:, 0]).numpy())[same_chunks].sum()
        ),
        "kld_of_the_reference_against_itself": float(np.abs(itself.kld).max()),
        "difference_from_prompt_logprobs": {
            "largest": float(np.abs(noisy.logprob - own).max()),
            "mean": float(np.abs(noisy.logprob - own).mean()),
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
    found: dict[str, Any] = {
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
            found[name] = work()
            print(json.dumps({name: found[name]}, indent=1), flush=True)
            args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
