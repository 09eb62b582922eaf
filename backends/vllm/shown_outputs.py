"""A run of one window in vLLM that shows what the model's modules take and return, in its rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..layers.module_outputs import ModuleHooks, OutputComparer, OutputWriter, error_text
from ..layers.noise import vllm_decoder_layers
from ..module_differences import differences_to_json
from .hooks import before_forwards
from .logits import KeptLogits, LogitsSource

CHUNK_ROWS = 1024
"""Rows of logits that are computed at a time."""


class ShownOutputs:
    """The hooks of one run, from now until ``end``; ModelError if the model cannot have them.

    ``logits`` receives the steps, and keeps the window's logits.  ``n_layers``: of the model.
    ``length``: tokens of the window.  ``compare``: with the file; False: write it.
    """

    def __init__(
        self,
        runner: Any,
        n_layers: int,
        source: LogitsSource,
        file: Path,
        length: int,
        *,
        compare: bool,
    ) -> None:
        self.length = length
        self.logits = KeptLogits(source, CHUNK_ROWS)
        self.comparer: OutputComparer | None = None
        self.writer: OutputWriter | None = None
        visitor: OutputComparer | OutputWriter
        if compare:
            self.comparer = OutputComparer(file)
            visitor = self.comparer
        else:
            self.writer = OutputWriter(file)
            visitor = self.writer
        model = runner.get_model()
        layers = list(vllm_decoder_layers(model, n_layers).values())
        self.hooks = ModuleHooks(model, layers, visitor, length, pairs=True)
        self.hooks.handles.append(before_forwards(runner, self.hooks.begin))

    def end(self) -> str:
        """Remove the hooks; return the differences, or the error, as JSON."""
        differences = []
        error = ""
        try:
            try:
                self.hooks.show_logits(self.logits.logits, self.length)
            finally:
                self.hooks.remove()
            if self.writer is not None:
                self.writer.close()
            if self.comparer is not None:
                differences = self.comparer.differences()
                self.comparer.close()
        except Exception as failure:
            error = error_text(failure)
        return json.dumps({"error": error, "differences": differences_to_json(differences)})
