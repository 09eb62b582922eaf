"""The table of results/h200, as fixed data for what must hold of pictures of a real table.

Labels, sizes, PPL and KLD are those of the table; errors are those of 40 windows of its text, larger than of all 586.
"""

from __future__ import annotations

import functools

import numpy as np

from compare_q.backends.base import Storage
from compare_q.eval.results import ModelResult, TextResult
from compare_q.eval.stats.distributions import Curve, histogram_of, percentiles_of
from compare_q.eval.stats.uncertainty import Mean, Perplexity
from tests.support import made
from tests.support.made import replace, text_result

# label, bits per weight, stored bits, PPL, KLD, PPL * error of ln(PPL / PPL(reference)), error of KLD
ROWS = (
    ("bf16 vLLM", 16, 3057647616, 21.991, 0, None, None),
    ("bf16 Transformers", 16, 3057647616, 21.9954, 0.00154269, 0.00293, 9.7e-06),
    ("bf16 ExLlamaV3", 16, 3057647616, 21.9809, 0.000866015, 0.00302, 1.2e-05),
    ("bf16 llama.cpp", 16, 3057647616, 21.9831, 0.000944018, 0.00321, 5e-06),
    ("W4A16 g128", 4.125, 1236566016, 34.412, 0.536845, 1.37, 0.0053),
    ("W4A16 g32", 4.5, 1294073856, 30.3245, 0.386937, 0.93, 0.0042),
    ("W8A16 g128", 8.125, 1849982976, 22.0944, 0.00360226, 0.00876, 3.8e-05),
    ("W8A8 int8", 8.018, 1833639936, 22.6494, 0.0304567, 0.0795, 0.00032),
    ("FP8 dynamic", 8.018, 1833639936, 22.6033, 0.0305576, 0.086, 0.00037),
    ("NVFP4 W4A16", 4.5, 1294080576, 28.1806, 0.237398, 0.674, 0.0027),
    ("NVFP4 W4A4 as run", 4.5, 1294080576, 28.1806, 0.237398, 0.667, 0.0024),
    ("NVFP4 W4A4 emulated", 4.5, 1294080576, 34.8666, 0.444185, 1.39, 0.0052),
    ("EXL3 2.0 bpw", 2.038, 539781728, 46.9971, 0.759238, 2.64, 0.006),
    ("EXL3 2.5 bpw", 2.538, 616458848, 31.2984, 0.353927, 1.02, 0.0022),
    ("EXL3 3.0 bpw", 3.038, 693135968, 25.8778, 0.173833, 0.427, 0.0013),
    ("EXL3 3.5 bpw", 3.538, 769813088, 23.7243, 0.0869235, 0.185, 0.00072),
    ("EXL3 4.0 bpw", 4.038, 846490208, 22.8556, 0.0464658, 0.0856, 0.00074),
    ("EXL3 5.0 bpw", 5.038, 999844448, 22.1922, 0.0145828, 0.0284, 0.0001),
    ("EXL3 6.0 bpw", 6.038, 1153198688, 22.0787, 0.00620981, 0.0135, 6e-05),
    ("GGUF Q2_K", 2.938, 698204160, 553.473, 3.18137, 59.4, 0.027),
    ("GGUF Q3_K_M", 3.856, 839122944, 33.4522, 0.383953, 1.21, 0.0039),
    ("GGUF Q4_0", 4.5, 937820160, 27.3994, 0.295632, 0.594, 0.0036),
    ("GGUF Q4_K_M", 4.759, 977559552, 22.5554, 0.0290825, 0.0596, 0.00032),
    ("GGUF Q5_K_M", 5.633, 1111646208, 22.6872, 0.0308878, 0.0756, 0.00027),
    ("GGUF Q6_K", 6.562, 1254113280, 22.5353, 0.0220515, 0.0585, 0.00018),
    ("GGUF Q8_0", 8.5, 1624375296, 22.0841, 0.00485109, 0.0096, 4.9e-05),
    ("GGUF F16", 16, 3057647616, 21.9845, 0.000968678, 0.00228, 1.1e-05),
)
EMBEDDING = 75_497_472
"""Bytes of the embedding (49,152 x 768 in bfloat16), which files hold and VRAM does not count."""
FLOOR = "bf16 Transformers"
MARKED = "NVFP4 W4A4 as run"
EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@functools.cache
def token_klds(kld: float) -> np.ndarray:
    """Token KLDs with that mean: lognormal, but a hundredth of them 0."""
    made_up = np.random.default_rng(0).lognormal(-1.1, 1.5, 5000) * (np.arange(5000) % 100 > 0)
    return made_up * kld / made_up.mean()


def row_result(row: tuple) -> ModelResult:
    """One row as a result; position b of its curves is 1 + 8 / b times its KLD, and PPL."""
    label, bpw, bits, ppl, kld, ppl_error, kld_error = row
    bends = [1 + 8 / edge for edge in EDGES[:-1]]
    curve = Curve(EDGES, tuple(np.log(ppl) * b for b in bends), tuple(kld * b for b in bends) if kld else None)
    against = None
    if kld:
        against = replace(
            made.AGAINST,
            ref_ppl=Perplexity(ROWS[0][3], 0.0, 40, 0),
            ln_ppl_ratio=Mean(float(np.log(ppl / ROWS[0][3])), 0.0, 40, 0, ppl_error / ppl),
            kld=Mean(kld, 0.0, 40, 0, kld_error),
            kld_percentiles=percentiles_of(token_klds(kld)),
            kld_histogram=histogram_of(token_klds(kld)),
        )
    estimates = replace(made.ALONE, ppl=Perplexity(ppl, 0.0, 40, 0, 0.1 * ppl), against=against, curve=curve)
    layers = made.LAYERS | {"asked": "nvfp4"} if label == MARKED else made.LAYERS
    spec = {"noise_floor": True} if label == FLOOR else {}
    return ModelResult.of(
        label, "fake", Storage(bpw, 16.0, bits, file_bytes=bits // 8 + EMBEDDING), estimates, reference=not kld,
        spec=spec, provenance={"layers": [layers]},
    )  # fmt: skip


@functools.cache
def real_text() -> TextResult:
    """The whole table."""
    reference = {"label": "bf16 vLLM"}
    return text_result(
        "wikitext2", {"windows": 586}, "wikitext2, 586 × 2048 tokens", tuple(row_result(row) for row in ROWS), reference
    )
