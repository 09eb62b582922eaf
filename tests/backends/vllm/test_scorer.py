"""Memory bounds and head comparison of the scorer in vLLM's workers.

Its scores are tested in tests/backends/vllm/test_backend.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.reference.head import Head, largest_difference, largest_finite
from backends.reference.reading import ReferenceWindows
from backends.reference.store import Reader, Writer, seal
from backends.vllm.scorer import CPU_ROWS, Plan, Scorer, same_weight

LIMIT = 256 << 20


def scorer(
    entries: int, /, *, device: str = "cuda", tp_size: int = 1, soft_cap: float | None = None, **plan: Any
) -> Scorer:
    """A scorer that has not been given anything to do."""
    source: Any = SimpleNamespace(processors=[SimpleNamespace(soft_cap=soft_cap)], processor=None, shard=None)
    return Scorer(source, Plan(**plan), torch.device(device), entries, tp_size)


@pytest.mark.parametrize("vocab_size", [320, 32_000, 49_152, 128_256, 151_936, 262_144, 1_000_000, 200_000_000])
@pytest.mark.parametrize("has_reference", [False, True])
@pytest.mark.parametrize("hidden_size", [576, 4096, 16384])
def test_a_chunk_stays_under_256_mib(vocab_size: int, has_reference: bool, hidden_size: int) -> None:
    """Logits, the reference's logits and states, and results, in bfloat16; one row is the least."""
    under_test = scorer(vocab_size)
    under_test.rows = SimpleNamespace() if has_reference else None  # type: ignore[assignment]
    rows = under_test.chunk_rows(hidden_size, 2)
    needed = rows * (2 * vocab_size * (1 + has_reference) + 2 * hidden_size * has_reference + 48)
    assert rows == 1 or needed <= LIMIT
    assert rows < 128 or rows % 128 == 0
    assert rows == 1 or needed > LIMIT / 4 or rows >= 128


def test_chunks_by_hand() -> None:
    """255 MiB / 256,560 bytes a row = 1,042; against a reference 255 MiB / 521,264 = 512."""
    assert scorer(128_256).chunk_rows(4096, 2) == 1024
    against = scorer(128_256)
    against.rows = SimpleNamespace()  # type: ignore[assignment]
    assert against.chunk_rows(4096, 2) == 512
    assert scorer(128_256, tp_size=2).chunk_rows(4096, 2) == 2048
    assert scorer(128_256, tp_size=2, gathered=True).chunk_rows(4096, 2) == 1024
    assert scorer(128_256, soft_cap=30.0).chunk_rows(4096, 2) == 256  # two more copies: 347, rounded down
    assert scorer(49_152, device="cpu").chunk_rows(576, 2) == CPU_ROWS


def test_shards_are_cut_to_what_the_reference_has() -> None:
    cut = scorer(320, vocab_size=250)
    cut.source.shard = (160, 300)  # type: ignore[misc]
    assert cut.shard == (160, 250)
    cut.source.shard = (256, 300)  # type: ignore[misc]
    assert cut.shard == (250, 250)  # nothing on this rank
    assert scorer(320, gathered=True).shard == (0, 320)


def stored(folder: Path, weight: torch.Tensor, bias: torch.Tensor | None) -> Reader:
    (folder / "building").mkdir()
    writer = Writer(folder / "building", "states")
    writer.window(0, torch.zeros(1, 4))
    writer.head(0, weight, bias)
    writer.close(Head(len(weight), "bfloat16"))
    seal(folder / "building", folder / "store", {}, 1)
    return Reader(folder / "store")


def test_a_head_is_shared_only_if_it_is_the_same_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.vllm.scorer.COMPARED", 7)  # pieces that do not divide the range
    weight = torch.randn(50, 4).bfloat16()
    store = stored(tmp_path, weight, None)
    assert same_weight(store, weight, 0, 50)
    assert same_weight(store, weight[20:], 20, 50)  # a rank's share
    assert not same_weight(store, weight, 20, 50)
    assert not same_weight(store, weight.float(), 0, 50)
    for changed in (0, 6, 7, 49):
        other = weight.clone()
        other[changed, 3] += 1
        assert not same_weight(store, other, 0, 50)


def test_a_head_with_a_bias_is_not_shared(tmp_path: Path) -> None:
    weight = torch.randn(50, 4)
    assert not same_weight(stored(tmp_path, weight, torch.zeros(50)), weight, 0, 50)


def test_a_reference_of_other_windows_is_refused(tmp_path: Path) -> None:
    """Upstream's stores say nothing of their windows: a warm-up would shift every position."""
    store = stored(tmp_path, torch.randn(50, 4), None)
    under_test = scorer(50, device="cpu")
    under_test.rows = ReferenceWindows(store, pin=False)
    under_test._weight = store.weight(0, 50, "cpu")
    assert under_test.reference_logits(0, 1, 0, 1).shape == (1, 50)
    with pytest.raises(ValueError, match="window 0: the reference has 1 positions, the window 5"):
        under_test.reference_logits(0, 5, 0, 1)
    under_test.rows.close()


@pytest.mark.parametrize(("keeps", "parts"), [(True, 1), (False, 0)])
def test_only_the_rank_that_keeps_logits_describes_them(tmp_path: Path, keeps: bool, parts: int) -> None:
    """The gather may give every rank all logits; one that keeps none would describe a store of 0 entries."""
    source: Any = SimpleNamespace(processors=[], processor=None, shard=None)
    plan = Plan(gathered=True, record=str(tmp_path), record_kind="logits")
    one = Scorer(source, plan, torch.device("cpu"), 50, 2, keeps=keeps)
    one.score(0, 3, 0, torch.randn(3, 50), torch.tensor([1, 2, 3]))
    one.close_record()
    found = [json.loads(file.read_text())["head"]["vocab_size"] for file in tmp_path.glob("part.*.json")]
    assert found == [50] * parts


def test_a_masked_or_nan_logit_never_makes_two_things_equal() -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[1.0, -inf, 3.0]])
    assert largest_difference(logits, logits.clone()) == 0.0
    assert largest_difference(logits, torch.tensor([[1.0, -inf, 3.5]])) == 0.5
    assert largest_difference(logits, torch.tensor([[1.0, 2.0, 3.0]])) == inf
    assert largest_difference(logits, torch.tensor([[nan, -inf, 3.0]])) == inf
    assert largest_finite(torch.tensor([[nan, -inf, -7.0]])) == 7.0


class Both:
    """A rank whose own logits and the gathered ones are given."""

    processors: tuple[Any, ...] = ()
    processor = None
    shard = (0, 3)

    def __init__(self, own: torch.Tensor | None, whole: torch.Tensor) -> None:
        self.own, self.whole = own, whole

    def gathered(self, _: torch.Tensor) -> torch.Tensor:
        return self.whole

    def local_again(self) -> torch.Tensor | None:
        return self.own

    def head_difference(self, _: torch.Tensor) -> float:
        return 0.25


@pytest.mark.parametrize(
    ("own", "difference"),
    [
        ([[1.0, 2.0, 3.0]], 0.0),
        ([[1.0, 2.0, 3.5]], 0.5),
        ([[1.0, float("nan"), 3.0]], float("inf")),
        (None, float("inf")),
    ],
)
def test_what_a_probe_compares(own: list[list[float]] | None, difference: float) -> None:
    source: Any = Both(None if own is None else torch.tensor(own), torch.tensor([[1.0, 2.0, 3.0]]))
    probing = Scorer(source, Plan(probe=True), SimpleNamespace(type="cpu"), 3, 2)
    probing.logits(torch.zeros(1, 2))
    assert probing.probe.local == difference
    assert probing.probe.head == (0.0 if own is None else 0.25)
