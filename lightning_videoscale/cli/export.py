"""`videoscale export`: the trained weights of a checkpoint as a folder for diffusers' `from_pretrained`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.console import Console
from torch import Tensor, nn

from lightning_videoscale.compat.diffusers import CLASS_NAME
from lightning_videoscale.strategies.checkpoints.folder import CheckpointError, CheckpointFolder, read_weights

Adapters = Literal["merge", "alone"]
"""Merged into the weights of their network, or as files of their own."""


def export(
    checkpoint: Path,
    output: Path,
    module: str | None = None,
    adapters: Adapters | None = None,
    averaged: bool | None = None,
) -> str:
    """Writes one network of a checkpoint as its ``save_pretrained`` would, without the LightningModule it was part of.

    Weights keep the dtype they were saved in: that of the parameters, float32 under ZeRO and of averages. If a callback
    of Lightning's averaged the weights, they are the averaged ones, as in Lightning's own checkpoints.

    Args:
        checkpoint: A checkpoint of one of our strategies.
        output: The folder to write.
        module: Path of the network within the LightningModule. Left out, the one diffusers model in it.
        adapters: Of a network that was trained with adapters of peft: ``"merge"`` those that were active into its
            weights, or write the adapters ``"alone"``, as their own method does: ``save_lora_adapter`` of those that
            diffusers' ``add_adapter`` added, ``save_pretrained`` of a ``PeftModel``.
        averaged: The averages of the callback `EMA`, or the weights in training. Left out, the averages if there are
            any.

    Returns:
        The path of the network that was written.

    Raises:
        CheckpointError: If that is no checkpoint, has no such network, or one that diffusers does not have; or if it
            has adapters and ``adapters`` is left out, or the other way round; or if it lacks the averages wanted.
    """
    folder = CheckpointFolder(checkpoint)
    ours = folder.rest.get("lightning_videoscale", {})
    networks: dict[str, str] = ours.get("networks", {})
    if module is None and len(networks) == 1:
        (module,) = networks
    if module is None or module not in networks:
        raise CheckpointError(
            f"{checkpoint} holds these diffusers models: {sorted(networks)}. "
            + ("Name one of them with --module." if networks else "Use `strategies.read_weights` for others.")
        )
    described: dict[str, Any] = json.loads(ours.get("adapters", {}).get(module, "{}"))
    _check_choice(module, described, adapters)
    config: dict[str, Any] = json.loads(networks[module])
    with torch.device("meta"):
        network = _diffusers_class(config[CLASS_NAME]).from_config(config)
    weights = read_weights(checkpoint, module, folder.has_averages if averaged is None else averaged)
    if described:
        _save_adapted(network, described, weights, output, merge=adapters == "merge")
    else:
        _fill(network, weights)
        network.save_pretrained(output)
    return module


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``export`` to the command line."""
    description = "Writes a trained network as an ordinary diffusers folder, for from_pretrained, or its adapters."
    parser = commands.add_parser("export", help="weights of a checkpoint for diffusers", description=description)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, such as checkpoints/last.ckpt")
    parser.add_argument("output", type=Path, help="the folder to write")
    parser.add_argument("--module", help="path of the network in the LightningModule, such as transformer")
    parser.add_argument(
        "--adapters", choices=get_args(Adapters), help="merge adapters (LoRA) into the network, or write them alone"
    )
    parser.add_argument(
        "--ema",
        action=argparse.BooleanOptionalAction,
        help="averages of the weights (callback EMA), or the weights in training; by default averages if there are any",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        module = export(options.checkpoint, options.output, options.module, options.adapters, options.ema)
    except (CheckpointError, ModuleNotFoundError) as error:
        Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False)
        return 1
    Console(soft_wrap=True).print(f"{module} -> {options.output}", markup=False)
    return 0


def _check_choice(module: str, described: Mapping[str, Any], adapters: Adapters | None) -> None:
    if described and adapters is None:
        raise CheckpointError(
            f"{module!r} was trained with the adapters {list(described['configs'])}. --adapters merge writes the "
            f"network with {described['active']} merged into its weights, for from_pretrained; --adapters alone writes "
            f"the adapters, for {'PeftModel.from_pretrained' if described['wrapped'] else 'load_lora_adapter'}."
        )
    if adapters is not None and not described:
        raise CheckpointError(f"The checkpoint says of no adapters of {module!r}: leave out --adapters.")


def _save_adapted(
    network: Any, described: Mapping[str, Any], weights: Mapping[str, Tensor], output: Path, merge: bool
) -> None:
    """Builds a network with its adapters in the way of peft, whichever way they came, and saves one or the other."""
    import peft

    configs = {name: _adapter_config(config) for name, config in described["configs"].items()}
    names = list(configs)
    with torch.device("meta"):
        model = peft.get_peft_model(network, _without_values(described["configs"][names[0]]), names[0])
        for name in names[1:]:
            model.add_adapter(name, _without_values(described["configs"][name]))
    prefix = "" if described["wrapped"] else "base_model.model."
    _fill(model, {f"{prefix}{name}": value for name, value in weights.items()})
    model.peft_config.update(configs)
    if merge:
        model.merge_and_unload(adapter_names=described["active"]).save_pretrained(output)
    elif described["wrapped"]:
        model.save_pretrained(output)
    else:
        for name in names:
            network.save_lora_adapter(output / name if len(names) > 1 else output, name)


def _adapter_config(config: Mapping[str, Any]) -> Any:
    import peft

    config_class: Any = peft.PeftConfig
    return config_class.from_peft_type(**config)


def _without_values(config: Mapping[str, Any]) -> Any:
    """The configuration of an adapter that computes no initial values, as from the base's singular vectors."""
    built = _adapter_config(config)
    if hasattr(built, "init_lora_weights"):
        built.init_lora_weights = False
    return built


def _fill(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    held = network.state_dict()
    lacking, unexpected = [x for x in held if x not in weights], [x for x in weights if x not in held]
    other = [x for x in held if x in weights and held[x].shape != weights[x].shape]
    if lacking or unexpected or other:
        adapted = any(".base_layer." in name or "lora_" in name for name in unexpected)
        raise CheckpointError(
            f"The weights do not fit a {type(network).__name__}: {_some(lacking)} missing, {_some(unexpected)} "
            f"unexpected, {_some(other)} of other shape. "
            + ("Adapters are among them, whose configuration the checkpoint does not hold. " if adapted else "")
            + "Build the network as in training, and fill it by network.load_state_dict(strategies.read_weights("
            "checkpoint, module))."
        )
    network.load_state_dict(weights, assign=True)


def _some(names: Iterable[str]) -> str:
    first = list(names)
    return f"{len(first)}" + (f" (such as {first[0]})" if first else "")


def _diffusers_class(name: str) -> Any:
    try:
        import diffusers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Exporting needs diffusers: pip install diffusers.") from error
    found = getattr(diffusers, name, None)
    if not (isinstance(found, type) and issubclass(found, diffusers.ModelMixin)):
        raise CheckpointError(
            f"diffusers has no model {name!r}: build your own, and fill it with load_state_dict(read_weights(...))."
        )
    return found
