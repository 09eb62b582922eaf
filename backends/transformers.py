"""Hugging Face Transformers, one window at a time, with upstream's four ways to load.

``transformers``: fp16 on one device; ``transformers_auto``: fp16, ``device_map="auto"``; ``transformers_auto_bf16``:
the same in bf16; ``transformers_mm``: fp16, the text side of an image-text model.  Without a GPU the device is the
CPU.  ``dtype`` in ``engine`` replaces the dtype.
"""

from __future__ import annotations

import gc
import importlib.util
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from backends import hub, storage
from backends.base import (
    Capabilities,
    InputError,
    LoadRequest,
    LogitsBackend,
    ModelError,
    Storage,
    Window,
    installed_versions,
)
from backends.folder import FolderModel
from backends.messages import one_line
from backends.options import parse_options
from backends.reference import Head

if TYPE_CHECKING:
    import torch

BF16 = {"transformers_auto_bf16"}
DEVICE_MAP_AUTO = {"transformers_auto", "transformers_auto_bf16"}
IMAGE_TEXT = {"transformers_mm"}


class TransformersOptions(BaseModel):
    """The ``engine`` object: arguments of ``from_pretrained`` that change what runs."""

    model_config = ConfigDict(extra="forbid")

    dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = None
    device_map: str | dict[str, int | str] | None = None
    attn_implementation: str | None = None
    experts_implementation: str | None = None
    max_memory: dict[int | str, int | str] | None = None
    offload_folder: str | None = None
    trust_remote_code: bool = False


class TransformersBackend(FolderModel, LogitsBackend):
    """A causal language model of Transformers."""

    capabilities = Capabilities(
        load_fns=("transformers", "transformers_auto", "transformers_auto_bf16", "transformers_mm"),
        fwd_fn="transformers",
        packages=("transformers",),
        install="pip install 'transformers>=5.5' accelerate compressed-tensors",
        summary="any checkpoint Transformers runs, logits on GPU or CPU",
    )

    def __init__(self, request: LoadRequest) -> None:
        super().__init__(request)
        self.options = parse_options(TransformersOptions, request.options)
        self.model: Any = None
        self.entered: Any = None

    @classmethod
    def check(cls, request: LoadRequest) -> None:
        parse_options(TransformersOptions, request.options)
        if importlib.util.find_spec("accelerate") is None:
            raise InputError(f"accelerate is not installed: {cls.capabilities.install}")

    @classmethod
    def versions(cls) -> dict[str, str]:
        return installed_versions(("torch", "transformers", "accelerate", "compressed-tensors"))

    def load(self) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        folder = hub.resolve(self.request.model_dir, self.request.revision)
        loader = (
            transformers.AutoModelForImageTextToText
            if self.request.load_fn in IMAGE_TEXT
            else transformers.AutoModelForCausalLM
        )
        try:
            self.model = loader.from_pretrained(folder, **self._arguments(torch.cuda.is_available())).eval()
        except Exception as error:  # whatever Transformers, accelerate or a quantizer raises: one model's failure
            raise ModelError(f"Transformers could not load {folder}: {one_line(error)}") from error

    def _arguments(self, cuda: bool) -> dict[str, Any]:
        options = self.options.model_dump(exclude_none=True)
        dtype = "bfloat16" if self.request.load_fn in BF16 else "float16"
        one_device = "cuda:0" if cuda else "cpu"
        device_map = "auto" if self.request.load_fn in DEVICE_MAP_AUTO and cuda else one_device
        return {"dtype": dtype, "device_map": device_map, "use_safetensors": True, **options}

    def logits(self, window: Window) -> torch.Tensor:
        import torch

        token_ids = torch.from_numpy(window.token_ids).long().unsqueeze(0).to(self.model.device)
        with torch.inference_mode():
            logits: torch.Tensor = self.model(token_ids, use_cache=False).logits[0]
        return logits

    def head(self) -> tuple[torch.Tensor, torch.Tensor | None, Head] | str:
        """The output embedding, with the soft cap and the scale that the config names; ``states`` from here on."""
        import torch

        module = self.model.get_output_embeddings()
        if not isinstance(module, torch.nn.Linear) or type(module.weight) is not torch.nn.Parameter:
            return f"its head is {'missing' if module is None else 'a ' + type(module).__name__}"
        if module.weight.is_meta:
            return "its head is not resident"
        if self.entered is None:
            self.entered = torch.empty(0)
            module.register_forward_pre_hook(self._enter)
        config = self.model.config.get_text_config()
        scale = number(config, "logit_scale", 1.0) / number(config, "logits_scaling", 1.0)
        facts = Head(
            module.weight.shape[0], str(module.weight.dtype).removeprefix("torch."),
            number(config, "final_logit_softcapping", 0.0) or None, scale,
        )  # fmt: skip
        return module.weight.detach(), None if module.bias is None else module.bias.detach(), facts

    def _enter(self, _: Any, given: tuple[Any, ...]) -> None:
        self.entered = given[0][0]

    def states(self) -> torch.Tensor:
        states: torch.Tensor = self.entered
        return states

    def storage(self) -> Storage:
        return storage.storage_of(hub.resolve(self.request.model_dir, self.request.revision))

    def provenance(self) -> dict[str, Any]:
        parameters = next(self.model.parameters())
        return {
            "model_class": type(self.model).__name__,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(parameters.device),
            "attention": self.model.config._attn_implementation,
            "batch": "one window at a time",
            "options": self.options.model_dump(exclude_none=True),
        }

    def close(self) -> None:
        self.model = self.entered = None
        gc.collect()
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def number(config: Any, name: str, missing: float) -> float:
    """A number of a config; MPT's logit_scale may be a word, and then the head's check decides."""
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) and value else missing
