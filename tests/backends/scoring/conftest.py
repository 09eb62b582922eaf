"""The partial statistics in torch and in the Triton kernel, as one fixture.

Without a GPU the kernel runs in Triton's interpreter, in a process of its own: the interpreter has to be chosen before
Triton is first imported, and must not be the one that any other test gets.
"""

from __future__ import annotations

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

from compare_q.backends.scoring import divergences, statistics
from compare_q.backends.scoring.statistics import width
from tests.support.definitions import Partial

CUDA = torch.cuda.is_available()
TRITON = (
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
)


def in_interpreter(saved: bytes, first: int) -> np.ndarray:
    """Runs in the interpreter's process; ``saved`` keeps the strides of logits, targets, reference and out."""
    from compare_q.backends.scoring import triton_kernel

    logits, targets, reference, out = torch.load(io.BytesIO(saved))
    with np.errstate(all="ignore"):
        triton_kernel.partial(logits, targets, out, first, reference)
    return out.numpy()


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            pool.submit(math.sqrt, 1.0).result()  # the process starts here, with the variable
            yield pool


@pytest.fixture(params=["torch", *(["torch-cuda"] if CUDA else []), pytest.param("triton", marks=TRITON)])
def partial(request: pytest.FixtureRequest) -> Partial:
    """``partial(logits, targets, first=0, reference=None)`` -> [n, width]; the inputs must come out unchanged."""
    implementation = request.param

    def run(logits: torch.Tensor, targets: Any, first: int = 0, reference: torch.Tensor | None = None) -> np.ndarray:
        ids = torch.as_tensor(targets, dtype=torch.int64)
        out = torch.full((len(ids), width(reference is not None)), math.nan)
        before = logits.clone()
        if implementation == "triton" and not CUDA:
            buffer = io.BytesIO()
            torch.save((logits, ids, reference, out), buffer)
            pool = request.getfixturevalue("interpreter")
            return pool.submit(in_interpreter, buffer.getvalue(), first).result()
        if implementation == "torch":
            statistics.partial(logits, ids, out, first=first, reference=reference)
        elif implementation == "torch-cuda":
            out = out.cuda()
            other = None if reference is None else reference.cuda()
            statistics.torch_partial(logits.cuda(), ids.cuda(), out, first, other)
        else:
            assert statistics._fused() is not None
            out = out.cuda()
            other = None if reference is None else on_gpu(reference)
            statistics.partial(on_gpu(logits), ids.cuda(), out, first=first, reference=other)
        assert torch.equal(logits.nan_to_num(7.5), before.nan_to_num(7.5))
        return out.cpu().numpy()

    return run


def second_in_interpreter(saved: bytes, first: int) -> np.ndarray:
    """The second pass in the interpreter's process."""
    from compare_q.backends.scoring import triton_divergences

    logits, reference, whole, out = torch.load(io.BytesIO(saved))
    with np.errstate(all="ignore"):
        triton_divergences.partial(logits, reference, whole, out, first)
    return out.numpy()


@pytest.fixture(params=["torch", *(["torch-cuda"] if CUDA else []), pytest.param("triton", marks=TRITON)])
def second(request: pytest.FixtureRequest) -> Partial:
    """``second(logits, reference, whole, first)`` -> [n, divergences.WIDTH]; the logits must come out unchanged."""
    implementation = request.param

    def run(logits: torch.Tensor, reference: torch.Tensor, whole: torch.Tensor, first: int) -> np.ndarray:
        out = torch.full((len(logits), divergences.WIDTH), math.nan)
        before = [logits.clone(), reference.clone()]
        if implementation == "triton" and not CUDA and logits.shape[1]:
            buffer = io.BytesIO()
            torch.save((logits, reference, whole, out), buffer)
            pool = request.getfixturevalue("interpreter")
            return pool.submit(second_in_interpreter, buffer.getvalue(), first).result()
        if implementation == "torch" or not CUDA:
            divergences.partial(logits, reference, whole, out, first=first)
        else:
            out = out.cuda()
            given = on_gpu(logits), on_gpu(reference), whole.cuda(), out
            if implementation == "torch-cuda":
                divergences.torch_partial(*given, first)
            else:
                assert divergences._fused() is not None
                divergences.partial(*given, first=first)
        for given_before, now in zip(before, (logits, reference), strict=True):
            assert torch.equal(now.nan_to_num(7.5), given_before.nan_to_num(7.5))
        return out.cpu().numpy()

    return run


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    """The same values, with the same row stride and offset."""
    storage = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype, device="cuda")
    return storage.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)
