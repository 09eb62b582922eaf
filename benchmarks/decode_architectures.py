"""Compare decode with prefill in tiny random models of every causal architecture of Transformers.

    python -m benchmarks.decode_architectures OUT.json [--engine vllm] [--only MODEL_TYPE ...]

Each model has two layers and runs in float32.  In Transformers, every log-probability in decode, in steps of one and
of three tokens, must differ from prefill by at most ``LIMIT``.  In vLLM, the mean difference of the engine's own check
of decode must be within ``LIMIT``.  A row must be right, or refused with a reason.  Models whose config does not accept
these sizes are listed with the error.  Exit status 1 if a model is wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from compare_q.backends.base import Decode, PlannedModel, ScoreRequest, Window
from compare_q.backends.common import machine
from compare_q.backends.common.errors import CompareQError
from compare_q.backends.common.process import WORKER

LIMIT = 1e-3
"""Nats: float32 in another order moves the log-probabilities of these models by less."""
LONGEST_S = 120
"""Seconds for one model."""
MOST = 20_000_000
"""Parameters of the largest model that is made."""
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.3, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256,
    "n_inner": 128, "d_model": 128, "n_layers": 2, "n_heads": 4, "ffn_dim": 128, "word_embed_proj_dim": 128,
    "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "n_routed_experts": 4, "state_size": 16, "rope_theta": 10000.0, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "q_lora_rank": 32, "kv_lora_rank": 32, "rotary_dim": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "mamba_n_heads": 8, "mamba_d_head": 32, "default_language": "en_XX", "is_decoder": True,
}  # fmt: skip
"""Keys for configs; a config uses the keys that it has."""


def make(model_type: str, class_name: str, folder: Path) -> None:
    """Write a tiny random model of an architecture; any error of its config or class."""
    import torch
    import transformers

    defaults = transformers.CONFIG_MAPPING[model_type]()
    if hasattr(defaults, "text_config"):
        raise ValueError("its text model is a separate architecture")
    # A property is computed from other keys.
    keys = {name: value for name, value in SIZES.items() if hasattr(defaults, name)
            and not isinstance(getattr(type(defaults), name, None), property)}  # fmt: skip
    for name in ("layer_types", "mlp_layer_types", "block_types"):  # lists as long as the layers
        fixed = isinstance(getattr(type(defaults), name, None), property)
        if not fixed and isinstance(kinds := getattr(defaults, name, None), list) and kinds:
            keys[name] = [kinds[0], next((kind for kind in kinds if kind != kinds[0]), kinds[-1])]  # both kinds
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**keys)
    with torch.device("meta"):
        if (size := sum(each.numel() for each in getattr(transformers, class_name)(config).parameters())) > MOST:
            raise ValueError(f"{size:,} parameters: its config has sizes of other names")
    getattr(transformers, class_name)(config).float().save_pretrained(folder)


def transformers_row(folder: Path) -> dict[str, Any]:
    """Return the largest |difference| in nats between prefill and decode in steps of one and of three tokens."""
    from compare_q.backends.hf.engine import TransformersEngine

    prefill, _ = scored(TransformersEngine, folder, None)
    return {f"step {step}": float(abs(scored(TransformersEngine, folder, Decode(step))[0] - prefill).max())
            for step in (1, 3)}  # fmt: skip


def vllm_row(folder: Path) -> dict[str, Any]:
    """Return the mean |difference| between decode and prefill in nats, measured by the engine's own check."""
    from compare_q.backends.vllm.engine import VllmEngine

    _, said = scored(VllmEngine, folder, Decode(1, 2))
    return {"step 1": said["scorer"]["decode_difference"]}


def scored(kind: Any, folder: Path, decode: Decode | None) -> tuple[Any, dict[str, Any]]:
    """(log-probabilities [T], provenance) of one window of 40 tokens in an engine."""
    import numpy as np

    load_fn = kind.capabilities.load_fns[0]
    model = PlannedModel(
        label="m", load_fn=load_fn, engine=load_fn, model_dir=str(folder), max_tokens=40,
        options={"dtype": "float32"}, decode=decode,
    )  # fmt: skip
    engine = kind(model)
    engine.load()
    ids = np.random.default_rng(0).integers(3, 300, 40, dtype=np.int32)
    (found,) = engine.score([Window.scored_from(0, ids)], ScoreRequest())
    said = engine.provenance()
    engine.close()
    return found.logprob, said


def row_of(measure: Any, model_type: str, class_name: str) -> dict[str, Any]:
    """The row of an architecture, measured in this process."""
    row: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            make(model_type, class_name, Path(folder))
            row = measure(Path(folder))
            differences = list(row.values())
            row["verdict"] = (
                "not compared" if None in differences else "right" if max(differences) <= LIMIT else "wrong"
            )
        except CompareQError as error:
            row |= {"verdict": "refused", "reason": str(error).replace(folder, "FOLDER")[:300]}
        except Exception as error:
            row |= {"verdict": "not made", "reason": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--only", nargs="+", help="model types")
    options = parser.parse_args()
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    measure = transformers_row
    if options.engine == "vllm":
        os.environ[WORKER] = "1"  # one model per process, and vLLM's core in it
        from compare_q.backends.vllm.engine import VllmEngine

        VllmEngine.import_engine(verbose=False)
        measure = vllm_row
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found: dict[str, Any] = {
        "commit": machine.commit(),
        "versions": machine.versions(),
        "cpu": machine.cpu(),
        "rows": {},
    }
    for model_type, class_name in NAMES.items():
        if options.only and model_type not in options.only:
            continue
        name = class_name if isinstance(class_name, str) else class_name[0]
        with multiprocessing.get_context("fork").Pool(1) as pool:  # a fork of this warm process for each model
            try:
                row = pool.apply_async(row_of, (measure, model_type, name)).get(LONGEST_S)
            except multiprocessing.TimeoutError:
                row = {"verdict": "refused", "reason": f"no result within {LONGEST_S} s"}
        found["rows"][model_type] = row
        found["counts"] = dict(Counter(each["verdict"] for each in found["rows"].values()))
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(model_type, row, flush=True)
    print(found.get("counts"))
    return int(any(row["verdict"] == "wrong" for row in found["rows"].values()))


if __name__ == "__main__":
    sys.exit(main())
