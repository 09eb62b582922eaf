"""Score models in vLLM, for an exllamav3 checkout from before July 2026 or from the command line.

As a drop-in: put this file (a link, or a copy if compare_q is installed with ``pip install -e``)
next to exllamav3's ``eval/compare_q.py``, import ``load_vllm_score`` and ``fwd_vllm_score`` there,
and register both as ``"vllm_score"``.  ``fwd_vllm_score`` returns full logits [1, L, V] because
exllamav3's compare_q needs them; the driver of this repository never returns logits of vLLM.

As a script, the file prints the perplexity of one model from every position of every window,
without a limit on the number of windows:

    python compare_q_vllm.py --model DIR --dataset wiki2 --context-length 2048
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent
if (ROOT / "compare_q").is_dir() and str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

try:
    from compare_q.backends import hub
    from compare_q.backends.base import PlannedModel
    from compare_q.backends.checkpoint.checkpoint_config import CheckpointConfig
    from compare_q.backends.common.errors import CompareQError, InputError, ModelError
    from compare_q.backends.common.process import captured
    from compare_q.backends.vllm.scoring_plan import EXTRA_ARGS_KEY
    from compare_q.backends.vllm.vllm_engine import VllmEngine
except ModuleNotFoundError as missing:
    sys.exit(
        f"compare_q_vllm.py: {missing}; link the file to its compare_q checkout, or: "
        "pip install -e COMPARE_Q"
    )

if TYPE_CHECKING:
    import torch


def load_vllm_score(
    model_dir: str | list[Any], size: int = 2048 + 512
) -> tuple[VllmEngine, Any, Any, Any]:
    """Load a model for windows of at most ``size`` tokens: upstream's compare_q's ``load_fn``.

    Returns (model, bits per weight of the layers, of the head, bits of both together).
    ``model_dir`` is a folder, a hub id, or ``[folder or hub id, options of LLM()]``.  Raises
    CompareQError with the reason, also if the stored size is unknown: upstream's table cannot show
    "unknown".
    """
    options: dict[str, Any] = {}
    if isinstance(model_dir, list):
        name, options = model_dir
    else:
        name = model_dir
    if options.get("noise") is not None:
        raise InputError("engine.noise: not supported for these logits; leave it out")
    folder = hub.resolve(name, None)
    context = CheckpointConfig.read(folder).context
    request = PlannedModel(
        label=folder.name,
        engine="vllm_score",
        load_fn="vllm_score",
        model_dir=str(folder),
        max_tokens=min(size, context or size),
        options=options,
    )
    VllmEngine.check(request)
    loaded = VllmEngine(request)
    storage = loaded.files(request).storage()
    if storage.vram_bits is None:
        raise ModelError(f"{folder}: stored size unknown: {storage.note}")
    loaded.planned = request.updated(log_file=new_log())
    loaded.load()
    return loaded, storage.bpw_layer, storage.bpw_head, storage.vram_bits


def new_log() -> Path:
    """Create an empty log that only this user can read, under a new name.

    It is deleted when the program ends.
    """
    descriptor, name = tempfile.mkstemp(prefix="compare_q_vllm.", suffix=".log")
    os.close(descriptor)
    log = Path(name)
    atexit.register(log.unlink, missing_ok=True)
    return log


def fwd_vllm_score(
    model: VllmEngine, input_ids: torch.Tensor, chunk_rows: int = 1024
) -> torch.Tensor:
    """Return the logits [1, L, V] of ``input_ids`` [1, L]: upstream's compare_q's ``fwd_fn``.

    They are on the CPU, in the model's dtype.  The head's product runs over ``chunk_rows``
    positions at a time.  ModelError for another shape, or if vLLM leaves out positions.
    """
    from safetensors.torch import load_file
    from vllm import SamplingParams

    if input_ids.ndim != 2 or input_ids.shape[0] != 1:
        raise ModelError(f"fwd_vllm_score: input_ids must be [1, L], not {tuple(input_ids.shape)}")
    # Each position must be computed, even if a window has the same beginning as an earlier window.
    params = SamplingParams(
        max_tokens=1,
        detokenize=False,
        skip_reading_prefix_cache=True,
        extra_args={EXTRA_ARGS_KEY: True},
    )
    with tempfile.TemporaryDirectory() as folder, captured(model.planned.log_file):
        file = str(Path(folder) / "logits.safetensors")
        model.llm.collective_rpc("compare_q_keep_logits", args=(chunk_rows,))
        model.llm.generate({"prompt_token_ids": input_ids[0].tolist()}, params, use_tqdm=False)
        computed = max(model.llm.collective_rpc("compare_q_save_logits", args=(file,)))
        if computed != input_ids.shape[1]:
            raise ModelError(
                f"vLLM computed {computed} rows of logits for a window of {input_ids.shape[1]} "
                "tokens"
            )
        logits: torch.Tensor = load_file(file)["logits"]
    return logits.unsqueeze(0)


def argument_parser() -> argparse.ArgumentParser:
    """The flags; their names are the same as in vLLM's score-mode script."""
    p = argparse.ArgumentParser(
        description="Perplexity of one model inside an unmodified vLLM, every position scored."
    )
    p.add_argument("--model", required=True, help="model folder or hub id; its tokenizer is used")
    p.add_argument(
        "--quantization", help="vLLM quantization method, if the checkpoint does not name it"
    )
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--dataset", help="data set of the hub, or a name such as wiki2")
    source.add_argument("--text", help="local .txt, .jsonl or .parquet file instead of a data set")
    p.add_argument("--dataset-config", help="configuration of the data set")
    p.add_argument("--split", help="split of the data set (default: test)")
    p.add_argument("--num-samples", type=int, help="rows of the data set to read (default: all)")
    p.add_argument(
        "--context-length", type=int, default=2048, help="tokens in a window (default: %(default)s)"
    )
    p.add_argument(
        "--stride", type=int, default=512, help="tokens between windows (default: %(default)s)"
    )
    p.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs that share the model")
    p.add_argument(
        "--gpu-memory-utilization",
        type=float,
        help="share of GPU memory vLLM may take (default: vLLM's)",
    )
    p.add_argument(
        "--trust-remote-code", action="store_true", help="run code from the model's repository"
    )
    p.add_argument("--verbose", "-v", action="store_true", help="let vLLM print its own log")
    return p


def specs_of(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return (data spec, model spec) equivalent to the flags."""
    from compare_q.eval.specs.spec_files import parse_data_spec, parse_model_spec

    data = {
        "tokenizer_dir": args.model,
        "dataset": args.dataset or "text",
        "path": args.text,
        "dataset_name": args.dataset_config,
        "dataset_split": args.split,
        "max_text_rows": args.num_samples,
        "eval_len": args.context_length,
        "eval_stride": args.stride,
        "trust_remote_code": args.trust_remote_code,
    }
    engine = {
        "quantization": args.quantization,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "tensor_parallel_size": args.tensor_parallel_size,
        "trust_remote_code": args.trust_remote_code,
    }
    model = {
        "load_fn": "vllm_score",
        "label": args.model,
        "model_dir": args.model,
        "engine": {name: value for name, value in engine.items() if value is not None},
    }
    data_fields = {name: value for name, value in data.items() if value is not None}
    source = Path("command line")
    return parse_data_spec(data_fields, source), parse_model_spec(model, source)


def main(arguments: Sequence[str] | None = None) -> int:
    """Score one model; exit status 0, or 2 with a message of one line."""
    from compare_q.eval.run import runner
    from compare_q.eval.run.run_config import local_config
    from compare_q.eval.run.workers import signals_interrupt

    args = argument_parser().parse_args(arguments)
    try:
        data_spec, model_spec = specs_of(args)
        config = local_config(verbose=args.verbose)
        with signals_interrupt(config.workers):
            result = runner.run(config, {"text": data_spec}, [model_spec]).results.models[0]
        if result.blocks is None:
            raise ModelError(result.error or "")
    except CompareQError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    perplexity = "n/a"
    if result.ppl is not None:
        perplexity = f"{result.ppl:.4f}"
    print(f"Perplexity: {perplexity}\nTokens: {result.tokens}\nWindows: {result.windows}")
    if result.non_finite:
        print(f"Positions without a finite log-probability, left out: {result.non_finite}")
    origin = ""
    if result.from_cache:
        origin = " (measured earlier, from the cache)"
    print(f"Seconds: {result.score_seconds:.2f}{origin}")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
