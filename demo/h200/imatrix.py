"""Importance matrix as in llama.cpp: the mean square of every input of every matrix, over calibration windows.

``llama-imatrix`` collects the same while llama.cpp runs; here the inputs come from the model in Transformers.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from demo.gguf_writer import gguf_name
from demo.quantize import calibration_windows, watch_inputs

WINDOWS = 64
"""Number of windows of 1,024 tokens each, from the end of the demo's text."""


@cache
def importance(source: Path, windows: int = WINDOWS) -> dict[str, NDArray[np.float32]]:
    """GGUF name of each matrix of the layers -> mean square of its inputs, float32 [in]; on a GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).to(device)
    tokens = calibration_windows(source, model.config.max_position_embeddings, windows)
    sums: dict[str, torch.Tensor] = {}

    def keep(name: str, given: torch.Tensor) -> None:
        sums[name] = sums.get(name, 0) + given[0].double().square().sum(0)

    watch_inputs(model, tokens, keep)
    sums.pop("lm_head", None)  # one token per window enters it here; llama.cpp's own matrix omits it too
    return {gguf_name(f"{name}.weight"): (each / tokens.numel()).float().cpu().numpy() for name, each in sums.items()}
