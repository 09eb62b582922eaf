"""``partial`` of ``backends/scoring/divergences.py`` in one Triton kernel: every logit of both is read once more.

One program reduces one row, lane by lane, as in ``backends/scoring/triton_kernel.py``, whose constants and helpers
these are; the maxima are known by now, and nothing has to be moved.  Logarithms are in bits until the end.

The five largest: each lane keeps its largest logit only, which costs two instructions a logit.  By value and then id,
whoever is among the row's five lies in a lane whose largest is among the lanes' five.  So five times the largest of all
lanes is taken, and its lane, one in 256, is read again for what comes after it.
"""

from __future__ import annotations

import torch
import triton.language as tl

from compare_q.backends.scoring.triton_kernel import (
    GROUP,
    LANES,
    LN_2,
    LOG2_E,
    WARPS,
    WIDE,
    _dense,
    _excludes,
    _jit,
    _load,
    _most,
    _over,
    _tile,
)

TOP = tl.constexpr(5)
TILES = tl.constexpr(16)
"""Tiles of a row of which a lane is read again at once: 16 hold 65,536 logits."""
NOWHERE = tl.constexpr(2147483647)


def partial(logits: torch.Tensor, reference: torch.Tensor, whole: torch.Tensor, out: torch.Tensor, first: int) -> None:
    """``divergences.partial`` for at least one column; rows may lie at any distance and alignment."""
    rows, columns = logits.shape
    z, r = _dense(logits), _dense(reference)
    if rows == 0:
        return
    with torch.cuda.device(logits.device if logits.is_cuda else -1):
        _divergences[(rows,)](
            z, r, whole.contiguous(), out, columns, first, z.stride(0), r.stride(0), out.stride(0), out.stride(1),
            lanes=LANES, group=GROUP, num_warps=WARPS, enable_fp_fusion=True,
        )  # fmt: skip


@_jit
def _higher(
    best: tl.tensor, groups: tl.tensor, x: tl.tensor, begin: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Lanes' largest logits, and the first column of the group in which each was first seen, after the next tile."""
    top = _most(x)
    higher = top > best  # never by a NaN
    return tl.where(higher, top, best), tl.where(higher, begin, groups)


@_jit
def _after(
    row: tl.tensor, columns: tl.tensor, home: tl.tensor, peak: tl.tensor, taken: tl.tensor, lanes: tl.constexpr,
    group: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """(value, column) of what comes after column ``taken``, of value ``peak``, in the lane that begins at ``home``."""
    value = tl.full([], float("-inf"), tl.float32)
    column = tl.full([], NOWHERE, tl.int32)
    place = home + tl.arange(0, TILES)[:, None] * (lanes * group) + tl.arange(0, group)[None, :]
    for start in range(0, columns, TILES * lanes * group):
        at = start + place
        x = _load(row, at, columns)
        x = tl.where((x < peak) | ((x == peak) & (at > taken)), x, float("-inf"))
        top = tl.max(tl.max(x, 1), 0)
        where = tl.min(tl.min(tl.where(x == top, at, NOWHERE), 1), 0)
        column = tl.where(top > value, where, column)
        value = tl.maximum(top, value)
    return value, column


@_jit
def _store_tops(
    row: tl.tensor, columns: tl.tensor, first: tl.tensor, best: tl.tensor, groups: tl.tensor, out: tl.tensor,
    stride: tl.tensor, lanes: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    """Values and global ids of the largest logits of a row; -inf and +inf where the row has no more."""
    lane = tl.arange(0, lanes) * group
    for number in tl.static_range(TOP):
        peak = tl.max(best, 0)
        begin = tl.min(tl.where(best == peak, groups, NOWHERE), 0)
        at = begin + tl.arange(0, group)
        found = tl.min(tl.where(_load(row, at, columns) == peak, at, columns), 0)
        there = found < columns
        tl.store(out + number * stride, tl.where(there, peak, float("-inf")))
        tl.store(out + (TOP + number) * stride, tl.where(there, (first + found).to(tl.float32), float("inf")))
        home = begin % (lanes * group) // group * group
        value, column = _after(row, columns, home, peak, found, lanes, group)
        best, groups = tl.where(lane == home, value, best), tl.where(lane == home, column, groups)


@_jit
def _divergences(
    z: tl.tensor, r: tl.tensor, whole: tl.tensor, out: tl.tensor, columns: tl.tensor, first: tl.tensor,
    z_stride: tl.tensor, r_stride: tl.tensor, out_stride: tl.tensor, out_column: tl.tensor,
    lanes: tl.constexpr, group: tl.constexpr,
) -> None:  # fmt: skip
    """The second pass of row ``program_id``; names as in ``compare_q.backends.scoring.divergences``."""
    row = tl.program_id(0).to(tl.int64)
    z += row * z_stride
    r += row * r_stride
    out += row * out_stride
    whole += row * 4
    m, s = tl.load(whole), tl.load(whole + 1) * LOG2_E
    rm, rs = tl.load(whole + 2), tl.load(whole + 3) * LOG2_E
    lane = tl.arange(0, lanes) * group
    place = lane[:, None] + tl.arange(0, group // 2)[None, :]
    best = tl.full([lanes], float("-inf"), tl.float32)
    tv = tl.zeros([lanes], tl.float32)
    reverse, js, widest, rbest, groups, rgroups = tv, tv, tv, best, lane, lane
    for start in range(0, columns, lanes * group):
        x, y = _tile(z, start + place, columns), _tile(r, start + place, columns)
        best, groups = _higher(best, groups, x, start + lane)
        rbest, rgroups = _higher(rbest, rgroups, y, start + lane)
        x, y = tl.fma(x - m, LOG2_E, -s), tl.fma(y - rm, LOG2_E, -rs)
        gap = x - y
        far = tl.abs(gap)
        less = tl.exp2(-far)
        larger = tl.exp2(tl.maximum(x, y))
        smaller = larger * less
        widest = tl.maximum(widest, _most(gap))
        reverse += _over(tl.where(gap > 0, larger, smaller) * gap)
        tv += _over(larger - smaller)
        js += _over((larger + smaller) * (1 - tl.log2(1 + less)) - smaller * far)

    reverse = tl.sum(reverse, 0) * LN_2
    if tl.max(widest, 0) > WIDE:  # rare; a finite logit that low is no exclusion
        known = (s == s) & (rs == rs)
        reverse = tl.where(known & _excludes(r, z, columns, lanes * 4), float("inf"), reverse)
    tl.store(out, reverse)
    tl.store(out + out_column, tl.sum(js, 0) * (LN_2 / 2))
    tl.store(out + 2 * out_column, tl.sum(tv, 0) / 2)
    _store_tops(z, columns, first, best, groups, out + 3 * out_column, out_column, lanes, group)
    _store_tops(r, columns, first, rbest, rgroups, out + (3 + 2 * TOP) * out_column, out_column, lanes, group)
