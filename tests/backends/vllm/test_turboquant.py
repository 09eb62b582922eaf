"""vLLM's own TurboQuant attention, by its own metadata: which of a window's tokens read the quantized cache."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare_q.backends.layers.groups import FIRST_STEP
from compare_q.backends.vllm import layers

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 64, 16, 8
pytestmark = pytest.mark.engine


@pytest.fixture
def read_by_decode(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The caches that the decode kernel, which wants a GPU, was given; it answers with zeros."""
    from vllm.v1.attention.backends import turboquant_attn

    found: list[torch.Tensor] = []

    def kernel(query: torch.Tensor, kv_cache: torch.Tensor, **_: Any) -> torch.Tensor:
        found.append(kv_cache)
        return torch.zeros_like(query)

    config = SimpleNamespace(
        attention_config=SimpleNamespace(tq_max_kv_splits_for_cuda_graph=32),
        model_config=SimpleNamespace(max_model_len=BLOCK * BLOCKS),
    )
    monkeypatch.setattr(turboquant_attn, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(turboquant_attn, "_HAS_FLASH_ATTN", False)  # which wants a GPU as well
    monkeypatch.setattr(turboquant_attn, "triton_turboquant_decode_attention", kernel)
    return found


def attention() -> Any:
    """TurboQuant's attention of one layer."""
    from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionImpl

    return TurboQuantAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, kv_cache_dtype="turboquant_k8v4")


def metadata(steps: list[tuple[int, int]]) -> Any:
    """vLLM's metadata of a step; ``steps``: of each window, its tokens before the step and in it."""
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.turboquant_attn import TurboQuantMetadataBuilder

    tokens = [new for _, new in steps]
    starts = torch.tensor([0, *accumulate(tokens)], dtype=torch.int32)
    lengths = torch.tensor([sum(pair) for pair in steps], dtype=torch.int32)
    blocks = torch.arange(len(steps) * 2, dtype=torch.int32).view(len(steps), 2)
    slots = [int(blocks[window, place // BLOCK]) * BLOCK + place % BLOCK
             for window, (had, new) in enumerate(steps) for place in range(had, had + new)]  # fmt: skip
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(steps), num_actual_tokens=sum(tokens), max_query_len=max(tokens), max_seq_len=int(lengths.max()),
        block_table_tensor=blocks, slot_mapping=torch.tensor(slots),
    )  # fmt: skip
    builder = object.__new__(TurboQuantMetadataBuilder)
    builder.reorder_batch_threshold = 1
    return builder.build(0, common)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of a window of L tokens, float64 [L, HEADS, SIZE], by its definition."""
    k, v = (part.double().repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * SIZE**-0.5
    later = torch.ones(len(q), len(q)).triu(1).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def computed(impl: Any, steps: list[tuple[int, int]], cache: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What a layer's attention makes of a step's random queries, keys and values, and these; the cache is all
    ``cache``.
    """
    generator, count = torch.Generator().manual_seed(0), sum(tokens for _, tokens in steps)
    q, k, v = (torch.randn(count, heads, SIZE, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
    stored = torch.full((BLOCKS, KV_HEADS, BLOCK, impl.tq_config.slot_size_aligned), cache, dtype=torch.uint8)
    out = torch.empty(count, HEADS, SIZE)
    return impl.forward(SimpleNamespace(), q, k, v, stored, metadata(steps), out), [q, k, v]


def test_the_first_step_of_a_window_reads_no_cache(read_by_decode: list[torch.Tensor]) -> None:
    """Two whole windows in one step come out as from unquantized keys and values, whatever the cache holds."""
    impl, steps = attention(), [(0, 5), (0, 9)]
    outputs = []
    for content in (0, 255):
        out, (q, k, v) = computed(impl, steps, content)
        outputs.append(out)
    assert torch.equal(*outputs)
    assert read_by_decode == []
    windows = zip(q.split([5, 9]), k.split([5, 9]), v.split([5, 9]), strict=True)
    torch.testing.assert_close(out.double(), torch.cat([causal(*window) for window in windows]), atol=1e-5, rtol=0)
    assert layers.prefill(impl) == FIRST_STEP


@pytest.mark.parametrize("steps", [[(0, 1), (7, 1)], [(7, 3)]], ids=["decode", "chunk"])
def test_later_steps_read_the_cache(steps: list[tuple[int, int]], read_by_decode: list[torch.Tensor]) -> None:
    """So do steps of one token, as in decode, of a window's first one too."""
    computed(attention(), steps, 255)
    assert [bool((cache == 255).all()) for cache in read_by_decode] == [True]


def test_a_whole_window_makes_vllm_forget_what_came_before(
    read_by_decode: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why compare_q splits no window in prefill: three tokens that follow seven come out as a window of three.

    Where this fails, vLLM has been mended, and ``LOSES_CHUNKS`` can go.
    """
    from vllm.v1.attention.backends import turboquant_attn

    def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, **_: Any) -> torch.Tensor:
        sizes = cu_seqlens_q.diff().tolist()
        return torch.cat([causal(*each) for each in zip(*(x.split(sizes) for x in (q, k, v)), strict=True)]).float()

    monkeypatch.setattr(turboquant_attn, "_HAS_FLASH_ATTN", True)
    monkeypatch.setattr(turboquant_attn, "flash_attn_varlen_func", whole, raising=False)
    out, (q, k, v) = computed(attention(), [(7, 3), (0, 10)], 255)
    assert read_by_decode == []
    torch.testing.assert_close(out[:3].double(), causal(q[:3], k[:3], v[:3]), atol=1e-5, rtol=0)
