"""Log-probability, entropy and KL divergence of every token, over the whole vocabulary.

Nothing is approximated.  For one position with logits z and a reference's logits r over the same V
tokens, in nats:

    logprob   ln q[target],  ln q = log_softmax(z)      entropy   -sum q ln q
    kld       sum p (ln p - ln q),  p = softmax(r)      top1_logprob   max ln q

The softmax runs over the vocabulary without padding in float32; nothing is added or clamped.  A
tensor-parallel rank reduces its slice of the vocabulary to one row of partial statistics per
position (``partial``), and the rows of all ranks are merged in float64 (``scores``).  With
m = max z and s = sum exp(z - m):

    logZ = m + ln s      entropy = ln s - u / s,  u = sum exp(z - m) (z - m)
    kld = d / s_r - (logZ_r - logZ),  d = sum exp(r - m_r) (r - z)

These are the definitions with ln q = z - logZ and ln p = r - logZ_r.  d uses the raw difference
r - z, which is exactly 0 for equal logits, so that a model against itself has a KLD of exactly 0.
For close logits it is exact and small, and the roundings of its products are small too.  The
remaining error is about 1e-7 of the mean of |r - z| and of the sums, of either sign (at most 7e-7
nats per token against float64).  A KLD near 0 may be -1e-7, and is not changed.

Not finite: a token with logit -inf has probability 0, and a term of probability 0 contributes 0.  A
token that the reference allows (r > -inf) and the model excludes (z = -inf) makes kld +inf.  A
logit NaN or +inf makes logprob NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base import TokenScores
from ..common.errors import ModelError

if TYPE_CHECKING:
    import torch

CPU_ELEMENTS = 1 << 19
"""Logits at a time on a CPU: 10 rows of 49,152.

Their float32 temporaries fit the processor's cache, which makes this 4 times as fast as 64 rows.
"""
DEVICE_ELEMENTS = 1 << 24
"""Logits at a time on a device without Triton.

64 MiB of float32 need few kernel launches and little memory.
"""


class Column(IntEnum):
    """Columns of a row of partial statistics, float32, over one slice of the vocabulary.

    z are the model's logits, r the reference's.  Without a reference, a row ends after TOP; the
    second half has the same columns for r.  Token ids are exact in float32 up to 16,777,216.
    """

    MAX = 0  # m = max z
    SUM = 1  # s = sum exp(z - m)
    SHIFTED = 2  # u = sum exp(z - m) (z - m)
    TARGET = 3  # z[target], -inf if the target is not in this slice
    TOP = 4  # global id of the first largest z
    REF_MAX = 5
    REF_SUM = 6
    GAP = 7  # d = sum exp(r - m_r) (r - z)
    REF_TARGET = 8
    REF_TOP = 9


def width(has_reference: bool) -> int:
    """Columns of a row of partial statistics."""
    if has_reference:
        return len(Column)
    return int(Column.REF_MAX)


def partial(
    logits: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
    *,
    first: int = 0,
    reference: torch.Tensor | None = None,
) -> None:
    """Write the partial statistics of one slice of the vocabulary into ``out``.

    All tensors are on one device.  On CUDA one kernel reads z and r once, if Triton is installed.
    ValueError if the shapes or dtypes do not fit.

    Args:
        logits: z [n, V_local], any float dtype, also a column slice of a wider tensor.
        targets: int64 [n], global token ids.
        out: float32 [n, ``width``], which is filled as a whole.
        first: the global id of column 0.
        reference: r [n, V_local], any float dtype.
    """
    import torch

    rows, columns = logits.shape
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in (targets, out)]
    n_columns_out = width(reference is not None)
    expected = [((rows,), torch.int64), ((rows, n_columns_out), torch.float32)]
    has_other_shape = reference is not None and reference.shape != logits.shape
    if shapes != expected or has_other_shape:
        raise ValueError(
            f"targets and out are {shapes} for logits {(rows, columns)} and a reference of their "
            "shape"
        )
    kernels = None
    # A rank that holds only padding has no columns; the kernel needs at least one.
    if logits.is_cuda and columns > 0:
        kernels = triton_kernels()
    if kernels is None:
        torch_partial(logits, targets, out, first, reference)
    else:
        kernels.partial_statistics(logits, targets, out, first, reference)


@cache
def triton_kernels() -> Any:
    """The module with ``partial`` in Triton; None if Triton is not installed."""
    try:
        from . import triton_kernels
    except ImportError:
        return None
    return triton_kernels


def torch_partial(
    logits: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
    first: int,
    reference: torch.Tensor | None,
) -> None:
    """``partial`` in torch operations."""
    import torch

    n_rows, n_columns = logits.shape
    if n_columns == 0:  # a rank that holds only padding
        empty = [-math.inf, 0.0, 0.0, -math.inf, float(first)]  # MAX to TOP
        n_models = out.shape[1] // len(empty)
        out[:] = torch.tensor(empty * n_models, device=out.device)
        return
    on_cpu = logits.device.type == "cpu"
    n_elements = DEVICE_ELEMENTS
    if on_cpu:
        n_elements = CPU_ELEMENTS
    step = max(n_elements // n_columns, 1)
    with torch.no_grad():
        for begin in range(0, n_rows, step):
            chunk = slice(begin, begin + step)
            z = logits[chunk].float()
            r = None
            if reference is not None:
                r = reference[chunk].float()
            local = targets[chunk] - first
            # The careful way costs three more passes, so that a CPU takes it only if it is needed.
            # A GPU always takes it: reading a result would stop its queue.
            _fill(z, r, local, first, out[chunk], careful=not on_cpu)
            if on_cpu and bool(out[chunk, Column.SHIFTED :: Column.REF_MAX].isnan().any()):
                _fill(z, r, local, first, out[chunk], careful=True)


def _fill(
    z: torch.Tensor,
    r: torch.Tensor | None,
    local: torch.Tensor,
    first: int,
    out: torch.Tensor,
    careful: bool,
) -> None:
    """Write the statistics of some rows, float32, into ``out``.

    ``local``: the targets' columns.  Unless ``careful``, 0 * inf gives a NaN in SHIFTED or GAP.
    """
    weight, shifted = _side(z, local, first, out[:, : Column.REF_MAX])
    # einsum and bmm are not used: a float32 dot product on a CPU loses three digits that a product
    # and then a sum keep.
    if careful:
        shifted.masked_fill_(weight == 0, 0.0)
    out[:, Column.SHIFTED] = shifted.mul_(weight).sum(-1)
    if r is None:
        return
    weight, gap = _side(r, local, first, out[:, Column.REF_MAX :])
    # Written over r - max, which is not needed: this saves memory.
    terms = (gap.copy_(r).sub_(z)).mul_(weight)
    if careful:
        # A token that only the model excludes makes the divergence infinite; one that the
        # reference excludes contributes nothing.
        terms.masked_fill_(z == -math.inf, math.inf).masked_fill_(r == -math.inf, 0.0)
    out[:, Column.GAP] = terms.sum(-1)


def _side(
    x: torch.Tensor, local: torch.Tensor, first: int, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write maximum, sum, target and top of x [n, V] into out [n, 5].

    Return exp(x - max) and x - max, both new [n, V].
    """
    n_columns = x.shape[1]
    top = argmax(x)[:, None]
    peak = x.gather(1, top)
    # If all logits are -inf, 0 is subtracted: -inf - -inf would be NaN.
    shifted = x - peak.masked_fill(peak == -math.inf, 0.0)
    weight = shifted.exp()
    is_inside = (local >= 0) & (local < n_columns)
    target = x.gather(1, local.clamp(0, n_columns - 1)[:, None])[:, 0]
    out[:, Column.MAX] = peak[:, 0]
    out[:, Column.SUM] = weight.sum(-1)
    out[:, Column.TARGET] = target.masked_fill(~is_inside, -math.inf)
    out[:, Column.TOP] = top[:, 0] + first
    return weight, shifted


def argmax(x: torch.Tensor) -> torch.Tensor:
    """Column of the first largest value, int64 [n]; NaN counts as the largest.

    torch.max(dim) does not define the order of equal values on CUDA; torch.argmax does.  On a CPU
    numpy's argmax keeps the order too, in a sixth of the time (8 rows of 49,152: 0.017 ms against
    0.107 ms; exp takes 0.12 ms).
    """
    import torch

    if x.device.type == "cpu":
        return torch.from_numpy(x.numpy().argmax(-1))
    return x.argmax(-1)


class Merged(NamedTuple):
    """One softmax over all R shards of the vocabulary, float64."""

    weight: NDArray[np.float64]  # [R, T]: scales the shards' sums to the common maximum
    total: NDArray[np.float64]  # [T]: S = sum exp(z - m) with the common maximum m
    log_total: NDArray[np.float64]  # [T]: logZ
    logprob: NDArray[np.float64]  # [T]
    top1_logprob: NDArray[np.float64]  # [T]
    top: NDArray[np.float64]  # [T]: id of the most probable token, the lowest of equal ones


def _merge(side: NDArray[np.float64]) -> Merged:
    """Merge MAX, SUM, TARGET and TOP of every shard, [R, T, 5]."""
    peaks = side[..., Column.MAX]
    peak = peaks.max(0)
    weight = np.exp(peaks - peak)
    total = (weight * side[..., Column.SUM]).sum(0)
    log_total = peak + np.log(total)
    top = np.where(peaks == peak, side[..., Column.TOP], np.inf).min(0)
    # Only one shard has the target; its logit is -inf in the others.
    target = side[..., Column.TARGET].max(0)
    return Merged(weight, total, log_total, target - log_total, peak - log_total, top)


def scores(
    window: int, targets: NDArray[Any], shards: Sequence[NDArray[np.float32]]
) -> TokenScores:
    """Put the vocabulary's shards together, in float64, and score every position.

    ``targets`` integers [T], global token ids; ``shards`` float32 [T, ``width``] each, one per
    tensor-parallel rank, as ``partial`` wrote them, in any order.  ``top1`` and ``same_top`` are
    False if the token's log-probability is not finite, ``same_top`` also if the reference's sum is
    not.  Among equally probable tokens, the
    lowest id is the top one.  ValueError if shapes do not fit.
    """
    shapes = {shard.shape for shard in shards}
    n_targets = len(targets)
    if shapes not in ({(n_targets, width(False))}, {(n_targets, width(True))}):
        raise ValueError(
            f"window {window}: shards of shapes {sorted(shapes)} for {n_targets} tokens"
        )
    stacked = np.stack(shards).astype(np.float64)
    side = stacked[..., : Column.REF_MAX]
    ref_side = stacked[..., Column.REF_MAX :]
    # Excluded tokens and NaN are results, not mistakes.
    with np.errstate(invalid="ignore", divide="ignore"):
        model = _merge(side)
        is_finite = np.isfinite(model.logprob)
        model_scores = TokenScores(
            window,
            logprob=model.logprob.astype(np.float32),
            entropy=_entropy(side, model).astype(np.float32),
            top1_logprob=model.top1_logprob.astype(np.float32),
            top1=(model.top == targets) & is_finite,
        )
        if ref_side.shape[-1] == 0:
            return model_scores
        ref = _merge(ref_side)
        return replace(
            model_scores,
            ref_logprob=ref.logprob.astype(np.float32),
            ref_top1_logprob=ref.top1_logprob.astype(np.float32),
            kld=_divergence(ref_side, ref, model).astype(np.float32),
            same_top=(model.top == ref.top) & is_finite & np.isfinite(ref.log_total),
        )


def _entropy(side: NDArray[np.float64], model: Merged) -> NDArray[np.float64]:
    """Return ln S - U / S [T]; U is u of all shards, moved to their common maximum."""
    peaks = side[..., Column.MAX]
    # An empty shard is not moved: 0 * -inf would be NaN.
    move = np.where(peaks == -np.inf, 0.0, peaks - peaks.max(0))
    shifted = side[..., Column.SHIFTED] + move * side[..., Column.SUM]
    total_shifted = (model.weight * shifted).sum(0)
    entropy: NDArray[np.float64] = np.log(model.total) - total_shifted / model.total
    return entropy


def _divergence(ref_side: NDArray[np.float64], ref: Merged, model: Merged) -> NDArray[np.float64]:
    """Return d / S_r - (logZ_r - logZ) [T]."""
    gaps = ref_side[..., Column.GAP - Column.REF_MAX]
    # Infinite also where the weight of the shard underflows to 0.
    gap = np.where(gaps == np.inf, np.inf, ref.weight * gaps).sum(0)
    divergence: NDArray[np.float64] = gap / ref.total - (ref.log_total - model.log_total)
    return divergence


def check_targets(window: int, targets: NDArray[Any], entries: int) -> None:
    """ModelError if a target is outside the ``entries`` vocabulary entries that have logits."""
    outside = targets[(targets < 0) | (targets >= entries)]
    if len(outside):
        raise ModelError(
            f"window {window}: token {int(outside[0])} is outside the {entries} logits"
        )


def target_ids(window: int, logits: torch.Tensor, targets: NDArray[Any]) -> torch.Tensor:
    """Targets as int64 [T] on the device of the logits [T, V].

    ModelError if a target has no logit.
    """
    import torch

    check_targets(window, targets, logits.shape[1])
    return torch.from_numpy(np.asarray(targets, np.int64)).to(logits.device)


def of_rows(window: int, logits: torch.Tensor, targets: NDArray[Any]) -> NDArray[np.float32]:
    """Partial statistics [n, 5] from whole logits [n, V], any float dtype, any device.

    ``targets``: integers [n].  ModelError if a target is outside the vocabulary.
    """
    import torch

    ids = target_ids(window, logits, targets)
    out = torch.empty(len(targets), width(False), device=logits.device)
    partial(logits, ids, out)
    return out.cpu().numpy()
