"""Tell whether two modules differ only by quantization, or also by scales folded into channels.

Quantizers may multiply output channels of one matrix by factors, and divide the input channels of
the matrix that reads them by the same factors (up and down, v and o).  No norm changes.  Both
matrices then differ from the reference's, although the model computes the same.

Rounding has another trace than such factors.  Let c be the factor of a channel: the least-squares
factor of the reference's channel in the quantized one.  A channel that was multiplied by a factor
keeps its direction, and c is the factor.  Rounding with few bits changes c as well, but then the
direction too: zeros make c smaller, and formats without a zero (or with a coarse grid) enlarge
small weights.  If factors are folded, c is above 1 for many channels of one of the two matrices.

A matrix whose channels all have the same factor, as after an error in its scales, is not taken for
a folded one: its module computes something else alone, not together with a neighbour.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

SAMPLE = 256
"""Largest number of input channels of a matrix, or of rows of an embedding, that are compared."""
EXPERTS = 4
"""Largest number of experts of a layer that are compared, spread over all of them."""
LARGEST_FACTOR = 1.15
"""A channel with a larger factor counts as scaled (``scaled_share``)."""
DIRECTION = 0.85
"""Smallest cosine of a channel and the reference's that counts as scaled."""
LARGEST_SHARE = 0.05
"""Largest share of scaled channels of a matrix that counts as quantization.

Measured on SmolLM2-135M, on 24 of its matrices.  Rounding to nearest with 1 to 4 bits (groups of 32
and whole rows; with zero points; levels at -1.5, -0.5, 0.5 and 1.5): 0 in all.  Factors of 0.5 to
2, uniform in their logarithm: at least 0.33 in 4 bits, and 0.29 with 2 bits; 1 to 4: at least 0.32.
Factors of 1 / 1.3 to 1.3: at least 0.16 in 4 bits, and 0.042 with 2 bits.  Smaller factors
(1 / 1.1 to 1.1: 0) are not noticed.
"""
SMALLEST_COSINE = 0.5
"""Smallest cosine of the weights of two matrices that counts as quantization.

Measured on the same models: at least 0.988 in 4 and 8 bits, and 0.69 in 2 bits with one scale per
row.  After a random rotation of the states between the layers, all are between -0.04 and 0.
"""


def factor_up_to_rounding(module: torch.nn.Module, reference: torch.nn.Module) -> float | None:
    """Return the median factor of a module's channels; 1 if only quantization changed them.

    None if some channels have another factor than the rest, or if that is not known, because the
    modules cannot be compared (``responses``).
    """
    medians = []
    for response, reference_response in responses(module, reference):
        # False for NaN.
        if not cosine(response, reference_response) >= SMALLEST_COSINE:
            return None
        rows = channel_factors(response, reference_response)
        columns = channel_factors(response.T, reference_response.T)
        if max(scaled_share(rows), scaled_share(columns)) > LARGEST_SHARE:
            return None
        if len(rows.factors):
            medians.append(float(rows.factors.median()))
    if not medians:
        return None
    return statistics.median(medians)


def opposite(factors: Mapping[str, float]) -> list[str]:
    """Return the modules of a layer whose factors may cancel: some are above 1, others below.

    Factors between 1 / ``LARGEST_FACTOR`` and ``LARGEST_FACTOR`` count as 1.  Empty if there are
    not both larger and smaller ones.
    """
    larger = [name for name, factor in factors.items() if factor > LARGEST_FACTOR]
    smaller = [name for name, factor in factors.items() if factor < 1 / LARGEST_FACTOR]
    if larger and smaller:
        return larger + smaller
    return []


def cosine(matrix: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the cosine of all numbers of two matrices."""
    return float((matrix * reference).sum() / (matrix.norm() * reference.norm()))


class ChannelFactors(NamedTuple):
    """The factors [C] of channels, their standard errors, and the cosines of the channels."""

    factors: torch.Tensor
    errors: torch.Tensor
    cosines: torch.Tensor


def channel_factors(matrix: torch.Tensor, reference: torch.Tensor) -> ChannelFactors:
    """Return the factors of the rows of a matrix [R, C]; rows whose reference is 0 are left out.

    A row w has the factor c = <w, r> / <r, r> (least squares) and the relative residual
    |w - c r| / |r|.  The standard error of c is the residual / sqrt(C).
    """
    reference_power = reference.square().sum(1)
    is_known = reference_power > 0
    reference_power = reference_power[is_known]
    products = (matrix * reference).sum(1)[is_known]
    power = matrix.square().sum(1)[is_known]
    factors = products / reference_power
    squared_residuals = power / reference_power - factors.square()
    # Roundings of the difference may be below 0.
    errors = (squared_residuals.clamp(min=0.0) / matrix.shape[1]).sqrt()
    cosines = products / (power * reference_power).sqrt()
    return ChannelFactors(factors, errors, cosines)


def scaled_share(channels: ChannelFactors) -> float:
    """Return the share of channels that are scaled, while others are not.

    A channel is scaled if its cosine is at least ``DIRECTION``, and its factor minus two standard
    errors above ``LARGEST_FACTOR``; if the median of all factors is above 1, relative to that.
    """
    if not len(channels.factors):
        return 0.0
    common = max(1.0, float(channels.factors.median()))
    is_larger = channels.factors - 2 * channels.errors > common * LARGEST_FACTOR
    # False for rows of zeros.
    keeps_direction = channels.cosines >= DIRECTION
    return float((is_larger & keeps_direction).float().mean())


def responses(
    module: torch.nn.Module, reference: torch.nn.Module
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what two modules return for the same inputs, as float32 matrices.

    The inputs of a linear layer are one-hot: the response is that of single input channels.  An
    embedding gets token ids.  Of all experts of a layer in one module, the weights of some are
    compared.  Nothing is yielded for other modules.
    """
    with torch.inference_mode():
        if isinstance(reference, torch.nn.Embedding):
            ids = spread(reference.num_embeddings, SAMPLE).to(reference.weight.device)
            yield module(ids).float(), reference(ids).float()
        elif hasattr(reference, "in_features"):
            inputs = one_hot_inputs(reference)
            yield without_bias(module, inputs), without_bias(reference, inputs)
        else:
            yield from expert_weights(module, reference)


def spread(count: int, most: int) -> torch.Tensor:
    """Return at most ``most`` different indices below ``count``, from the first to the last."""
    n_indices = min(count, most)
    return torch.linspace(0, count - 1, n_indices, dtype=torch.float64).round().long()


def one_hot_inputs(module: Any) -> torch.Tensor:
    """Return inputs [n, in] of a linear layer, each with a single 1."""
    columns = spread(module.in_features, SAMPLE)
    inputs = torch.zeros(len(columns), module.in_features)
    inputs[torch.arange(len(columns)), columns] = 1.0
    return inputs.to(module.weight.device, module.weight.dtype)


def without_bias(module: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Return the outputs of a linear layer without its bias, in float32."""
    outputs: torch.Tensor = module(inputs).float()
    bias: torch.Tensor | None = getattr(module, "bias", None)
    if bias is None:
        return outputs
    return outputs - bias.float()


def expert_weights(
    module: torch.nn.Module, reference: torch.nn.Module
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield matrices of some experts; nothing if the weights are not floats of one shape."""
    weights = dict(module.named_parameters())
    pairs = []
    for name, reference_weight in reference.named_parameters():
        if reference_weight.ndim != 3:
            continue
        weight = weights.get(name)
        if weight is None or weight.shape != reference_weight.shape:
            return
        if not weight.dtype.is_floating_point or weight.element_size() < 2:
            return
        pairs.append((weight, reference_weight))
    for weight, reference_weight in pairs:
        for expert in spread(len(weight), EXPERTS).tolist():
            yield weight[expert].float(), reference_weight[expert].float()


def rounds_alike(module: Any, reference: Any) -> bool:
    """Return True if two modules with the same weights return the same, bit for bit.

    They do not if one of them rounds its activations.
    """
    if not hasattr(reference, "in_features"):
        return True
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, reference.in_features, generator=generator).to(reference.weight)
    with torch.inference_mode():
        return torch.equal(module(inputs), reference(inputs))
