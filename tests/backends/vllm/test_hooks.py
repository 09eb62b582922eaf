"""The rows of each request in a step, and one product of two models' states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compare_q.backends.reference.comparison import StoredRows
from compare_q.backends.vllm import hooks
from compare_q.backends.vllm.chunks import chunks_of
from compare_q.backends.vllm.extension import ScoringExtension
from compare_q.backends.vllm.hooks import RequestRows, ScoredRows, attach, scored_rows
from compare_q.backends.vllm.logits import LogitsSource
from compare_q.backends.vllm.scoring_plan import EXTRA_ARGS_KEY
from tests.support.stores import numbers

OURS = SimpleNamespace(extra_args={EXTRA_ARGS_KEY: [7, [[1, 10]]]})
OTHERS = SimpleNamespace(extra_args=None)


class Seen(list[Any]):
    """A list of the steps that it receives."""

    def step(self, *given: Any) -> None:
        self.append(given[1:])


def of(prompt: Any, begin: int, end: int) -> ScoredRows:
    """Rows that predict tokens ``begin`` to ``end`` of a prompt."""
    return ScoredRows(StoredRows(0, 0, 0, 0), 0, end - begin, prompt, begin)


def taken(requests: list[RequestRows]) -> list[tuple[Any, int, int, int, int]]:
    return [(part.tag, part.start, part.begin, part.n_rows, part.length) for part in requests]


class RunnerV1:
    """The attributes of a V1 model runner that the hook reads, during a step."""

    def __init__(self) -> None:
        self.requests = {
            "a": SimpleNamespace(
                sampling_params=OURS, prompt_token_ids=list(range(10)), num_computed_tokens=4
            ),
            "b": SimpleNamespace(
                sampling_params=OTHERS, prompt_token_ids=list(range(10)), num_computed_tokens=0
            ),
            "c": SimpleNamespace(
                sampling_params=OURS, prompt_token_ids=[5, 6, 7], num_computed_tokens=3
            ),
        }
        # Rows of the batch: b has 3, a 6, c 1.
        self.query_start_loc = SimpleNamespace(np=np.array([0, 3, 9, 10]))
        self.input_batch = SimpleNamespace(req_id_to_index={"b": 0, "a": 1, "c": 2})

    def _get_prompt_logprobs_dict(
        self, hidden_states: Any, num_scheduled_tokens: dict[str, int]
    ) -> str:
        return "original"


def test_v1_rows() -> None:
    """In the batch, b, which is not a window, precedes a, half computed; c only generates."""
    runner = RunnerV1()
    steps = Seen()
    is_idle = False

    def current() -> Seen | None:
        if is_idle:
            return None
        return steps

    assert attach(runner, current) == "V1"
    states = torch.zeros(10, 2)
    assert runner._get_prompt_logprobs_dict(states, {"b": 3, "a": 6, "c": 1}) == "original"
    assert runner._get_prompt_logprobs_dict(states, {"b": 3}) == "original"
    is_idle = True
    assert runner._get_prompt_logprobs_dict(states, {"b": 3, "a": 6, "c": 1}) == "original"
    # Only the first step has rows of windows.
    ((requests, tokens),) = steps
    assert taken(requests) == [([7, [[1, 10]]], 4, 3, 6, 10)]
    ids = tokens([of(requests[0].prompt, 5, 8), of(requests[0].prompt, 0, 2)])
    assert (ids.tolist(), ids.dtype) == ([5, 6, 7, 0, 1], torch.int64)


class WorkerV2:
    """The object that computes a V2 runner's prompt log-probabilities."""

    def add_request(self, req_id: str, req_idx: int, sampling_params: Any) -> str:
        return f"added {req_id}"

    def remove_request(self, req_id: str) -> str:
        return f"removed {req_id}"

    def compute_prompt_logprobs(
        self,
        logits_fn: Any,
        hidden_states: Any,
        input_batch: Any,
        all_token_ids: Any,
        num_computed_tokens: Any,
        prompt_lens: Any,
    ) -> str:
        return "original"


def test_v2_rows() -> None:
    """Batch: b (not a window), a (state 2, from token 4), c (prompt finished).

    A removed request is forgotten.
    """
    worker = WorkerV2()
    steps = Seen()
    attach(SimpleNamespace(prompt_logprobs_worker=worker), lambda: steps)
    assert worker.add_request("a", 2, OURS) == "added a"
    worker.add_request("b", 0, OTHERS)
    worker.add_request("c", 1, OURS)
    batch = SimpleNamespace(
        req_ids=["b", "a", "c"],
        idx_mapping_np=np.array([0, 2, 1]),
        query_start_loc_np=np.array([0, 3, 9, 10]),
        num_computed_prefill_tokens_np=np.array([0, 4, 3]),
    )
    tokens = torch.arange(30, dtype=torch.int32).reshape(3, 10)
    lengths = np.array([10, 3, 9])
    arguments = (None, torch.zeros(10, 2), batch, tokens, None, lengths)
    assert worker.compute_prompt_logprobs(*arguments) == "original"
    ((requests, tokens_of),) = steps
    assert taken(requests) == [
        ([7, [[1, 10]]], 4, 3, 5, 9)
    ]  # six rows scheduled, five of them prompt
    ids = tokens_of([of(requests[0].prompt, 5, 8), of(0, 3, 4)])
    assert (ids.tolist(), ids.dtype) == ([25, 26, 27, 3], torch.int64)
    assert worker.remove_request("a") == "removed a"
    worker.compute_prompt_logprobs(*arguments)
    assert len(steps) == 1


def test_an_unknown_vllm_is_refused() -> None:
    class Renamed:
        def _get_prompt_logprobs_dict(
            self, states: object, num_scheduled_tokens: object
        ) -> None: ...

    with pytest.raises(
        RuntimeError, match=r"takes \('states', .* this vLLM is not one of 0.26 to 0.33"
    ):
        attach(Renamed(), lambda: None)

    class Extension(ScoringExtension):
        model_runner = object()

    with pytest.raises(RuntimeError, match=r"model runner object is not one of vLLM 0.26 to 0.33"):
        Extension().compare_q_install()


@pytest.mark.engine
def test_the_installed_vllm_has_the_expected_signatures() -> None:
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    hooks.check_signature(GPUModelRunner._get_prompt_logprobs_dict, ("self", *hooks.V1_STEP))
    hooks.check_signature(PromptLogprobsWorker.compute_prompt_logprobs, ("self", *hooks.V2_STEP))
    hooks.check_signature(PromptLogprobsWorker.add_request, ("self", *hooks.V2_ADD))


class GivenPositions(torch.nn.Module):
    """A model that does not receive token ids, such as a model for images."""

    def forward(self, *, input_ids: None, positions: torch.Tensor) -> torch.Tensor:
        return positions


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("positions", [[0, 1, 4], [[0, 1, 4], [0, 1, 4], [0, 1, 4]]])
def test_the_tokens_of_a_forward(generation: int, positions: list[Any]) -> None:
    """The tokens are in a buffer of the runner that is longer than a step.

    M-RoPE's positions have three equal rows.
    """
    model = GivenPositions()
    ids = torch.tensor([5, 6, 7, 9])
    calls = []
    buffers = {"input_ids": SimpleNamespace(gpu=ids)}
    if generation == 2:
        buffers = {"input_buffers": SimpleNamespace(input_ids=ids)}
    runner = SimpleNamespace(get_model=lambda: model, **buffers)
    handle = hooks.before_forwards(
        runner, lambda *arguments: calls.append([argument.tolist() for argument in arguments])
    )
    model(input_ids=None, positions=torch.tensor(positions))
    handle.remove()
    model(input_ids=None, positions=torch.tensor(positions))
    assert calls == [[[5, 6, 7], [0, 1, 4]]]


STEP = [
    # Window 5: positions 4 to 9; 9 predicts nothing.
    RequestRows([5, [(1, 10)]], 4, 12, 6, 10, "e"),
    # Window 2: scored from token 4 on, so the rows at positions 3 to 7.
    RequestRows([2, [(4, 10)]], 0, 0, 8, 10, "b"),
    # Window 7: its last position alone.
    RequestRows([7, [(1, 5)]], 4, 8, 1, 5, "g"),
    # Window 8: nothing is scored yet.
    RequestRows([8, [(9, 12)]], 0, 9, 3, 12, "h"),
]
PARTS = [
    ScoredRows(StoredRows(2, 6, 0, 5), 3, 5, "b", 4),
    ScoredRows(StoredRows(5, 9, 4, 9), 12, 5, "e", 5),
]


def test_scored_rows_by_hand() -> None:
    """The row at position p predicts token p + 1; parts are ordered as in the hidden states."""
    assert scored_rows(STEP) == PARTS


def test_chunks_cut_parts() -> None:
    assert list(chunks_of(PARTS, 10)) == list(chunks_of(PARTS, 20)) == [PARTS]
    assert list(chunks_of(PARTS, 4)) == [
        [ScoredRows(StoredRows(2, 6, 0, 4), 3, 4, "b", 4)],
        [
            ScoredRows(StoredRows(2, 6, 4, 5), 7, 1, "b", 8),
            ScoredRows(StoredRows(5, 9, 4, 7), 12, 3, "e", 5),
        ],
        [ScoredRows(StoredRows(5, 9, 7, 9), 15, 2, "e", 8)],
    ]
    assert list(chunks_of(PARTS, 5)) == [PARTS[:1], PARTS[1:]]
    assert list(chunks_of(scored_rows(STEP[2:]), 5)) == []


WEIGHT = numbers(7, 4)


def model_of(*, by_name: bool) -> Any:
    """A model that halves its states before they enter the head, as some do."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    class Plain(LogitsProcessor):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.org_vocab_size = 7
            self.soft_cap = None
            self.scale = 1.0
            self.logits_as_input = False

        def forward(
            self, lm_head: Any, hidden_states: torch.Tensor, embedding_bias: Any = None
        ) -> torch.Tensor:
            return hidden_states @ lm_head.weight.T

    processor = Plain()
    lm_head = SimpleNamespace(weight=WEIGHT)

    def compute_logits(hidden_states: torch.Tensor) -> Any:
        if by_name:
            return processor(lm_head=lm_head, hidden_states=hidden_states / 2)
        return processor(lm_head, hidden_states / 2)

    return SimpleNamespace(modules=lambda: [processor], compute_logits=compute_logits)


@pytest.mark.engine
@pytest.mark.parametrize("by_name", [False, True])
def test_states_beside_enter_the_head_as_they_are(by_name: bool) -> None:
    """A reference's stored states enter the head: the model's halving does not apply to them."""
    source = LogitsSource(model_of(by_name=by_name))
    hidden = numbers(3, 4, seed=1)
    stored = numbers(3, 4, seed=2)
    logits, reference = source.logits_of_both(hidden, stored)
    torch.testing.assert_close(logits, hidden / 2 @ WEIGHT.T)
    torch.testing.assert_close(reference, stored @ WEIGHT.T)
    assert torch.equal(source.states, hidden / 2)  # recorded by a reference
    torch.testing.assert_close(source.local(hidden), logits)  # without the reference's states
