"""What peft's adapters are in a model: which parameters are theirs, and what a checkpoint says of them.

peft is not imported here unless a model has its layers, for which somebody has imported it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

KEEPS_BASE = ("gaussian", "orthogonal", "eva", "mica")
"""Initial values of LoRA, by name, that leave the base as it is; others, such as PiSSA's, are taken out of it."""


def adapter_parameters(root: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters that adapters have added, frozen or not: their matrices, and ``modules_to_save``."""
    return {parameter for module in _adapter_modules(root) for parameter in _added_by(module)}


def only_adapters_train(root: nn.Module) -> bool:
    """Whether adapters train and the networks that have them are otherwise frozen, so that these can be built again.

    Not so where the initial values of an adapter are taken out of the base, as PiSSA's are.
    """
    added = adapter_parameters(root)
    adapted = {p for module in [*_adapter_modules(root), *_adapted_modules(root)] for p in module.parameters()}
    configs = [config for module in _adapted_modules(root) for config in _configs(module).values()]
    return (
        any(parameter.requires_grad for parameter in added)
        and not any(parameter.requires_grad for parameter in adapted - added)
        and not any(changes_base(config.to_dict()) for config in configs)
    )


def changes_base(config: Mapping[str, Any]) -> bool:
    """Whether an adapter of this configuration changes the base's weights when it is added."""
    initial = config.get("init_lora_weights", True)
    return isinstance(initial, str) and initial.lower() not in KEEPS_BASE


def describe_adapters(model: Any) -> str | None:
    """Returns what is needed to write a model's adapters to files, as JSON; None if it has none.

    Returns:
        ``configs`` by the adapters' names; ``files``, which says by the name in an adapter's file which entry of the
        model's ``state_dict`` it is; ``active``; ``scaled``, those that have another scale than their configuration
        says, as by ``set_adapters(names, weights)``; and ``wrapped``, whether the model is a ``PeftModel``.
    """
    configs = _configs(model)
    if not configs:
        return None
    from peft.tuners.tuners_utils import BaseTunerLayer

    layer = next((child for child in model.modules() if isinstance(child, BaseTunerLayer)), None)
    described = {
        "configs": {name: config.to_dict() for name, config in configs.items()},
        "files": {name: _names_in_file(model, name) for name in configs},
        "active": list(configs) if layer is None else list(layer.active_adapters),
        "scaled": sorted(_scaled(model)),
        "wrapped": is_peft_model(model),
    }
    return json.dumps(described, default=_plain)


def is_peft_model(module: nn.Module) -> bool:
    """Whether a module is peft's around a network, rather than a network into which adapters were put."""
    return hasattr(type(module), "get_base_model")


def _names_in_file(model: Any, adapter: str) -> dict[str, str]:
    from peft import get_peft_model_state_dict

    names = {name: name for name in model.state_dict(keep_vars=True)}
    try:
        # Without embeddings, for which peft would look at a hub.
        found: dict[str, str] = get_peft_model_state_dict(model, names, adapter, save_embedding_layers=False)
    except Exception as error:  # whatever it is, a checkpoint is not lost for it
        rank_zero_warn(f"`videoscale export` will not know the adapter {adapter!r} of this checkpoint: {error}")
        return {}
    return found


def _scaled(model: nn.Module) -> set[str]:
    configs, found = _configs(model), set()
    for layer in _adapter_modules(model):
        for name, scale in getattr(layer, "scaling", {}).items():
            if name in configs and name in getattr(layer, "lora_alpha", {}):
                rank: float = layer.r[name] ** (0.5 if getattr(configs[name], "use_rslora", False) else 1)
                if not math.isclose(scale, layer.lora_alpha[name] / rank):
                    found.add(name)
    return found


def _configs(module: nn.Module) -> dict[str, Any]:
    configs = getattr(module, "peft_config", None)
    if not isinstance(configs, Mapping):  # a LightningModule may keep anything under this name
        return {}
    return {name: config for name, config in configs.items() if hasattr(config, "peft_type")}


def _adapted_modules(root: nn.Module) -> Iterator[nn.Module]:
    return (module for module in root.modules() if _configs(module))


def _adapter_modules(root: nn.Module) -> list[Any]:
    if "peft" not in sys.modules:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    return [module for module in root.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]


def _added_by(module: Any) -> set[nn.Parameter]:
    base = module.get_base_layer() if hasattr(module, "get_base_layer") else module.original_module
    return set(module.parameters()) - set(base.parameters())


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)
