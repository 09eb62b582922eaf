"""The partial statistics in torch and in the Triton kernel, as one fixture.

Without a GPU the kernel runs in Triton's interpreter, in a separate process: the interpreter must
be chosen before Triton is first imported, and no other test may use it.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from compare_q.backends.scoring import token_statistics
from tests.support.definitions import Partial

CUDA = torch.cuda.is_available()
TRITON = (
    pytest.mark.engine,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
)


def in_interpreter(saved: bytes) -> np.ndarray:
    """Run the kernel in the interpreter's process; ``saved``: its tensors, with their strides."""
    tensors = torch.load(io.BytesIO(saved))
    kernels = importlib.import_module("compare_q.backends.scoring.triton_kernels")
    with np.errstate(all="ignore"):
        kernels.partial_statistics(**tensors)
    out: np.ndarray = tensors["out"].numpy()
    return out


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            pool.submit(math.sqrt, 1.0).result()  # the process starts here, with the variable
            yield pool


IMPLEMENTATIONS = ["torch", pytest.param("triton", marks=TRITON)]
if CUDA:
    IMPLEMENTATIONS.append("torch-cuda")


@pytest.fixture(params=IMPLEMENTATIONS)
def partial(request: pytest.FixtureRequest) -> Partial:
    """``partial(logits, targets, first=0, reference=None)`` -> [n, width].

    Other tensors must not change.
    """
    implementation = request.param

    def run(**tensors: Any) -> np.ndarray:
        before = {}
        for name, value in tensors.items():
            if isinstance(value, torch.Tensor):
                before[name] = value.clone()
        if implementation == "triton" and not CUDA and tensors["logits"].shape[1]:
            buffer = io.BytesIO()
            torch.save(tensors, buffer)
            pool = request.getfixturevalue("interpreter")
            return pool.submit(in_interpreter, buffer.getvalue()).result()
        used = dict(tensors)
        if CUDA and implementation != "torch":
            for name in before:
                used[name] = on_gpu(tensors[name])
        if implementation == "triton" and CUDA:
            assert token_statistics.triton_kernels() is not None
        if implementation == "torch-cuda":
            token_statistics.torch_partial(**used)
        else:
            token_statistics.partial(**used)
        for name in before.keys() - {"out"}:
            # NaN differs from itself, so it is replaced before inputs are compared.
            assert torch.equal(tensors[name].nan_to_num(7.5), before[name].nan_to_num(7.5))
        out: np.ndarray = used["out"].cpu().numpy()
        return out

    def partial(
        logits: torch.Tensor, targets: Any, first: int = 0, reference: torch.Tensor | None = None
    ) -> np.ndarray:
        ids = torch.as_tensor(targets, dtype=torch.int64)
        # A field that the kernel does not write stays NaN and fails the comparison.
        out = torch.full((len(ids), token_statistics.width(reference is not None)), math.nan)
        return run(logits=logits, targets=ids, out=out, first=first, reference=reference)

    return partial


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    """The same values, with the same row stride and offset."""
    n_elements = x.untyped_storage().nbytes() // x.element_size()
    storage = torch.empty(n_elements, dtype=x.dtype, device="cuda")
    return storage.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)
