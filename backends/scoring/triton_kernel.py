"""``partial`` of ``backends/scoring/statistics.py`` in one Triton kernel: every logit is read once, nothing is stored.

One program reduces one row.  Each of its LANES walks down the row, GROUP neighbouring logits at a time, with its own
running maximum and sums: the maximum moves at most once a group, so that a logit costs one exponential and about ten
other operations, and the loop has no reduction across lanes.  At the end the lanes are put together in the way in which
shards are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

LANES, GROUP, WARPS = 512, 8, 8
"""On an H200 (driver 580.159.04, Triton 3.6) 512 rows of 128,256 bf16 logits against a reference took 89 us, at 0.70 of
the copy bandwidth; of 24 triples only (1024, 8, 16) was better there, with 0.73.  Without a reference (256, 8, 8) was
the best, 0.79 where this one takes 0.67 (``benchmarks/cuda_statistics.py --sweep``)."""

_jit: Callable[[Callable[..., Any]], Any] = triton.jit

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""A lane's maximum before its first value: the lowest finite float32, since -inf - -inf would be NaN."""

LOG2_E = tl.constexpr(1.4426950408889634)
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
            has_reference=reference is not None, lanes=LANES, group=GROUP, num_warps=WARPS, enable_fp_fusion=True,
        )  # fmt: skip


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Columns side by side; a copy only of a tensor that lies the other way round."""
    return x if x.stride(1) == 1 else x.contiguous()


@_jit
def _far(x: tl.tensor) -> tl.tensor:
    """x within +-FAR; for a NaN one of the two."""
    return tl.minimum(tl.maximum(x, -FAR), FAR)


@_jit
def _move(peak: tl.tensor, x: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of lanes' maxima and their next logits [lanes, group]: new maxima, old less new, exp(that), which are new."""
    top = tl.max(x, 1)
    higher = top > peak  # never by a NaN
    moved = tl.where(higher, top, peak)
    move = _far(peak - moved)
    return moved, move, tl.exp2(move * LOG2_E), higher


@_jit
def _first_top(
    row: tl.tensor, columns: tl.tensor, peaks: tl.tensor, peak: tl.tensor, groups: tl.tensor, group: tl.constexpr
) -> tl.tensor:
    """The first column of a row that holds its maximum; ``groups`` is where each lane's maximum was first seen."""
    begin = tl.min(tl.where(peaks == peak, groups, 2147483647), 0)
    at = begin + tl.arange(0, group)
    x = tl.load(row + at, mask=at < columns, other=float("-inf")).to(tl.float32)
    return tl.minimum(tl.min(tl.where(tl.maximum(x, LOWEST) == peak, at, 2147483647), 0), columns - 1)


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
def _statistics(
    z: tl.tensor, r: tl.tensor, targets: tl.tensor, out: tl.tensor, columns: tl.tensor, first: tl.tensor,
    z_stride: tl.tensor, r_stride: tl.tensor, out_stride: tl.tensor, out_column: tl.tensor,
    has_reference: tl.constexpr, lanes: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    """Partial statistics of row ``program_id``; names as in ``backends.scoring.statistics``."""
    row = tl.program_id(0).to(tl.int64)  # row * stride passes 2**31 at 16,744 rows of 128,256
    z += row * z_stride
    r += row * r_stride
    out += row * out_stride
    lane = tl.arange(0, lanes) * group
    place = lane[:, None] + tl.arange(0, group)[None, :]
    m = tl.full([lanes], LOWEST, tl.float32)
    s = tl.zeros([lanes], tl.float32)
    u = tl.zeros([lanes], tl.float32)
    groups = lane
    rm, rs, d, widest, rgroups = m, s, u, s, lane
    for start in range(0, columns, lanes * group):
        inside = start + place < columns
        x = tl.load(z + start + place, mask=inside, other=float("-inf")).to(tl.float32)
        m, move, scale, higher = _move(m, x)
        groups = tl.where(higher, start + lane, groups)
        step = x - m[:, None]
        weight = tl.exp2(step * LOG2_E)
        u = (u + s * move) * scale + tl.sum(weight * tl.maximum(step, -FAR), 1)
        s = s * scale + tl.sum(weight, 1)
        if has_reference:
            y = tl.load(r + start + place, mask=inside, other=float("-inf")).to(tl.float32)
            rm, move, scale, higher = _move(rm, y)
            rgroups = tl.where(higher, start + lane, rgroups)
            weight = tl.exp2((y - rm[:, None]) * LOG2_E)
            gap = y - x
            # A token that only the model excludes makes d infinite; kept apart, since d's rescaling could be inf * 0.
            widest = tl.maximum(widest, tl.max(gap, 1))
            d = d * scale + tl.sum(weight * _far(gap), 1)
            rs = rs * scale + tl.sum(weight, 1)

    local = tl.load(targets + row) - first
    here = (local >= 0) & (local < columns)
    target = tl.load(z + local, mask=here, other=float("-inf")).to(tl.float32)
    peak = tl.max(m, 0)
    scale = tl.exp2((m - peak) * LOG2_E)
    moment = tl.sum((u + s * _far(m - peak)) * scale, 0)
    _store(out, out_column, peak, tl.sum(s * scale, 0), moment, target,
           first + _first_top(z, columns, m, peak, groups, group))  # fmt: skip
    if has_reference:
        target = tl.load(r + local, mask=here, other=float("-inf")).to(tl.float32)
        peak = tl.max(rm, 0)
        scale = tl.exp2((rm - peak) * LOG2_E)
        total = tl.sum(d * scale, 0)
        total = tl.where(tl.max(widest, 0) == float("inf"), float("inf"), total)
        _store(out + 5 * out_column, out_column, peak, tl.sum(rs * scale, 0), total, target,
               first + _first_top(r, columns, rm, peak, rgroups, group))  # fmt: skip
