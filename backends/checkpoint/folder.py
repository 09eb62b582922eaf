"""A model that is a Hugging Face folder of safetensors, on disk or on the hub: what engines that read one share."""

from __future__ import annotations

from dataclasses import replace

from backends.base import Backend, LoadRequest, ModelFacts
from backends.checkpoint import config as checkpoint_config
from backends.checkpoint import files
from backends.common.errors import InputError
from backends.common.watch import SILENT, Watch
from backends.hub import repositories


class FolderModel(Backend):
    """See the module's docstring; to be mixed into an engine before its kind."""

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
        return repositories.probe(request.model_dir, request.revision)

    @classmethod
    def facts(cls, request: LoadRequest) -> ModelFacts:
        folder = repositories.resolve(request.model_dir, request.revision)
        config = checkpoint_config.config_of(folder)
        if not files.weight_files(folder):
            raise InputError(f"model_dir: {folder}: no .safetensors files; compare_q loads no pickled weights")
        return ModelFacts(checkpoint_config.vocab_size(config), checkpoint_config.context_length(config), folder)

    @classmethod
    def stamp(cls, request: LoadRequest) -> str:
        return files.stamp(repositories.resolve(request.model_dir, request.revision), request.override_tensors)

    @classmethod
    def content(cls, request: LoadRequest) -> str:
        folder = repositories.resolve(request.model_dir, request.revision)
        return files.stamp(folder, request.override_tensors, times=False)
