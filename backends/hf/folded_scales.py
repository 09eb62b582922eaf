"""Tell whether two modules differ only by quantization, or also by scales folded into channels.

Quantizers may multiply output channels of one matrix by factors, and divide the input channels of
the matrix that reads them by the same factors (up and down, v and o).  No norm changes.  Both
matrices then differ from the reference's, although the model computes the same.

Rounding has another trace than such factors.  Let c be the factor of a channel: the least-squares
factor of the reference's channel in the quantized one.  Rounding to nearest makes small weights
zero, so that c falls below 1, down to 0 for channels of small weights in 2 bits, but hardly rises
above 1.  If factors are folded, c is above 1 for many channels of one of the two matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

SAMPLE = 256
"""Largest number of input channels of a matrix, or of rows of an embedding, that are compared."""
EXPERTS = 4
"""Largest number of experts of a layer that are compared, spread over all of them."""
LARGEST_FACTOR = 1.15
"""A channel with a larger factor counts as scaled (``scaled_share``)."""
LARGEST_SHARE = 0.05
"""Largest share of scaled channels of a matrix that counts as quantization.

Measured on SmolLM2-135M.  W4A16 in groups of 32, NVFP4A16, NVFP4 and W8A8: 0 in all 210 matrices.
Round-to-nearest with 2 bits (groups of 32 and 96, whole rows, with and without zero points): at
most 0.035.  Up and down with factors of 0.5 to 2, uniform in their logarithm: 0.31 to 0.42 in
W4A16, and at least 0.18 with 2 bits.  Factors of 1 / 1.3 to 1.3 in 4 bits: at least 0.19, of
1 / 1.2 to 1.2: 0.062 to 0.082.  Smaller factors (1 / 1.1 to 1.1: 0) are not noticed.
"""
SMALLEST_COSINE = 0.5
"""Smallest cosine of the weights of two matrices that counts as quantization.

Measured on the same models: at least 0.988 in 4 and 8 bits, and 0.69 in 2 bits with one scale per
row.  After a random rotation of the states between the layers, all are between -0.04 and 0.
"""


def is_same_up_to_rounding(module: torch.nn.Module, reference: torch.nn.Module) -> bool:
    """Return True if two modules compute the same function up to quantization.

    False if that is not known, because the modules cannot be compared (``responses``).
    """
    pairs = list(responses(module, reference))
    for response, reference_response in pairs:
        # False for NaN.
        if not cosine(response, reference_response) >= SMALLEST_COSINE:
            return False
        shares = [
            scaled_share(response, reference_response),
            scaled_share(response.T, reference_response.T),
        ]
        if max(shares) > LARGEST_SHARE:
            return False
    return bool(pairs)


def cosine(matrix: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the cosine of all numbers of two matrices."""
    return float((matrix * reference).sum() / (matrix.norm() * reference.norm()))


def scaled_share(matrix: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the share of rows of a matrix [R, C] that are multiples of the reference's rows.

    A row w has the factor c = <w, r> / <r, r> (least squares) and the relative residual
    |w - c r| / |r|.  The standard error of c is the residual / sqrt(C).  A row counts if c minus
    two errors is above ``LARGEST_FACTOR``.
    """
    power = reference.square().sum(1)
    is_known = power > 0
    power = power[is_known]
    if not len(power):
        return 0.0
    factors = (matrix * reference).sum(1)[is_known] / power
    squared_residuals = matrix.square().sum(1)[is_known] / power - factors.square()
    # Roundings of the difference may be below 0.
    errors = (squared_residuals.clamp(min=0.0) / matrix.shape[1]).sqrt()
    return float((factors - 2 * errors > LARGEST_FACTOR).float().mean())


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
