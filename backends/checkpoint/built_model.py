"""The model that a config describes, as Transformers builds it: its tensors and their names.

The functions import torch and Transformers, which the driver does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .folder import Checkpoint


def import_transformers() -> None:
    """Import what building a model and checking its tensors imports; it takes some seconds."""
    from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: F401


def meta_model(checkpoint: Checkpoint) -> Any:
    """Return the model of a config on the meta device, with the class that the config names."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    # ``stored_tensors`` has the names of an unquantized checkpoint.
    nested: list[Any] = [config, getattr(config, "text_config", None)]
    for part_of_config in nested:
        if getattr(part_of_config, "quantization_config", None) is not None:
            del part_of_config.quantization_config
    class_name = next(iter(config.architectures or ()), "")
    model_class = getattr(transformers, class_name, None)
    with torch.device("meta"):
        if model_class is not None and hasattr(model_class, "_from_config"):
            model = model_class._from_config(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        model.tie_weights()
    return model


def new_names(model: Any, names: Sequence[str]) -> dict[str, str]:
    """Return name in the checkpoint -> name in the model, by Transformers' own rules of loading."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    converters = []
    renamings = []
    for rule in get_model_conversion_mapping(model):
        if isinstance(rule, WeightConverter):
            converters.append(rule)
        else:
            renamings.append(rule)
    expected = model.state_dict()
    renamed = {}
    for name in names:
        # A name that the model has is loaded unchanged, although a rule may match: DeepSeek-V4's
        # rules turn model.norm into model.kv_norm, but Transformers 5.19 itself saves and loads
        # model.norm.
        if name in expected:
            renamed[name] = name
        else:
            result = rename_source_key(
                name, renamings, converters, model.base_model_prefix, expected
            )
            renamed[name] = result[0]
    return renamed


def split_targets(model: Any, renamed: Mapping[str, str]) -> set[str]:
    """Return the model's names of tensors that Transformers cuts out of one stored tensor.

    Example: HRM's ``gate_proj`` and ``up_proj``.  ``renamed``: the result of ``new_names``.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    names = set()
    for rule in get_model_conversion_mapping(model):
        targets: list[str] = list(getattr(rule, "target_patterns", ()))
        if len(targets) < 2:
            continue
        for name, target in renamed.items():
            # ``new_names`` returns the first target of a rule.
            if name != target and targets[0] in target:
                for other in targets:
                    names.add(target.replace(targets[0], other))
    return names


def tied(model: Any) -> Mapping[str, str]:
    """Return the name of a tensor that the config ties to another -> the name of the other."""
    names = getattr(model, "all_tied_weights_keys", None)
    if names is None:  # Transformers 5.0 has only the names of the class
        names = getattr(model, "_tied_weights_keys", None) or {}
    return dict(names)
