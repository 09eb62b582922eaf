"""Run a model that is larger than its device: each decoder layer is copied there and runs for a
group of windows.

The windows of a group run together, because reading 140 GB for each window would wait for the disk.
For each window, the model's own forward runs in a greenlet, which stops before every decoder layer
until that layer is on the device.  Everything between the layers (masks, rotary tables, residuals,
soft caps) is the model's own code, so that the logits equal those of the whole model bit for bit.

The layers' weights stay in CPU memory as Transformers loaded them.  If the checkpoint stores them
in the model's dtype, they are memory-mapped: the system reads a page of the file when it is copied,
and drops the page when it needs memory.  Tensors that Transformers converts while loading (another
dtype, experts stored one by one) take CPU memory.  While one layer computes, a thread copies the
next one, so two layers are on the device.  Embedding, norm and head stay there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
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
    """One window's forward pass; ``reached``: the decoder layer that it waits for, or at its end
    the logits' chunks.
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

        self.forward, self.device, self.asked, self.group = forward, device, group, group
        self.config = model.config.get_text_config()
        layers = list(dict.fromkeys(decoder_layers(model)))
        self.hosts = [[(weight, weight.data) for weight in layer.parameters()] for layer in layers]
        streamed = {weight for host in self.hosts for weight, _ in host}
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor not in streamed:
                tensor.data = tensor.data.to(device)
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(stop_before, index))
        self.copier = ThreadPoolExecutor(1, "streaming")
        on_cuda = device.type == "cuda"
        self.side_stream = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]
        self.held: int | None = None
        self.coming: dict[int, Future[list[torch.Tensor]]] = {}
        self.ahead: list[Window] = []
        self.windows_left = 0
        self.forwards: list[WindowForward] = []

    def prepare(self, windows: Sequence[Window]) -> None:
        """Set the windows that will be scored, in order."""
        self.ahead, self.group = list(windows), self.asked

    def forwarded(self, window: Window) -> Iterator[torch.Tensor]:
        """Return the logits of one window in chunks; the other windows of its group then wait for
        the last layer.
        """
        run = next((each for each in self.forwards if each.window is window), None) or self.start(
            window
        )
        while isinstance(layer := run.reached, int):
            self.hold(layer)
            if layer == len(self.hosts) - 1:
                # one window at a time: the logits of a whole group are larger than the model
                run.resume()
                continue
            for each in [each for each in self.forwards if each.reached == layer]:
                each.resume()
                if not isinstance(each.reached, int):
                    raise ModelError(
                        "engine.streaming: this model runs its last decoder layer before another layer"
                    )
        self.forwards.remove(run)
        return layer

    def start(self, window: Window) -> WindowForward:
        """Run a group that begins with ``window`` up to the first layer."""
        import greenlet

        if self.group is None:
            self.group = self.fitting(max(len(each.token_ids) for each in (window, *self.ahead)))
        begin = next((i for i, other in enumerate(self.ahead) if other is window), None)
        chosen = [window] if begin is None else self.ahead[begin : begin + self.group]
        self.windows_left = 0 if begin is None else len(self.ahead) - begin - len(chosen)
        self.forwards = [
            WindowForward(each, greenlet.greenlet(partial(self.forward, each))) for each in chosen
        ]
        for each in self.forwards:
            each.resume()
        return self.forwards[0]

    def hold(self, layer: int) -> None:
        """Replace the layer on the device by ``layer``, and start to copy the next one."""
        if self.held == layer:
            return
        self.release()
        if layer not in self.coming:
            self.fetch(layer)
        for (weight, _), copy in zip(
            self.hosts[layer], self.coming.pop(layer).result(), strict=True
        ):
            weight.data = copy
        self.held = layer
        following = (layer + 1) % len(self.hosts)
        if following or self.windows_left:
            self.fetch(following)

    def fetch(self, layer: int) -> None:
        """Start to copy a layer; discard a copy of another layer."""
        for dropped in self.coming.values():
            dropped.result()
        self.coming = {layer: self.copier.submit(self.copies, layer)}

    def copies(self, layer: int) -> list[torch.Tensor]:
        """Copy a layer's weights to the device; on CUDA in a separate stream, next to the
        computation.
        """
        import torch

        with nullcontext() if self.side_stream is None else torch.cuda.stream(self.side_stream):
            return [host.to(self.device, copy=True) for _, host in self.hosts[layer]]

    def release(self) -> None:
        """Free the memory of the layer on the device once all computations with it are done."""
        import torch

        if self.held is None:
            return
        if self.side_stream is not None:
            torch.cuda.synchronize(self.device)
        for weight, host in self.hosts[self.held]:
            weight.data = host
        self.held = None

    def fitting(self, tokens: int) -> int:
        """Return how many windows of ``tokens`` fit into half of the free memory.

        A stopped forward holds its embeddings, its state, rotary tables and, in some attentions, a
        mask [L, L].
        """
        import torch

        room = CPU_BYTES
        if self.device.type == "cuda":
            room = torch.cuda.mem_get_info(self.device)[0] // 2
            room -= 2 * max(sum(host.nbytes for _, host in layer) for layer in self.hosts)
        each = 4 * tokens * (2 * self.config.hidden_size + tokens)
        return max(1, min(MOST_WINDOWS, int(room // each)))

    def close(self) -> None:
        """Stop copying, and forget windows that were not finished."""
        self.copier.shutdown(cancel_futures=True)
        self.forwards, self.coming = [], {}
        self.release()


def decoder_layers(model: Any, option: str = "streaming") -> Sequence[Any]:
    """Return the text decoder's list of layers; ModelError if no list has the length in the config."""
    count = model.config.get_text_config().num_hidden_layers
    return layer_list(model.get_decoder(), count, f"engine.{option}: {type(model).__name__}")


def stop_before(layer: int, *_: Any) -> None:
    """Suspend a window's forward pass until ``layer`` is on the device."""
    import greenlet

    greenlet.getcurrent().parent.switch(layer)
