"""A model that is a Hugging Face folder of safetensors, on disk or on the hub: the files of most engines.

Only ``fetch``, ``cached`` and ``would_fetch`` know the hub.  From a fetched request on, the model is a folder.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

from compare_q.backends import hub
from compare_q.backends.base import LoadRequest, ModelFacts, ModelFiles, Storage
from compare_q.backends.checkpoint import files, stored_bits
from compare_q.backends.checkpoint.config import CheckpointConfig
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import printable
from compare_q.backends.hub import SILENT, Watch


class HuggingFaceFolder(ModelFiles):
    """See the module's docstring; an engine whose options change what the files mean derives its own class from it."""

    @property
    def is_remote(self) -> bool:
        return hub.is_hub_id(self.request.model_dir)

    @cached_property
    def folder(self) -> Path:
        """The folder of the request's model, which is on this machine; InputError if it is not."""
        return hub.local_folder(self.request.model_dir)

    @cached_property
    def config(self) -> CheckpointConfig:
        """What the folder's config.json says; InputError if it is missing or damaged."""
        return CheckpointConfig.read(self.folder)

    def fetch(self, watch: Watch = SILENT) -> LoadRequest:
        return self._in(hub.resolve(self.request.model_dir, self.request.revision, watch=watch))

    def cached(self) -> LoadRequest | None:
        try:
            return self._in(hub.resolve(self.request.model_dir, self.request.revision, download=False))
        except InputError:
            return None

    def _in(self, folder: Path) -> LoadRequest:
        return replace(self.request, model_dir=str(folder), revision=None)

    def would_fetch(self) -> str:
        return hub.would_fetch(self.request.model_dir, self.request.revision)

    def facts(self) -> ModelFacts:
        config, options = self.config, self.request.options
        if not files.weight_files(self.folder):
            raise InputError(f"model_dir: {self.folder}: no .safetensors files; compare_q loads no pickled weights")
        if options.get("trust_remote_code") and (code := config.foreign_code):
            raise InputError(
                f"model_dir: {self.folder}: auto_map names code of another repository, {printable(code)}, which may "
                "change; copy its .py files into the folder and leave its name out"
            )
        asked = str(options.get("dtype", "auto"))
        dtype = config.dtype if asked == "auto" else asked
        return ModelFacts(config.vocab_size, config.context, self.folder, dtype=dtype)

    def stamp(self) -> str:
        return files.stamp(self.folder, self.request.override_tensors)

    def content(self) -> str:
        return files.stamp(self.folder, self.request.override_tensors, times=False)

    def weight_files(self) -> tuple[Path, ...]:
        return (*files.weight_files(self.folder), *self.request.override_tensors)

    def storage(self) -> Storage:
        return stored_bits.storage_of(self.folder, self.request.override_tensors)
