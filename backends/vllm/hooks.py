"""Hooks in an unmodified vLLM: the final hidden states of each step, and the windows of their rows.

Both generations of vLLM's model runner call one method on every step with the final hidden states
of all scheduled tokens, whether or not a request wants prompt log-probabilities (read in 0.26, 0.32
and 0.33; run in 0.26 and 0.32):

- V1: ``model_runner._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)``
- V2: ``model_runner.prompt_logprobs_worker.compute_prompt_logprobs(logits_fn, hidden_states,
  input_batch, ...)``, and ``add_request(req_id, req_idx, sampling_params)`` of the same object,
  again after a preemption

``attach`` replaces these methods on the instance after checking their signatures; the replacements
call the originals.  A request is compare_q's if its ``SamplingParams.extra_args`` has a tag under
``EXTRA_ARGS_KEY``; its id cannot be used, because vLLM replaces the id of a queued request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..reference.comparison import StoredRows
from .installed_vllm import NEWEST, OLDEST
from .private_names import check_attributes
from .scoring_plan import EXTRA_ARGS_KEY

if TYPE_CHECKING:
    import torch

V1_STEP = ("hidden_states", "num_scheduled_tokens")
V2_STEP = (
    "logits_fn",
    "hidden_states",
    "input_batch",
    "all_token_ids",
    "num_computed_tokens",
    "prompt_lens",
)
V2_ADD = ("req_id", "req_idx", "sampling_params")


class RequestRows(NamedTuple):
    """The rows of one request in one step.

    ``hidden_states[begin : begin + n_rows]`` are positions ``start``, ...
    """

    tag: Any  # of the request
    start: int
    begin: int
    n_rows: int
    length: int  # tokens of the prompt
    prompt: Any  # the runner's handle of the prompt


class ScoredRows(NamedTuple):
    """Neighbouring scored rows of one window."""

    rows: StoredRows  # their scored positions
    row: int  # index of the first row in the hidden states
    n_rows: int
    prompt: Any
    token: int  # index of the first predicted token in ``prompt``

    def cut(self, begin: int, end: int) -> ScoredRows:
        """Return rows ``begin`` to ``end`` of these."""
        rows = self.rows._replace(begin=self.rows.begin + begin, end=self.rows.begin + end)
        return ScoredRows(rows, self.row + begin, end - begin, self.prompt, self.token + begin)


Tokens = Callable[[Sequence[ScoredRows]], "torch.Tensor"]
"""Scored rows -> the tokens that they predict, int64, on the states' device."""


Current = Callable[[], Any]
"""Returns the object whose ``step(hidden_states, requests, tokens)`` currently receives the steps,
or None.

``hidden_states`` [N, H] are of all rows of a step; ``requests``: ``RequestRows`` of tagged
requests; ``Tokens``."""


def check_signature(method: Callable[..., Any], expected: tuple[str, ...]) -> None:
    """Raise RuntimeError unless the method's first parameters are the expected ones."""
    parameters = tuple(inspect.signature(method).parameters)[: len(expected)]
    if parameters != expected:
        raise RuntimeError(
            f"{method.__name__} takes {parameters}, not {expected}: this vLLM is not one of "
            f"{OLDEST} to {NEWEST}, whose hidden states and logits compare_q knows how to read"
        )


def attach(runner: Any, current: Current) -> str:
    """Call ``step`` of the ``current`` object in every step with tagged requests.

    Return the runner's generation.  RuntimeError for an unknown model runner.
    """
    if getattr(runner, "prompt_logprobs_worker", None) is not None:
        attach_v2(runner.prompt_logprobs_worker, current)
        return "V2"
    if hasattr(runner, "_get_prompt_logprobs_dict"):
        attach_v1(runner, current)
        return "V1"
    if hasattr(runner, "prompt_logprobs_worker"):
        return "V2 (an earlier pipeline stage)"
    raise RuntimeError(
        f"the model runner {type(runner).__name__} is not one of vLLM {OLDEST} to {NEWEST}"
    )


def attach_v1(runner: Any, current: Current) -> None:
    """Hook the first generation of model runners, whose prompts are lists on the host."""
    original = runner._get_prompt_logprobs_dict
    check_signature(original, V1_STEP)
    # In a hook, an AttributeError would kill the engine.
    rows_of_step = "whose rows a step has (V1 runner)"
    check_attributes(runner, ("requests", "query_start_loc", "input_batch"), rows_of_step)
    check_attributes(runner.input_batch, ("req_id_to_index",), rows_of_step)

    def step(
        hidden_states: Any, num_scheduled_tokens: dict[str, int], *args: Any, **kwargs: Any
    ) -> Any:
        scorer = current()
        if scorer is not None:
            requests = requests_v1(runner, num_scheduled_tokens)
            if requests:
                scorer.step(hidden_states, requests, partial(tokens_v1, hidden_states.device))
        return original(hidden_states, num_scheduled_tokens, *args, **kwargs)

    runner._get_prompt_logprobs_dict = step


def requests_v1(runner: Any, num_scheduled_tokens: dict[str, int]) -> list[RequestRows]:
    """Return the rows of tagged requests in a step of a V1 runner."""
    requests = []
    for request_id, n_scheduled in num_scheduled_tokens.items():
        request = runner.requests.get(request_id)
        tag = tag_of(getattr(request, "sampling_params", None))
        if tag is None:
            continue
        prompt = request.prompt_token_ids
        if prompt is None:
            continue
        place = runner.input_batch.req_id_to_index[request_id]
        begin = int(runner.query_start_loc.np[place])
        start = request.num_computed_tokens
        n_rows = min(n_scheduled, len(prompt) - start)  # tokens after the prompt are not scored
        if n_rows > 0:
            requests.append(RequestRows(tag, start, begin, n_rows, len(prompt), prompt))
    return requests


def tokens_v1(device: torch.device, parts: Sequence[ScoredRows]) -> torch.Tensor:
    """Return the tokens that scored rows predict, from prompts on the host."""
    ids = []
    for part in parts:
        end = part.token + part.n_rows
        ids.append(np.asarray(part.prompt[part.token : end], np.int64))
    return to_device(np.concatenate(ids), device)


def attach_v2(worker: Any, current: Current) -> None:
    """Hook the second generation, through the object that computes its prompt log-probabilities.

    Its prompts are rows of a table on the GPU.
    """
    tags_of_requests = "tags of requests (V2 runner)"
    check_attributes(worker, ("add_request", "remove_request"), tags_of_requests)
    add = worker.add_request
    compute = worker.compute_prompt_logprobs
    remove = worker.remove_request
    check_signature(add, V2_ADD)
    check_signature(compute, V2_STEP)
    tags: dict[str, Any] = {}

    def add_request(
        req_id: str, req_idx: int, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        tag = tag_of(sampling_params)
        if tag is not None:
            tags[req_id] = tag
        return add(req_id, req_idx, sampling_params, *args, **kwargs)

    def remove_request(req_id: str, *args: Any, **kwargs: Any) -> Any:
        tags.pop(req_id, None)
        return remove(req_id, *args, **kwargs)

    def step(
        logits_fn: Any,
        hidden_states: Any,
        input_batch: Any,
        all_token_ids: Any,
        num_computed_tokens: Any,
        prompt_lens: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        scorer = current()
        if scorer is not None:
            requests = requests_v2(tags, input_batch, prompt_lens)
            if requests:
                scorer.step(hidden_states, requests, partial(tokens_v2, all_token_ids))
        return compute(
            logits_fn,
            hidden_states,
            input_batch,
            all_token_ids,
            num_computed_tokens,
            prompt_lens,
            *args,
            **kwargs,
        )

    worker.add_request = add_request
    worker.remove_request = remove_request
    worker.compute_prompt_logprobs = step


def requests_v2(tags: dict[str, Any], batch: Any, prompt_lens: Any) -> list[RequestRows]:
    """Return the rows of tagged requests in a step of a V2 runner."""
    states = batch.idx_mapping_np.tolist()
    begins = batch.query_start_loc_np.tolist()
    starts = batch.num_computed_prefill_tokens_np.tolist()
    requests = []
    for i, request_id in enumerate(batch.req_ids):
        if request_id not in tags:
            continue
        length = int(prompt_lens[states[i]])
        n_rows = min(begins[i + 1] - begins[i], length - starts[i])
        if n_rows > 0:
            requests.append(
                RequestRows(tags[request_id], starts[i], begins[i], n_rows, length, states[i])
            )
    return requests


def tokens_v2(all_token_ids: torch.Tensor, parts: Sequence[ScoredRows]) -> torch.Tensor:
    """Return the tokens that scored rows predict, from a table of prompts on the GPU."""
    states = np.array([part.prompt for part in parts], np.int64)
    begins = np.array([part.token for part in parts], np.int64)
    counts = np.array([part.n_rows for part in parts], np.int64)
    # One copy to the GPU has the rows of the table and the columns.
    places = np.stack([np.repeat(states, counts), ranges(begins, counts)])
    index = to_device(places, all_token_ids.device)
    return all_token_ids[index[0], index[1]].long()


def tag_of(sampling_params: Any) -> Any:
    """Return the request's tag, or None."""
    extra_args = getattr(sampling_params, "extra_args", None)
    if not extra_args:
        return None
    return extra_args.get(EXTRA_ARGS_KEY)


def ranges(begins: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``counts`` numbers from each begin on, concatenated."""
    n_before = np.cumsum(counts) - counts
    numbers: NDArray[np.int64] = np.arange(counts.sum()) + np.repeat(begins - n_before, counts)
    return numbers


def before_forwards(runner: Any, begin: Callable[[torch.Tensor, torch.Tensor], None]) -> Any:
    """Call ``begin(token ids [n], positions [n])`` before every forward of a runner's model.

    Return the hook's handle.  Tokens come from the runner, because models that take images and
    later stages of a pipeline do not receive them.
    """
    buffers = runner
    if hasattr(runner, "input_buffers"):  # V2
        buffers = runner.input_buffers

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        positions = kwargs["positions"]
        # M-RoPE has three rows.
        positions = positions.reshape(-1, positions.shape[-1])[0]
        ids = getattr(buffers.input_ids, "gpu", buffers.input_ids)
        begin(ids[: len(positions)], positions)

    return runner.get_model().register_forward_pre_hook(hook, with_kwargs=True)


def scored_rows(requests: Sequence[RequestRows]) -> list[ScoredRows]:
    """Return the scored rows of the requests, in their order in the hidden states.

    The row at position p of a window predicts token p + 1, so scored rows are one before the
    positions in ``spans``.
    """
    parts = []
    for request in requests:
        window, spans = request.tag
        n_scored = sum(end - begin for begin, end in spans)
        n_before = 0  # scored positions in earlier spans
        for first, last in spans:
            begin = max(request.start, first - 1)
            end = min(request.start + request.n_rows, last - 1)
            if begin < end:
                offset = n_before - (first - 1)
                rows = StoredRows(window, n_scored, begin + offset, end + offset)
                row = request.begin + begin - request.start
                parts.append(ScoredRows(rows, row, end - begin, request.prompt, begin + 1))
            n_before += last - first
    return sorted(parts, key=lambda part: part.row)


def to_device(array: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Copy an array to a device.

    Through pinned memory, because a pageable copy would wait for the GPU.
    """
    import torch

    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def states_of(hidden_states: torch.Tensor, parts: Sequence[ScoredRows]) -> torch.Tensor:
    """Return the hidden states [n, H] of parts: a view if they are neighbours, else one gather."""
    first = parts[0].row
    last = parts[-1].row + parts[-1].n_rows
    begins = np.array([part.row for part in parts], np.int64)
    counts = np.array([part.n_rows for part in parts], np.int64)
    if last - first == counts.sum():
        return hidden_states[first:last]
    return hidden_states.index_select(0, to_device(ranges(begins, counts), hidden_states.device))
