"""A model that is a Hugging Face folder of safetensors, on disk or on the hub: what engines that read one share."""

from __future__ import annotations

from dataclasses import replace

from backends import checkpoint, hub
from backends.base import Backend, InputError, LoadRequest, ModelFacts
from backends.watch import SILENT, Watch


class FolderModel(Backend):
    """See the module's docstring; to be mixed into an engine before its kind."""

    @classmethod
    def is_remote(cls, request: LoadRequest) -> bool:
        return hub.is_hub_id(request.model_dir)

    @classmethod
    def fetch(cls, request: LoadRequest, watch: Watch = SILENT) -> LoadRequest:
        folder = hub.resolve(request.model_dir, request.revision, watch=watch)
        return replace(request, model_dir=str(folder), revision=None)

    @classmethod
    def here(cls, request: LoadRequest) -> LoadRequest | None:
        try:
            folder = hub.resolve(request.model_dir, request.revision, download=False)
        except InputError:
            return None
        return replace(request, model_dir=str(folder), revision=None)

    @classmethod
    def would_fetch(cls, request: LoadRequest) -> str:
        return hub.probe(request.model_dir, request.revision)

    @classmethod
    def facts(cls, request: LoadRequest) -> ModelFacts:
        folder = hub.resolve(request.model_dir, request.revision)
        config = checkpoint.config_of(folder)
        if not checkpoint.weight_files(folder):
            raise InputError(f"model_dir: {folder}: no .safetensors files; compare_q loads no pickled weights")
        return ModelFacts(checkpoint.vocab_size(config), checkpoint.context_length(config), folder)

    @classmethod
    def stamp(cls, request: LoadRequest) -> str:
        return checkpoint.stamp(hub.resolve(request.model_dir, request.revision), request.override_tensors)

    @classmethod
    def content(cls, request: LoadRequest) -> str:
        folder = hub.resolve(request.model_dir, request.revision)
        return checkpoint.stamp(folder, request.override_tensors, times=False)
