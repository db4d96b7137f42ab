"""What a checkpoint says of diffusers' models and of adapters, from which `videoscale export` builds them again."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from lightning_videoscale.compat.diffusers import CLASS_NAME
from lightning_videoscale.strategies.checkpoints.adapters import describe_adapters, is_peft_model
from lightning_videoscale.strategies.units import class_before_sharding


def describe_networks(root: nn.Module) -> dict[str, dict[str, str]]:
    """Returns JSON texts by the path of the outermost models that are diffusers' or have adapters.

    Returns:
        ``networks``: class and configuration of diffusers' models. ``adapters``: what `describe_adapters` says.
    """
    networks: dict[str, str] = {}
    adapters: dict[str, str] = {}
    for path, module in root.named_modules():
        if not path or any(path.startswith(f"{outer}.") for outer in [*networks, *adapters]):
            continue
        model: Any = module
        if hasattr(model, "save_pretrained") and hasattr(model, "to_json_string"):
            own_class = class_before_sharding(model.get_base_model() if is_peft_model(module) else model).__name__
            networks[path] = json.dumps(json.loads(model.to_json_string()) | {CLASS_NAME: own_class})
        described = describe_adapters(module)
        if described is not None:
            adapters[path] = described
    return {"networks": networks, "adapters": adapters}
