"""`videoscale export`: the trained weights of a checkpoint as a folder for diffusers' `from_pretrained`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lightning_videoscale.compat.diffusers import CLASS_NAME
from lightning_videoscale.strategies.checkpoints.folder import CheckpointError, CheckpointFolder, read_weights


def export(checkpoint: Path, output: Path, module: str | None = None) -> str:
    """Writes one network of a checkpoint as its ``save_pretrained`` would, without the LightningModule it was part of.

    Weights keep the dtype they were saved in: that of the parameters, float32 under ZeRO. If a weight-averaging
    callback ran, they are the averaged ones, as in Lightning's own checkpoints.

    Args:
        checkpoint: A checkpoint of one of our strategies.
        output: The folder to write.
        module: Path of the network within the LightningModule. Left out, the one diffusers model in it.

    Returns:
        The path of the network that was written.

    Raises:
        CheckpointError: If that is no checkpoint, has no such network, or one that diffusers does not have.
    """
    networks: dict[str, str] = CheckpointFolder(checkpoint).rest.get("lightning_videoscale", {}).get("networks", {})
    if module is None and len(networks) == 1:
        (module,) = networks
    if module is None or module not in networks:
        raise CheckpointError(
            f"{checkpoint} holds these diffusers models: {sorted(networks)}. "
            + ("Name one of them with --module." if networks else "Use `strategies.read_weights` for others.")
        )
    config: dict[str, Any] = json.loads(networks[module])
    with torch.device("meta"):
        model = _diffusers_class(config[CLASS_NAME]).from_config(config)
    weights = read_weights(checkpoint, module)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"The weights of {module!r} are not those of a {config[CLASS_NAME]} alone (adapters, perhaps): {error}"
        ) from error
    model.save_pretrained(output)
    return module


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``export`` to the command line."""
    description = "Writes a trained network as an ordinary diffusers folder, for from_pretrained."
    parser = commands.add_parser("export", help="weights of a checkpoint for diffusers", description=description)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, such as checkpoints/last.ckpt")
    parser.add_argument("output", type=Path, help="the folder to write")
    parser.add_argument("--module", help="path of the network in the LightningModule, such as transformer")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        module = export(options.checkpoint, options.output, options.module)
    except (CheckpointError, ModuleNotFoundError) as error:
        Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False)
        return 1
    Console(soft_wrap=True).print(f"{module} -> {options.output}", markup=False)
    return 0


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
