"""Two loaded models of one architecture whose modules can take each other's places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..common.errors import InputError, ModelError
from ..common.message_text import dtype_name
from ..layers.noise import layer_list
from ..logits_engine import LogitsEngine
from ..restoring import Base
from .transformers_layers import name_from_layers

OFF_DEVICE = "meta"
"""The device of weights that accelerate has moved to the CPU or to the disk."""


class ModelPair:
    """A quantized model and its reference; module paths are the same in both.

    ModelError or InputError if a module of one model cannot run in the other one.

    Attributes:
        engines: the two engines, by the base of a trial.
        models: their models.
        layers: their decoder layers, in order; a layer that runs several times is listed once.
        paths: name (``QuantizedModule.name``) -> path in the models.
        layer_paths: path of a decoder layer -> its number.
        places: path -> all paths of the same module object.
        head_path: path of the head; "" if the model does not have one.
        embedding_path: path of the embedding.
    """

    def __init__(self, engine: LogitsEngine, reference: LogitsEngine) -> None:
        check_one_device(engine)
        check_one_device(reference)
        check_same_settings(engine, reference)
        self.label = engine.planned.label
        self.engines: dict[Base, LogitsEngine] = {"quantized": engine, "reference": reference}
        self.models: dict[Base, Any] = {"quantized": engine.model, "reference": reference.model}
        self.layers = {base: layers_of(model) for base, model in self.models.items()}
        layer_number = {id(layer): n for n, layer in enumerate(self.layers["quantized"])}
        self.paths: dict[str, str] = {}
        self.layer_paths: dict[str, int] = {}
        self.places: dict[str, list[str]] = {}
        self.head_path = ""
        self.embedding_path = ""
        head = engine.model.get_output_embeddings()
        embedding = engine.model.get_input_embeddings()
        paths_of_module: dict[int, list[str]] = {}
        for path, module in engine.model.named_modules(remove_duplicate=False):
            if not path:
                continue
            self.paths.setdefault(name_from_layers(path), path)
            paths_of_module.setdefault(id(module), []).append(path)
            # The same list for all paths of a module that has several.
            self.places[path] = paths_of_module[id(module)]
            if id(module) in layer_number:
                self.layer_paths[path] = layer_number[id(module)]
            if module is head:
                self.head_path = path
            if module is embedding:
                self.embedding_path = path

    def both(self, path: str) -> tuple[Any, Any]:
        """Return the module with this path in the quantized model and in the reference."""
        quantized = self.models["quantized"].get_submodule(path)
        return quantized, self.models["reference"].get_submodule(path)

    def layer_of(self, path: str) -> int | None:
        """Return the number of the decoder layer with this module or tensor.

        None outside the layers.
        """
        while path:
            if path in self.layer_paths:
                return self.layer_paths[path]
            path = path.rpartition(".")[0]
        return None

    @contextmanager
    def exchanged(self, base: Base, paths: Sequence[str]) -> Iterator[None]:
        """Put modules of the other model into the model ``base`` for the duration of this block."""
        model = self.models[base]
        if base == "quantized":
            other = self.models["reference"]
        else:
            other = self.models["quantized"]
        originals = []
        try:
            for path in paths:
                replacement = other.get_submodule(path)
                for place in self.places[path]:
                    parent_path, _, name = place.rpartition(".")
                    parent = model.get_submodule(parent_path)
                    originals.append((parent, name, getattr(parent, name)))
                    setattr(parent, name, replacement)
            yield
        finally:
            # Backwards: a trial may name a module and a module in it.
            for parent, name, original in reversed(originals):
                setattr(parent, name, original)


def layers_of(model: Any) -> list[Any]:
    """Return the decoder layers of a model, each once; ModelError if no list has them."""
    count = model.config.get_text_config().num_hidden_layers
    layers = layer_list(model.get_decoder(), count, type(model).__name__)
    return list(dict.fromkeys(layers))


def check_one_device(engine: LogitsEngine) -> None:
    """ModelError if a loaded model is spread over several devices."""
    devices = {str(parameter.device) for parameter in engine.model.parameters()}
    if len(devices) > 1 or OFF_DEVICE in devices:
        raise ModelError(
            f"{engine.planned.label}: is spread over {', '.join(sorted(devices))}; modules can be "
            "exchanged between two models that fit on one device"
        )


def check_same_settings(engine: LogitsEngine, reference: LogitsEngine) -> None:
    """InputError or ModelError if two models compute with other types, devices or attention."""
    model = engine.model
    other = reference.model
    if type(model) is not type(other):
        raise ModelError(
            f"{engine.planned.label} is a {type(model).__name__}, and "
            f"{reference.planned.label} a {type(other).__name__}: their modules cannot be exchanged"
        )
    values = {
        "engine.dtype": (dtype_name(model.dtype), dtype_name(other.dtype)),
        "engine.device_map": (str(model.device), str(other.device)),
        "engine.attn_implementation": (
            str(model.config._attn_implementation),
            str(other.config._attn_implementation),
        ),
    }
    for option, (value, other_value) in values.items():
        if value != other_value:
            raise InputError(
                f"{option}: {engine.planned.label} runs with {value} and "
                f"{reference.planned.label} with {other_value}; modules are exchanged only between "
                "models that run with the same"
            )
