"""``partial`` of ``backends/scoring/statistics.py`` in one Triton kernel: every logit is read once, nothing is stored.

One program reduces one row.  Each of its BLOCK lanes walks down the row with its own running maximum and sums, so the
loop has no reduction across lanes; at the end the lanes are put together in the way in which shards are.  A lane needs
one exponential a value, exp(-|x - m|): it scales the new term if x <= m, and the sums so far if x is the new maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 2048
WARPS = 16
"""The best of eight pairs on an H200 (driver 580.159.04, Triton 3.6): 384 rows of 128,256 bf16 logits against a
reference took 126 us, with 8 warps 164; without a reference 70 and 75.  The two head products before the kernel take
1,130 us.  Rows that do not start at a multiple of 16 bytes are loaded value by value."""

_jit: Callable[[Callable[..., Any]], Any] = triton.jit

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""A lane's maximum before its first value: the lowest finite float32, since -inf - -inf would be NaN."""

FAR = tl.constexpr(1e30)
"""Where a difference of logits ends as a factor: its exponential is 0, and 0 times the factor must not be NaN."""


def partial(
    logits: torch.Tensor, targets: torch.Tensor, out: torch.Tensor, first: int, reference: torch.Tensor | None
) -> None:
    """``statistics.partial`` for at least one column; rows may lie at any distance and alignment."""
    rows, columns = logits.shape
    z, r = _dense(logits), _dense(logits if reference is None else reference)
    if rows == 0:
        return
    # Triton launches on the current device; without a GPU (Triton's interpreter) the context does nothing.
    with torch.cuda.device(logits.device if logits.is_cuda else -1):
        _statistics[(rows,)](
            z, r, targets.contiguous(), out, columns, first, z.stride(0), r.stride(0), out.stride(0), out.stride(1),
            has_reference=reference is not None, block=BLOCK, num_warps=WARPS, enable_fp_fusion=True,
        )  # fmt: skip


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Columns side by side; a copy only of a tensor that lies the other way round."""
    return x if x.stride(1) == 1 else x.contiguous()


@_jit
def _compare(x: tl.tensor, peak: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """x - peak within +-FAR, exp(-|x - peak|), x > peak.  A NaN is never higher, and its weight is NaN."""
    step = x - peak
    return tl.minimum(tl.maximum(step, -FAR), FAR), tl.exp(-tl.abs(step)), step > 0


@_jit
def _store(
    out: tl.tensor, stride: tl.tensor,
    peak: tl.tensor, total: tl.tensor, moment: tl.tensor, target: tl.tensor, top: tl.tensor,
) -> None:  # fmt: skip
    """Half a row, in the order of ``statistics.Column``."""
    tl.store(out, tl.where(total == 0, float("-inf"), peak))
    tl.store(out + stride, total)
    tl.store(out + 2 * stride, moment)
    tl.store(out + 3 * stride, target)
    tl.store(out + 4 * stride, top.to(tl.float32))


@_jit
def _first_top(peaks: tl.tensor, peak: tl.tensor, tiles: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """The first column that holds the maximum; within a lane ``tiles`` is already the first tile that does."""
    return tl.min(tl.where(peaks == peak, tiles + lane, 2147483647), 0)


@_jit
def _statistics(
    z: tl.tensor, r: tl.tensor, targets: tl.tensor, out: tl.tensor, columns: tl.tensor, first: tl.tensor,
    z_stride: tl.tensor, r_stride: tl.tensor, out_stride: tl.tensor, out_column: tl.tensor,
    has_reference: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """Partial statistics of row ``program_id``; names as in ``backends.scoring.statistics``."""
    row = tl.program_id(0).to(tl.int64)  # row * stride passes 2**31 at 16,744 rows of 128,256
    z += row * z_stride
    r += row * r_stride
    out += row * out_stride
    minus_inf = float("-inf")
    lane = tl.arange(0, block)
    m = tl.full([block], LOWEST, tl.float32)
    s = tl.zeros([block], tl.float32)
    u = tl.zeros([block], tl.float32)
    tile = tl.zeros([block], tl.int32)
    rm, rs, d, rtile, hole = m, s, u, tile, tile
    for start in range(0, columns, block):
        inside = start + lane < columns
        x = tl.load(z + start + lane, mask=inside, other=minus_inf).to(tl.float32)
        step, weight, higher = _compare(x, m)
        u = tl.where(higher, (u - s * step) * weight, u + weight * step)
        s = tl.where(higher, s * weight + 1.0, s + weight)
        m = tl.where(higher, x, m)
        tile = tl.where(higher, start, tile)
        if has_reference:
            y = tl.load(r + start + lane, mask=inside, other=minus_inf).to(tl.float32)
            step, weight, higher = _compare(y, rm)
            # A token that only the model excludes makes d infinite; kept apart, since d's rescaling could be inf * 0.
            hole = tl.where((x == minus_inf) & (y > minus_inf), 1, hole)
            gap = tl.where(y == minus_inf, 0.0, y - x)
            d = tl.where(higher, d * weight + gap, d + weight * gap)
            rs = tl.where(higher, rs * weight + 1.0, rs + weight)
            rm = tl.where(higher, y, rm)
            rtile = tl.where(higher, start, rtile)

    local = tl.load(targets + row) - first
    here = (local >= 0) & (local < columns)
    target = tl.load(z + local, mask=here, other=minus_inf).to(tl.float32)
    peak = tl.max(m, 0)
    step, weight, higher = _compare(m, peak)
    moment = tl.sum((u + s * step) * weight, 0)
    _store(out, out_column, peak, tl.sum(s * weight, 0), moment, target, first + _first_top(m, peak, tile, lane))
    if has_reference:
        target = tl.load(r + local, mask=here, other=minus_inf).to(tl.float32)
        peak = tl.max(rm, 0)
        step, weight, higher = _compare(rm, peak)
        gap = tl.where(tl.max(hole, 0) > 0, float("inf"), tl.sum(d * weight, 0))
        top = first + _first_top(rm, peak, rtile, lane)
        _store(out + 5 * out_column, out_column, peak, tl.sum(rs * weight, 0), gap, target, top)
