"""Decode of tiny random models of every causal architecture of Transformers, beside their own prefill.

    python -m benchmarks.decode_architectures OUT.json [--only MODEL_TYPE ...]

Each model has two layers and runs in float32, in prefill and in decode by steps of one and of three tokens.  A row is
right if every log-probability is within ``LIMIT`` of prefill's, or refused with a reason.  Models whose config does not
take these sizes are listed with the error.  Exit status 1 if a model is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

LIMIT = 1e-3
"""Nats: float32 in another order moves the log-probabilities of these models by less."""
MOST = 20_000_000
"""Parameters of the largest model that is made."""
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.3, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256,
    "n_inner": 128, "d_model": 64, "n_layers": 2, "n_heads": 4, "ffn_dim": 128, "word_embed_proj_dim": 64,
    "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "n_routed_experts": 4, "state_size": 16, "rope_theta": 10000.0,
}  # fmt: skip
"""Keys of configs; a config takes those that it has."""


def make(model_type: str, class_name: str, folder: Path) -> None:
    """Write a tiny random model of an architecture; any error of its config or class."""
    import torch
    import transformers

    defaults = transformers.CONFIG_MAPPING[model_type]()
    if hasattr(defaults, "text_config"):
        raise ValueError("its text model is an architecture of its own")
    keys = {name: value for name, value in SIZES.items() if hasattr(defaults, name)}
    for name in ("layer_types", "mlp_layer_types", "block_types"):  # lists as long as the layers
        fixed = isinstance(getattr(type(defaults), name, None), property)
        if not fixed and isinstance(kinds := getattr(defaults, name, None), list):
            keys[name] = [kinds[0], kinds[-1]]
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**keys)
    with torch.device("meta"):
        if (size := sum(each.numel() for each in getattr(transformers, class_name)(config).parameters())) > MOST:
            raise ValueError(f"{size:,} parameters: its config has sizes of other names")
    getattr(transformers, class_name)(config).float().save_pretrained(folder)


def scores(folder: Path, decode: Any) -> Any:
    """Log-probabilities [T] of one window of 40 tokens."""
    import numpy as np

    from compare_q.backends.base import PlannedModel, ScoreRequest, Window
    from compare_q.backends.hf.engine import TransformersEngine

    model = PlannedModel(
        label="m", load_fn="transformers", engine="transformers", model_dir=str(folder), max_tokens=40,
        options={"dtype": "float32"}, decode=decode,
    )  # fmt: skip
    ids = np.random.default_rng(0).integers(3, 300, 40, dtype=np.int32)
    engine = TransformersEngine(model)
    engine.load()
    (found,) = engine.score([Window.scored_from(0, ids)], ScoreRequest())
    engine.close()
    return found.logprob


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", help="model types")
    options = parser.parse_args()
    import numpy as np
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    from compare_q.backends.base import Decode
    from compare_q.backends.common import machine
    from compare_q.backends.common.errors import CompareQError

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
        row: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as folder:
            try:
                make(model_type, class_name if isinstance(class_name, str) else class_name[0], Path(folder))
                prefill = scores(Path(folder), None)
                for step in (1, 3):
                    row[f"step {step}"] = float(np.abs(scores(Path(folder), Decode(step)) - prefill).max())
                row["verdict"] = "right" if max(row["step 1"], row["step 3"]) <= LIMIT else "wrong"
            except CompareQError as error:
                row |= {"verdict": "refused", "reason": str(error).replace(folder, "FOLDER")[:300]}
            except Exception as error:
                row |= {"verdict": "not made", "reason": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        found["rows"][model_type] = row
        found["counts"] = dict(Counter(each["verdict"] for each in found["rows"].values()))
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(model_type, row, flush=True)
    print(found.get("counts"))
    return int(any(row["verdict"] == "wrong" for row in found["rows"].values()))


if __name__ == "__main__":
    sys.exit(main())
