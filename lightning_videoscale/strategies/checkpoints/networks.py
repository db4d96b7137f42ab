"""What a checkpoint says of diffusers' models and their adapters, from which `videoscale export` builds them again."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from lightning_videoscale.compat.diffusers import CLASS_NAME
from lightning_videoscale.strategies.units import class_before_sharding


def describe_networks(root: nn.Module) -> dict[str, dict[str, str]]:
    """Returns JSON texts by the path of the outermost diffusers models.

    Returns:
        ``networks``: class and configuration. ``adapters``, of those that have any: by name their configurations, which
        of them are active, and whether the model lies in peft's ``PeftModel``.
    """
    networks: dict[str, str] = {}
    adapters: dict[str, str] = {}
    for path, module in root.named_modules():
        if any(path.startswith(f"{outer}.") for outer in networks):
            continue
        model: Any = module
        wrapped = hasattr(type(module), "get_base_model")  # of peft, which passes what it lacks on to the model
        if hasattr(model, "save_pretrained") and hasattr(model, "to_json_string"):
            own_class = class_before_sharding(model.get_base_model() if wrapped else model).__name__
            networks[path] = json.dumps(json.loads(model.to_json_string()) | {CLASS_NAME: own_class})
            if getattr(model, "peft_config", None):
                adapters[path] = json.dumps(_describe_adapters(model) | {"wrapped": wrapped}, default=_plain)
    return {"networks": networks, "adapters": adapters}


def _describe_adapters(model: Any) -> dict[str, Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    layer = next((child for child in model.modules() if isinstance(child, BaseTunerLayer)), None)
    configs = {name: config.to_dict() for name, config in model.peft_config.items()}
    return {"configs": configs, "active": list(configs) if layer is None else list(layer.active_adapters)}


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)
