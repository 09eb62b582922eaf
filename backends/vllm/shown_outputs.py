"""A run of one window in vLLM that shows what the model's modules take and return, in its rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..common.message_text import with_class
from ..layers.module_outputs import ModuleHooks, OutputComparer, OutputWriter
from ..layers.noise import vllm_decoder_layers
from ..module_differences import differences_to_json
from .hooks import before_forwards
from .logits import KeptLogits, LogitsSource

CHUNK_ROWS = 1024
"""Rows of logits that are computed at a time."""


class ShownOutputs:
    """The hooks of one run, from now until ``end``; ModelError if the model cannot have them.

    ``compare``: with the file; False: write it.  ``length``: tokens of the window.  ``logits``
    receives the steps, and keeps the window's logits.
    """

    def __init__(
        self, runner: Any, n_layers: int, source: LogitsSource, file: str, compare: bool, length: int
    ) -> None:
        self.length = length
        self.logits = KeptLogits(source, CHUNK_ROWS)
        self.comparer: OutputComparer | None = None
        self.writer: OutputWriter | None = None
        visitor: OutputComparer | OutputWriter
        if compare:
            visitor = self.comparer = OutputComparer(Path(file))
        else:
            visitor = self.writer = OutputWriter(Path(file))
        model = runner.get_model()
        layers = list(vllm_decoder_layers(model, n_layers).values())
        self.hooks = ModuleHooks(model, layers, visitor, length, pairs=True)
        self.hooks.handles.append(before_forwards(runner, self.hooks.begin))

    def end(self) -> str:
        """Remove the hooks; return the differences, or the error, as JSON."""
        differences = []
        error = ""
        try:
            self.hooks.show_logits(self.logits.logits, self.length)
            self.hooks.remove()
            if self.writer is not None:
                self.writer.close()
            if self.comparer is not None:
                differences = self.comparer.differences()
                self.comparer.close()
        except Exception as failure:
            error = with_class(failure)
        return json.dumps({"error": error, "differences": differences_to_json(differences)})
