"""``partial`` of ``backends/scoring/token_statistics.py`` in one Triton kernel.

The kernel reads every logit once.  One program reduces one row.  Each of its LANES reads
GROUP_LOGITS neighbouring logits at a time, with its own running maximum and sums.  The maximum
changes at most once per group, so that a logit costs one exponential and about nine other
instructions, and the loop has no reduction across lanes.  At the end the lanes are merged like
shards.  Exponents are kept in bits (units of ln 2) until the end, because a power of two is the
cheaper exponential.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

LANES = 256
GROUP_LOGITS = 16
WARPS = 8
"""LANES, GROUP_LOGITS and WARPS are the best or second-best of 7 triples.

On an H200 the kernel reaches 0.91 of the bandwidth of a copy for 768 rows without a reference, and
0.75 for 384 rows with a reference.
"""

_jit: Callable[[Callable[..., Any]], Any] = triton.jit

EXCLUDED = tl.constexpr(-1e30)
"""Lower logits are replaced by this value.

Its exponential is 0, and their product is 0; with -inf it would be NaN.
"""
START = tl.constexpr(-5e29)
"""Maximum of a lane before its first value.

It is above EXCLUDED: if all tokens of the lane are excluded, the sums stay 0.
"""
WIDE = tl.constexpr(1e29)
"""A wider gap between two logits means that one is EXCLUDED."""
NO_COLUMN = tl.constexpr(2147483647)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def partial_statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
    first: int,
    reference: torch.Tensor | None,
) -> None:
    """``token_statistics.partial`` for at least one column; rows may have any stride."""
    rows, columns = logits.shape
    z = _dense(logits)
    r = z  # not read without a reference
    if reference is not None:
        r = _dense(reference)
    if rows == 0:
        return
    # Triton launches on the current device, which may be another one than the logits'.  Without a
    # GPU (Triton's interpreter) the context does nothing.
    device: Any = -1
    if logits.is_cuda:
        device = logits.device
    with torch.cuda.device(device):
        _statistics[(rows,)](
            z,
            r,
            targets.contiguous(),
            out,
            columns,
            first,
            z.stride(0),
            r.stride(0),
            out.stride(0),
            out.stride(1),
            has_reference=reference is not None,
            lanes=LANES,
            group=GROUP_LOGITS,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor with neighbouring columns adjacent in memory.

    Only a tensor in another layout is copied.
    """
    if x.stride(1) == 1:
        return x
    return x.contiguous()


@_jit
def _load(row: tl.tensor, index: tl.tensor, columns: tl.tensor) -> tl.tensor:
    """Logits in float32, with ``EXCLUDED`` instead of lower values; NaN stays NaN."""
    x = tl.load(row + index, mask=index < columns, other=float("-inf")).to(tl.float32)
    return tl.maximum(x, EXCLUDED, propagate_nan=tl.PropagateNan.ALL)


@_jit
def _tile(row: tl.tensor, index: tl.tensor, columns: tl.tensor) -> tl.tensor:
    """The next logits of every lane, [lanes, group / 2, 2].

    They are two loads of group / 2 logits, the first at ``index``.
    """
    return tl.join(_load(row, index, columns), _load(row, index + index.shape[1], columns))


@_jit
def _lane_sums(x: tl.tensor) -> tl.tensor:
    """Return the sum of each lane's logits."""
    return tl.sum(tl.sum(x, 2), 1)


@_jit
def _lane_maxima(x: tl.tensor) -> tl.tensor:
    """Return the largest of each lane's logits."""
    return tl.max(tl.max(x, 2), 1)


@_jit
def _in_bits(peak: tl.tensor) -> tl.tensor:
    """A maximum in bits, rounded up to an integer.

    Sums can then be rescaled from one maximum to another exactly, by a power of two.
    """
    return tl.ceil(peak * LOG2_E)


@_jit
def _raise_maxima(
    peak: tl.tensor, x: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Raise the lanes' maxima to their next logits.

    Returns the new maxima; the new maxima in bits; old maxima minus new maxima, in bits; two to the
    power of this difference; True for each maximum that is new.
    """
    top = _lane_maxima(x)
    is_higher = top > peak  # False for NaN
    raised = tl.where(is_higher, top, peak)
    bits = _in_bits(raised)
    move = _in_bits(peak) - bits
    return raised, bits[:, None, None], move, tl.exp2(move), is_higher


@_jit
def _merge_lanes(
    peaks: tl.tensor, sums: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Merge the lanes' maxima and sums.

    Returns the row's maximum; its sum; each lane's maximum minus the row's, in bits; two to the
    power of that difference.
    """
    peak = tl.max(peaks, 0)
    # fma rounds once, and only the difference, which is small: its product is exact.
    move = tl.where(peak <= START, START, tl.fma(-peak, LOG2_E, _in_bits(peaks)))
    scale = tl.exp2(move)
    return peak, tl.sum(sums * scale, 0), move, scale


@_jit
def _first_top(
    row: tl.tensor,
    columns: tl.tensor,
    peaks: tl.tensor,
    peak: tl.tensor,
    groups: tl.tensor,
    group: tl.constexpr,
) -> tl.tensor:
    """The first column that holds the row's maximum.

    ``groups``: for each lane, the first column of the group that has the lane's maximum.
    """
    begin = tl.min(tl.where(peaks == peak, groups, NO_COLUMN), 0)
    index = begin + tl.arange(0, group)
    # A row without a logit above START has START as its maximum.
    is_top = tl.maximum(_load(row, index, columns), START) == peak
    column = tl.min(tl.where(is_top, index, NO_COLUMN), 0)
    # A maximum of NaN equals no logit: any valid column will do.
    return tl.minimum(column, columns - 1)


@_jit
def _excludes(z: tl.tensor, r: tl.tensor, columns: tl.tensor, step: tl.constexpr) -> tl.tensor:
    """True if the model excludes a token (-inf) that the reference allows."""
    is_excluded = tl.zeros([step], tl.int32)
    for start in range(0, columns, step):
        index = start + tl.arange(0, step)
        x = tl.load(z + index, mask=index < columns, other=0.0)
        y = tl.load(r + index, mask=index < columns, other=0.0)
        is_excluded = tl.where((x == float("-inf")) & (y > float("-inf")), 1, is_excluded)
    return tl.max(is_excluded, 0) > 0


@_jit
def _store(
    out: tl.tensor,
    stride: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    moment: tl.tensor,
    target: tl.tensor,
    top: tl.tensor,
) -> None:
    """Store one model's half of an output row, in the order of ``token_statistics.Column``."""
    # A sum of 0: all tokens are excluded.
    tl.store(out, tl.where(total == 0, float("-inf"), peak))
    tl.store(out + stride, total)
    tl.store(out + 2 * stride, moment)
    tl.store(out + 3 * stride, target)
    tl.store(out + 4 * stride, top.to(tl.float32))


@_jit
def _statistics(
    z: tl.tensor,
    r: tl.tensor,
    targets: tl.tensor,
    out: tl.tensor,
    columns: tl.tensor,
    first: tl.tensor,
    z_stride: tl.tensor,
    r_stride: tl.tensor,
    out_stride: tl.tensor,
    out_column: tl.tensor,
    has_reference: tl.constexpr,
    lanes: tl.constexpr,
    group: tl.constexpr,
) -> None:
    """Partial statistics of row ``program_id``.

    Names are as in ``backends/scoring/token_statistics.py``: m, s and u (in bits) of each lane for
    the model, ref_m, ref_s and d for the reference.
    """
    row = tl.program_id(0).to(tl.int64)  # row * stride passes 2**31 at 16,744 rows of 128,256
    z += row * z_stride
    r += row * r_stride
    out += row * out_stride
    lane = tl.arange(0, lanes) * group
    offsets = lane[:, None] + tl.arange(0, group // 2)[None, :]
    m = tl.full([lanes], START, tl.float32)
    s = tl.zeros([lanes], tl.float32)
    u = tl.zeros([lanes], tl.float32)
    groups = lane
    ref_m = m
    ref_s = s
    d = u
    widest = s
    ref_groups = lane
    for start in range(0, columns, lanes * group):
        x = _tile(z, start + offsets, columns)
        m, bits, move, scale, is_higher = _raise_maxima(m, x)
        groups = tl.where(is_higher, start + lane, groups)
        exponent = tl.fma(x, LOG2_E, -bits)
        weight = tl.exp2(exponent)
        # The sums move to the new maximum; u changes with it: sum w (e + move) = u + s * move.
        u = (u + s * move) * scale + _lane_sums(weight * exponent)
        s = s * scale + _lane_sums(weight)
        if has_reference:
            y = _tile(r, start + offsets, columns)
            ref_m, bits, move, scale, is_higher = _raise_maxima(ref_m, y)
            ref_groups = tl.where(is_higher, start + lane, ref_groups)
            weight = tl.exp2(tl.fma(y, LOG2_E, -bits))
            gap = y - x
            widest = tl.maximum(widest, _lane_maxima(gap))
            d = d * scale + _lane_sums(weight * gap)
            ref_s = ref_s * scale + _lane_sums(weight)

    local = tl.load(targets + row) - first
    is_inside = (local >= 0) & (local < columns)
    target = tl.load(z + local, mask=is_inside, other=float("-inf")).to(tl.float32)
    peak, total, move, scale = _merge_lanes(m, s)
    moment = LN_2 * tl.sum((u + s * move) * scale, 0)
    top = first + _first_top(z, columns, m, peak, groups, group)
    _store(out, out_column, peak, total, moment, target, top)
    if has_reference:
        target = tl.load(r + local, mask=is_inside, other=float("-inf")).to(tl.float32)
        peak, total, _, scale = _merge_lanes(ref_m, ref_s)
        gaps = tl.sum(d * scale, 0)
        # Rare.  A very low finite logit makes such a gap too, but is not excluded.
        if tl.max(widest, 0) > WIDE:
            gaps = tl.where(_excludes(z, r, columns, lanes * 4), float("inf"), gaps)
        top = first + _first_top(r, columns, ref_m, peak, ref_groups, group)
        _store(out + 5 * out_column, out_column, peak, total, gaps, target, top)
