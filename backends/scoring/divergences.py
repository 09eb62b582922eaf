"""Reverse KLD, Jensen-Shannon, total variation and top-5 agreement, in a second pass over the same logits.

With p = softmax(r) of the reference and q = softmax(z) of the model, as in ``backends/scoring/statistics.py``:

    reverse_kld  sum q (ln q - ln p)                                    tv    1/2 sum |p - q|
    js           1/2 sum p ln(p / m) + 1/2 sum q ln(q / m), m = (p + q) / 2
    top5         |A and B| / 5, A and B the five most probable tokens of each (of equals, the lowest ids)

JS and TV of a token need both of its probabilities, and these need the sums over the whole vocabulary.  Ranks therefore
exchange their rows of the first pass (``normalizers``) before ``partial`` reads the logits again.  With
x = ln q - ln p, M the larger of p and q, and y = 1 - exp(-|x|), a token adds

    q x      to reverse_kld        M y / 2      to tv        M ((y - 2) ln(1 - y / 2) - (1 - y) |x|) / 2      to js

Equal logits give x = 0 and exactly 0.  Nothing is added or clamped: rounding leaves an error of about 1e-7, of either
sign, so tv may be 1 + 1e-7.  A token that both models exclude (-inf) adds 0.  A token that only the model allows makes
reverse_kld +inf; tv and js stay finite, at most 1 and ln 2.  All four are NaN if a logit is NaN or +inf, or if all
tokens are excluded.  For top5, excluded tokens count too, after all others, so that there are always five; if V < 5,
all V tokens are used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compare_q.backends.base import TokenScores
from compare_q.backends.scoring import statistics
from compare_q.backends.scoring.statistics import Column

if TYPE_CHECKING:
    import torch

TOP = 5
"""Tokens whose agreement is counted."""
SUMS = 3
"""Columns of a row of the second pass, float32: the three sums in the order of the docstring's names, then the values
of the model's ``TOP`` largest logits, their global ids, and the same of the reference.  Where there are fewer columns,
the value is -inf and the id +inf."""
WIDTH = SUMS + 4 * TOP
FIRST = statistics.width(True)
"""Columns of the first pass, which come before those of the second."""
LOWEST = -1e30
"""Lower logits count as equal to this one in ``TOP``; an excluded token then ranks above a token already taken."""


def width(has_reference: bool, with_divergences: bool = False) -> int:
    """Columns of a row of both passes."""
    return statistics.width(has_reference) + (WIDTH if has_reference and with_divergences else 0)


def normalizers(rows: torch.Tensor) -> torch.Tensor:
    """Rows [R, n, >= 10] of the first pass of all R shards -> float32 [n, 4]: m, ln s, and both for the reference.

    m is the largest logit of all shards, s the sum of exp(z - m); ln s is NaN if the logits do not form a distribution.
    """
    import torch

    sides = []
    for begin in (0, Column.REF_MAX):
        peaks, sums = (rows[..., begin + column].double() for column in (Column.MAX, Column.SUM))
        peak = peaks.amax(0)
        sides += [peak, (sums * (peaks - peak).exp()).sum(0).log()]
    return torch.stack(sides, -1).float()


def partial(
    logits: torch.Tensor, reference: torch.Tensor, whole: torch.Tensor, out: torch.Tensor, *, first: int = 0
) -> None:
    """Write the second pass of one slice of the vocabulary into ``out`` float32 [n, ``WIDTH``].

    ``logits`` and ``reference`` [n, V_local] as ``statistics.partial`` takes them; ``whole``: their ``normalizers``.
    ValueError if the shapes do not fit.
    """
    rows, columns = logits.shape
    shapes = [tuple(each.shape) for each in (reference, whole, out)]
    if shapes != [(rows, columns), (rows, 4), (rows, WIDTH)]:
        raise ValueError(f"reference, normalizers and out of shapes {shapes} for logits {(rows, columns)}")
    fused = statistics.triton_kernels() if logits.is_cuda and columns > 0 else None
    (fused.partial_divergences if fused else torch_partial)(logits, reference, whole, out, first)


def torch_partial(
    logits: torch.Tensor, reference: torch.Tensor, whole: torch.Tensor, out: torch.Tensor, first: int
) -> None:
    """``partial`` in torch operations."""
    import torch

    rows, columns = logits.shape
    if columns == 0:  # a rank that holds only padding
        nothing = [0.0] * SUMS + ([-math.inf] * TOP + [math.inf] * TOP) * 2
        out[:] = torch.tensor(nothing, device=out.device)
        return
    on_cpu = logits.device.type == "cpu"
    step = max((statistics.CPU_ELEMENTS if on_cpu else statistics.DEVICE_ELEMENTS) // columns, 1)
    with torch.no_grad():
        for begin in range(0, rows, step):
            part = slice(begin, begin + step)
            z, r = logits[part].float(), reference[part].float()
            _sums(z, r, whole[part], out[part], careful=not on_cpu)
            if on_cpu and bool(out[part, :SUMS].isnan().any()):  # as in the first pass
                _sums(z, r, whole[part], out[part], careful=True)
            _tops(z, first, out[part, SUMS : SUMS + 2 * TOP])
            _tops(r, first, out[part, SUMS + 2 * TOP :])


def _sums(z: torch.Tensor, r: torch.Tensor, whole: torch.Tensor, out: torch.Tensor, careful: bool) -> None:
    """The three sums of one sub-chunk, float32.  Unless ``careful``, excluded tokens produce a NaN."""
    import torch

    peak, log_sum, ref_peak, ref_log_sum = whole.unsqueeze(-1).unbind(1)
    log_q, log_p = z.sub(peak).sub_(log_sum), r.sub(ref_peak).sub_(ref_log_sum)
    far = log_q - log_p
    larger = torch.maximum(log_q, log_p).exp_()
    if careful:
        only_model = (r == -math.inf) & (z > -math.inf)
        far.masked_fill_((z == -math.inf) & (r == -math.inf), 0.0)
        terms = log_q.exp_().mul(far).masked_fill_(z == -math.inf, 0.0).masked_fill_(only_model, math.inf)
        out[:, 0] = terms.sum(-1).where(log_sum[:, 0].isfinite() & ref_log_sum[:, 0].isfinite(), math.nan)
    else:
        out[:, 0] = log_q.exp_().mul_(far).sum(-1)
    gap = far.abs_().neg().expm1_().neg_()
    if careful:
        far.masked_fill_(far == math.inf, 0.0)  # 0 times infinity
    out[:, 2] = larger.mul(gap).sum(-1).mul_(0.5)
    middle = gap.mul(-0.5).log1p_().mul_(gap - 2)
    out[:, 1] = middle.sub_(gap.neg_().add_(1).mul_(far)).mul_(larger).sum(-1).mul_(0.5)


def _tops(x: torch.Tensor, first: int, out: torch.Tensor) -> None:
    """Values and global ids of the largest logits of x [n, V] into out [n, 2 TOP], the first of equals first.

    torch.topk does not define the order of equal values, and bf16 logits often are equal.  Five calls of numpy's argmax
    take about as long as torch.topk (256 rows of 49,152: 16 ms and 18 ms).
    """
    out[:, :TOP], out[:, TOP:] = -math.inf, math.inf
    left = x.clamp(min=LOWEST)
    for number in range(min(TOP, x.shape[1])):
        top = statistics.argmax(left)[:, None]
        out[:, number] = left.gather(1, top)[:, 0]
        out[:, TOP + number] = top[:, 0] + first
        left.scatter_(1, top, -math.inf)


def scores(window: int, targets: NDArray[Any], shards: Sequence[NDArray[np.float32]]) -> TokenScores:
    """Return ``statistics.scores`` of shards [T, F] of any ``width``, with divergences if they have the second pass."""
    found = statistics.scores(window, targets, [shard[:, :FIRST] for shard in shards])
    if {shard.shape for shard in shards} != {(len(targets), FIRST + WIDTH)}:
        return found
    second = np.stack([shard[:, FIRST:] for shard in shards]).astype(np.float64)
    reverse_kld, js, tv = second[..., :SUMS].sum(0).astype(np.float32).T
    tops = [_first_five(second[..., begin : begin + 2 * TOP]) for begin in (SUMS, SUMS + 2 * TOP)]
    both = (tops[0][:, :, None] == tops[1][:, None, :]) & np.isfinite(tops[0])[:, :, None]
    share = both.sum((1, 2)) / np.maximum(np.isfinite(tops[0]).sum(1), 1)
    top5 = np.where(np.isnan(tv), np.nan, share).astype(np.float32)
    return replace(found, reverse_kld=reverse_kld, js=js, tv=tv, top5=top5)


def _first_five(tops: NDArray[np.float64]) -> NDArray[np.float64]:
    """The ids [T, TOP] of the largest of all shards' [R, T, 2 TOP] values; if values are equal, the lowest ids."""
    values, ids = (np.concatenate(list(part), axis=-1) for part in (tops[..., :TOP], tops[..., TOP:]))
    order = np.lexsort((ids, -values), axis=-1)[:, :TOP]
    return np.take_along_axis(ids, order, -1)
