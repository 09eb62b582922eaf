"""Windows scored one token a step, by the kernels of generation: tokens a second, beside vLLM's own decoding.

    python -m benchmarks.vllm_decode --output results/h200/decode.json

``long_prefill_token_threshold: 1`` makes every step one token of each of 256 windows of 512.  The shape is Llama 3.1
8B's with dummy weights.  Measured in one engine, eager and with CUDA graphs: the steps alone, with perplexity, with KL
divergence, and vLLM's own generation of as many tokens by as many sequences.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.vllm_scoring import LLAMA_8B, VOCAB, opened, seconds, windows_of
from compare_q.backends.common import machine
from compare_q.backends.reference import store as reference
from compare_q.backends.vllm.scorer import Plan

OPTIONS = {"long_prefill_token_threshold": 1, "max_num_seqs": 256, "load_format": "dummy"}


def rates(folder: Path, count: int, length: int, *, eager: bool) -> dict[str, Any]:
    """Tokens a second of every way, in one engine."""
    from vllm import SamplingParams

    engine, windows = opened(folder, **OPTIONS, enforce_eager=eager), windows_of(count, length)
    run = engine.driver
    run.probe(windows)
    store = folder / f"store-{eager}"
    store.mkdir()
    found = {"recording": seconds(lambda: list(run.scored(windows, Plan(record=str(store)))))}
    reference.seal(store, {}, count)
    own = SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False, temperature=0.0)
    prompts: Any = [{"prompt_token_ids": window.token_ids[:1].tolist()} for window in windows]
    plan = Plan(reference=str(store), vocab_size=VOCAB)
    itself: list[float] = []
    found |= {
        "steps alone": seconds(lambda: list(run.requests(windows, {}))),
        "perplexity": seconds(lambda: list(run.scored(windows, Plan()))),
        "divergence": seconds(lambda: itself.extend(float(each.kld.max()) for each in run.scored(windows, plan)
                                                    if each.kld is not None)),
        "vLLM's own decoding": seconds(lambda: engine.llm.generate(prompts, own, use_tqdm=False)),
    }  # fmt: skip
    engine.close()
    speeds = {name: round(count * length / taken) for name, taken in found.items()}
    own_speed = speeds["vLLM's own decoding"]
    return {
        "eager": eager, "tokens_a_second": speeds, "largest_kld_of_the_reference_against_itself": max(itself),
        "ratio_to_vllms_own_decoding": {name: round(speed / own_speed, 3) for name, speed in speeds.items()},
        "scorer": run.pass_report,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=256)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--engines", nargs="+", choices=("eager", "graphs"), default=["eager", "graphs"])
    args = parser.parse_args()
    found: dict[str, Any] = {
        "commit": machine.commit(), "versions": machine.versions(), "hardware": machine.hardware(machine.gpus()),
        "windows": args.windows, "tokens_a_window": args.length, "engines": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "llama-8b"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA_8B))
        for name in args.engines:
            found["engines"].append(rates(folder, args.windows, args.length, eager=name == "eager"))
            print(json.dumps(found["engines"][-1]), flush=True)
            args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
