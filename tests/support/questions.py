"""Small tasks of lm-eval in local files, and the windows of their questions."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import numpy as np
import pytest

from compare_q.eval.text.tokens import Requests


def model_class(kind: str) -> Any:
    """lm-eval's class for models in Transformers ("hf") or in vLLM.

    Its vLLM class reads the version of the distribution ``vllm``, which vLLM's CPU build does not have.
    """
    if kind == "hf":
        from lm_eval.models.huggingface import HFLM

        return HFLM
    import vllm
    from vllm.platforms import current_platform  # vLLM reads its own version once, to find the platform

    assert current_platform.device_type
    known = metadata.version
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "version", lambda name: vllm.__version__ if name == "vllm" else known(name))
        from lm_eval.models.vllm_causallms import VLLM

        return VLLM


def requests(question: Any, right: Any, chars: Any) -> Requests:
    """Return ``Requests`` in which only these columns [W] matter."""
    return Requests(question, np.zeros(len(question), np.int32), right, chars, "odd", 0)
