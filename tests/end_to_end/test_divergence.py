"""KL divergence of a real pretrained model in real engines, compared with float64 results from the
engines' logits.

References: SmolLM2 bf16 in vLLM and in Transformers.  Tests: both again, W8A8 in vLLM, and W4A16 in
vLLM, or in Transformers on a CPU for which vLLM has no kernel of W4A16.

The logits of vLLM's bf16 kernels depend on the shape of the batch (on a CPU with AMX, the KLD of
single tokens differed by up to 0.2 if two windows ran together instead of one after the other).
Therefore the logits are kept from the steps that are scored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from compare_q.backends.base import ScoreRequest, TokenScores, Window
from compare_q.backends.common import machine
from compare_q.backends.hf.transformers_engine import TransformersEngine
from compare_q.backends.reference import store as reference
from compare_q.backends.vllm.vllm_engine import VllmEngine
from demo.__main__ import BASE, MODELS, ROOT, make_models
from tests.support.toy import planned, rounds_by_place
from tests.support.vllm_engine import engine
from tests.support.vllm_spy import keep_logits, save_logits

pytestmark = pytest.mark.engine

# The scored rows of both windows are one chunk of the scorer: one product computes their logits.
LENGTH = 129
if machine.has_avx512():
    W4A16 = "vllm W4A16"
else:
    W4A16 = "transformers W4A16"
ENGINES = {
    "vllm bf16": BASE,
    "vllm W8A8": MODELS / "smollm2-135m-w8a8",
    W4A16: MODELS / "smollm2-135m-w4a16-g32",
    "transformers bf16": BASE,
}
REFERENCES = ("transformers bf16", "vllm bf16")


@dataclass(frozen=True)
class Measured:
    """Scores, and the logits [T, V] that were scored, by (engine, reference, window)."""

    windows: list[Window]
    logits: dict[tuple[str, str, int], torch.Tensor]
    scores: dict[tuple[str, str, int], TokenScores]


@contextmanager
def opened(name: str, folder: Path) -> Iterator[VllmEngine | TransformersEngine]:
    """Yield a loaded engine; vLLM in the dtype of its files, in this process."""
    if name.startswith("vllm"):
        log = folder / f"{name}.log"
        with engine(ENGINES[name], log, LENGTH, dtype="auto") as vllm:
            yield vllm
        return
    transformers = TransformersEngine(
        planned(name, "transformers_auto_bf16", str(ENGINES[name]), LENGTH)
    )
    transformers.load()
    yield transformers
    transformers.close()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """All scores and logits.  Each engine loads once, Transformers in bf16 once more."""
    from transformers import AutoTokenizer

    make_models()
    patch = pytest.MonkeyPatch()
    # Otherwise a CPU with AMX quantizes the activations of W4A16.
    patch.setenv("VLLM_CPU_INT4_W4A8", "0")
    folder = tmp_path_factory.mktemp("divergence")
    ids = AutoTokenizer.from_pretrained(BASE)(
        (ROOT / "eval" / "spec" / "opticks.txt").read_text()[:20000]
    )["input_ids"]
    windows = [
        Window.scored_from(index, np.array(ids[begin : begin + LENGTH], np.int32))
        for index, begin in enumerate((1000, 2000))
    ]
    found = Measured(windows, {}, {})
    # On a GPU, vLLM runs in another process, which must accept functions of the tests.
    patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    for name in (*REFERENCES, *(name for name in ENGINES if name not in REFERENCES)):
        with opened(name, folder) as backend:
            if name in REFERENCES:
                (folder / name).mkdir()
                list(backend.score(windows, ScoreRequest(record=folder / name)))
                reference.seal(folder / name, {}, [window.digest for window in windows])
            for store in REFERENCES:
                if (folder / store).is_dir():
                    score(backend, name, store, folder, found)
    # vLLM's store is new; loading vLLM again would take longer.
    with opened("transformers bf16", folder) as backend:
        score(backend, "transformers bf16", "vllm bf16", folder, found)
    patch.undo()
    return found


def score(
    backend: VllmEngine | TransformersEngine, name: str, store: str, folder: Path, found: Measured
) -> None:
    """Score one engine against one store, and keep the logits of these scores.

    Transformers computes the same logits of a window each time.
    """
    entries = reference.Reader(folder / store).head.vocab_size
    task = ScoreRequest(reference=folder / store, vocab_size=entries)
    if isinstance(backend, VllmEngine):
        backend.llm.collective_rpc(keep_logits)
    for scores in backend.score(found.windows, task):
        found.scores[name, store, scores.window] = scores
    if isinstance(backend, VllmEngine):
        backend.llm.collective_rpc(save_logits, args=(str(folder),))
    for window in found.windows:
        earlier = found.logits.get((name, REFERENCES[0], window.index))
        if isinstance(backend, VllmEngine):
            logits = load_file(folder / f"{window.index}.safetensors")["logits"]
        elif earlier is not None:
            logits = earlier
        else:
            logits = backend.logits(window)[:-1]
        found.logits[name, store, window.index] = logits


@pytest.mark.parametrize("store", REFERENCES)
@pytest.mark.parametrize("name", ENGINES)
def test_every_token_against_float64(measured: Measured, name: str, store: str) -> None:
    for window in measured.windows:
        scores = measured.scores[name, store, window.index]
        assert scores.kld is not None
        assert len(scores.kld) == len(scores.logprob) == window.n_scored == LENGTH - 1
        pair = (
            measured.logits[store, store, window.index],
            measured.logits[name, store, window.index],
        )
        p, q = (logits.double().log_softmax(-1) for logits in pair)
        exact = (p.exp() * (p - q)).sum(-1).numpy()
        np.testing.assert_allclose(scores.kld, exact, atol=1e-5, rtol=0)
        assert scores.kld.astype(np.float64).mean() == pytest.approx(exact.mean(), abs=1e-6)
        np.testing.assert_allclose(scores.entropy, -(q.exp() * q).sum(-1), atol=1e-5, rtol=0)
        targets = torch.from_numpy(window.token_ids[1:]).long()[:, None]
        np.testing.assert_allclose(scores.logprob, q.gather(1, targets)[:, 0], atol=1e-5, rtol=0)
        np.testing.assert_array_equal(scores.same_top, p.argmax(-1) == q.argmax(-1))


@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_against_itself_is_zero(measured: Measured, name: str) -> None:
    """Roundings may differ: Transformers computes the logits of all rows of a window; the
    comparison omits the last.
    """
    by_place = name.startswith("transformers") and rounds_by_place(
        LENGTH, 576, 4096, torch.bfloat16
    )
    for window in measured.windows:
        scores = measured.scores[name, name, window.index]
        assert np.max(np.abs(scores.kld)) <= (1e-4 if by_place else 0)


def test_more_bits_diverge_less(measured: Measured) -> None:
    """With either reference, the KLD of the other engine is smallest, and that of 4 bits is larger
    than that of 8.
    """
    for store, other in (REFERENCES, REFERENCES[::-1]):
        means = [
            np.mean([measured.scores[name, store, window.index].kld for window in measured.windows])
            for name in (other, "vllm W8A8", W4A16)
        ]
        assert 0 < means[0] < means[1] / 3 < means[2] / 9
