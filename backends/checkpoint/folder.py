"""A model that is a Hugging Face folder of safetensors, on disk or on the hub: the code that its engines share.

Only ``fetch``, ``here`` and ``would_fetch`` know the hub.  From a fetched request on, the model is a folder.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

from backends.base import Backend, LoadRequest, ModelFacts
from backends.checkpoint import files
from backends.checkpoint.config import CheckpointConfig
from backends.common.errors import InputError
from backends.common.messages import printable
from backends.common.watch import SILENT, Watch
from backends.hub import repositories


class FolderModel(Backend):
    """See the module's docstring; an engine derives from it before it derives from its kind of backend."""

    @cached_property
    def folder(self) -> Path:
        """The folder of the request's model, which is on this machine; InputError if it is not."""
        return repositories.local_folder(self.request.model_dir)

    @classmethod
    def is_remote(cls, request: LoadRequest) -> bool:
        return repositories.is_hub_id(request.model_dir)

    @classmethod
    def fetch(cls, request: LoadRequest, watch: Watch = SILENT) -> LoadRequest:
        folder = repositories.resolve(request.model_dir, request.revision, watch=watch)
        return replace(request, model_dir=str(folder), revision=None)

    @classmethod
    def here(cls, request: LoadRequest) -> LoadRequest | None:
        try:
            folder = repositories.resolve(request.model_dir, request.revision, download=False)
        except InputError:
            return None
        return replace(request, model_dir=str(folder), revision=None)

    @classmethod
    def would_fetch(cls, request: LoadRequest) -> str:
        return repositories.would_fetch(request.model_dir, request.revision)

    @classmethod
    def facts(cls, request: LoadRequest) -> ModelFacts:
        folder = repositories.local_folder(request.model_dir)
        config = CheckpointConfig.read(folder)
        if not files.weight_files(folder):
            raise InputError(f"model_dir: {folder}: no .safetensors files; compare_q loads no pickled weights")
        if request.options.get("trust_remote_code") and (code := config.foreign_code):
            raise InputError(
                f"model_dir: {folder}: auto_map names code of another repository, {printable(code)}, which may change; "
                "copy its .py files into the folder and leave its name out"
            )
        asked = str(request.options.get("dtype", "auto"))
        return ModelFacts(config.vocab_size, config.context, folder, dtype=config.dtype if asked == "auto" else asked)

    @classmethod
    def stamp(cls, request: LoadRequest) -> str:
        return files.stamp(repositories.local_folder(request.model_dir), request.override_tensors)

    @classmethod
    def weight_files(cls, request: LoadRequest) -> tuple[Path, ...]:
        return (*files.weight_files(repositories.local_folder(request.model_dir)), *request.override_tensors)

    @classmethod
    def content(cls, request: LoadRequest) -> str:
        return files.stamp(repositories.local_folder(request.model_dir), request.override_tensors, times=False)
