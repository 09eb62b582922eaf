"""Run a model that is larger than its device: layer by layer, for a group of windows.

Each decoder layer is copied to the device, and runs there for all windows of a group, because
reading 140 GB for each window would wait for the disk.  For each window, the model's own forward
runs in a greenlet, which stops before every decoder layer until that layer is on the device.
Everything between the layers (masks, rotary tables, residuals, soft caps) is the model's own code,
so that the logits equal those of the whole model bit for bit.

The layers' weights stay in CPU memory as Transformers loaded them.  If the checkpoint stores them
in the model's dtype, they are memory-mapped: the system reads a page of the file when it is copied,
and drops the page when it needs memory.  Tensors that Transformers converts while loading (another
dtype, experts stored one by one) take CPU memory.  While one layer computes, a thread copies the
next one, so two layers are on the device.  Embedding, norm and head stay there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..base import Window
from ..common.errors import ModelError
from ..layers.noise import layer_list

if TYPE_CHECKING:
    import torch

CPU_BYTES = 1 << 30
"""Memory for the states of a group's windows if the device is the CPU."""
MOST_WINDOWS = 1024


@dataclass
class WindowForward:
    """One window's forward pass.

    ``reached``: the decoder layer that it waits for, or at its end the logits' chunks.
    """

    window: Window
    greenlet: Any
    reached: int | Iterator[torch.Tensor] = -1

    def resume(self) -> None:
        """Run to the next layer, or to the end."""
        self.reached = self.greenlet.switch()


class Streamer:
    """Runs a model in CPU memory on ``device``.

    ``forward`` runs the layers for a window, and returns its logits in chunks.  ``group``: number
    of windows that run together; None: as many windows as have room for their states in half of the
    device's free memory.
    """

    def __init__(
        self,
        model: Any,
        forward: Callable[[Window], Iterator[torch.Tensor]],
        device: torch.device,
        group: int | None,
    ) -> None:
        import torch

        self.forward = forward
        self.device = device
        self.requested_group = group
        self.group = group
        self.config = model.config.get_text_config()
        # A model may run one layer several times.
        layers = list(dict.fromkeys(decoder_layers(model)))
        # The weights of each layer, each with its tensor in CPU memory.
        self.hosts: list[list[tuple[Any, torch.Tensor]]] = []
        for layer in layers:
            self.hosts.append([(weight, weight.data) for weight in layer.parameters()])
        self._move_other_tensors(model)
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(stop_before, index))
        self.copier = ThreadPoolExecutor(1, "streaming")
        self.side_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.resident_layer: int | None = None
        self.copies_in_flight: dict[int, Future[list[torch.Tensor]]] = {}
        self.windows: list[Window] = []
        self.n_later_windows = 0
        self.forwards: list[WindowForward] = []

    def _move_other_tensors(self, model: Any) -> None:
        """Move everything but the layers' weights to the device."""
        streamed = set[Any]()
        for hosts in self.hosts:
            streamed.update(weight for weight, _ in hosts)
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor not in streamed:
                tensor.data = tensor.data.to(self.device)

    def prepare(self, windows: Sequence[Window]) -> None:
        """Set the windows that will be scored, in order."""
        self.windows = list(windows)
        self.group = self.requested_group

    def forwarded(self, window: Window) -> Iterator[torch.Tensor]:
        """Return the logits of one window in chunks.

        The other windows of its group then wait for the last layer.  ``reached`` of a forward pass
        is a layer's number until the pass has ended, and then its logits.
        """
        forward = self.forward_of(window)
        last_layer = len(self.hosts) - 1
        while isinstance(forward.reached, int):
            layer = forward.reached
            self.hold(layer)
            if layer == last_layer:
                # One window at a time: the logits of a whole group are larger than the model.
                forward.resume()
                continue
            waiting = [other for other in self.forwards if other.reached == layer]
            for other in waiting:
                other.resume()
                if not isinstance(other.reached, int):
                    raise ModelError(
                        "engine.streaming: this model runs its last decoder layer before another "
                        "layer"
                    )
        self.forwards.remove(forward)
        return forward.reached

    def forward_of(self, window: Window) -> WindowForward:
        """Return the forward pass of a window, which may be suspended or new."""
        for forward in self.forwards:
            if forward.window is window:
                return forward
        return self.start(window)

    def start(self, window: Window) -> WindowForward:
        """Run a group that begins with ``window`` up to the first layer."""
        import greenlet

        if self.group is None:
            longest = max(len(other.token_ids) for other in (window, *self.windows))
            self.group = self.fitting(longest)
        self.forwards = []
        for member in self.next_group(window, self.group):
            run = greenlet.greenlet(partial(self.forward, member))
            self.forwards.append(WindowForward(member, run))
        for forward in self.forwards:
            forward.resume()
        return self.forwards[0]

    def next_group(self, window: Window, n_windows: int) -> list[Window]:
        """Return ``n_windows`` windows from ``window`` on, and note how many come after them.

        A window that ``prepare`` did not receive forms a group alone.
        """
        for begin, other in enumerate(self.windows):
            if other is window:
                group = self.windows[begin : begin + n_windows]
                self.n_later_windows = len(self.windows) - begin - len(group)
                return group
        self.n_later_windows = 0
        return [window]

    def hold(self, layer: int) -> None:
        """Replace the layer on the device by ``layer``, and start to copy the next one."""
        if self.resident_layer == layer:
            return
        self.release()
        if layer not in self.copies_in_flight:
            self.fetch(layer)
        copies = self.copies_in_flight.pop(layer).result()
        for (weight, _), copy in zip(self.hosts[layer], copies, strict=True):
            weight.data = copy
        self.resident_layer = layer
        # After the last layer, the next group of windows begins with the first one.
        next_layer = (layer + 1) % len(self.hosts)
        if next_layer or self.n_later_windows:
            self.fetch(next_layer)

    def fetch(self, layer: int) -> None:
        """Start to copy a layer; discard a copy of another layer."""
        for discarded in self.copies_in_flight.values():
            discarded.result()
        self.copies_in_flight = {layer: self.copier.submit(self.copies, layer)}

    def copies(self, layer: int) -> list[torch.Tensor]:
        """Copy a layer's weights to the device.

        On CUDA in a separate stream, at the same time as the computation.
        """
        import torch

        stream: AbstractContextManager[Any] = nullcontext()
        if self.side_stream is not None:
            stream = torch.cuda.stream(self.side_stream)
        with stream:
            return [host.to(self.device, copy=True) for _, host in self.hosts[layer]]

    def release(self) -> None:
        """Free the memory of the layer on the device once all computations with it are done."""
        import torch

        if self.resident_layer is None:
            return
        if self.side_stream is not None:
            torch.cuda.synchronize(self.device)
        for weight, host in self.hosts[self.resident_layer]:
            weight.data = host
        self.resident_layer = None

    def fitting(self, tokens: int) -> int:
        """Return how many windows of ``tokens`` fit into half of the free memory.

        A stopped forward holds its embeddings, its state, rotary tables and, in some attentions, a
        mask [L, L].
        """
        import torch

        room = CPU_BYTES
        if self.device.type == "cuda":
            layer_bytes = []
            for hosts in self.hosts:
                layer_bytes.append(sum(host.nbytes for _, host in hosts))
            free_bytes, _ = torch.cuda.mem_get_info(self.device)
            # One layer computes while the next one is copied.
            room = free_bytes // 2 - 2 * max(layer_bytes)
        bytes_per_window = 4 * tokens * (2 * self.config.hidden_size + tokens)
        return max(1, min(MOST_WINDOWS, int(room // bytes_per_window)))

    def close(self) -> None:
        """Stop copying, and forget windows that were not finished."""
        self.copier.shutdown(cancel_futures=True)
        self.forwards = []
        self.copies_in_flight = {}
        self.release()


def decoder_layers(model: Any, option: str = "streaming") -> Sequence[Any]:
    """Return the text decoder's layers; ModelError if no list has the length in the config."""
    count = model.config.get_text_config().num_hidden_layers
    return layer_list(model.get_decoder(), count, f"engine.{option}: {type(model).__name__}")


def stop_before(layer: int, *_: Any) -> None:
    """Suspend a window's forward pass until ``layer`` is on the device."""
    import greenlet

    greenlet.getcurrent().parent.switch(layer)
