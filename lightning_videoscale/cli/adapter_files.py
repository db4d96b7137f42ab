"""The files of adapters, as diffusers' and peft's loaders take them.

    pytorch_lora_weights.safetensors    for load_lora_weights and load_lora_adapter of diffusers, which find the
                                        configuration in the file's header
    adapter_model.safetensors           for PeftModel.from_pretrained and load_adapter of peft, with
    adapter_config.json

Names and header are those of ``save_lora_weights`` in diffusers 0.42 and ``save_pretrained`` in peft 0.21.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_videoscale.strategies.checkpoints.adapters import changes_base
from lightning_videoscale.strategies.checkpoints.errors import CheckpointError

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"

_IN_PIPELINE = "transformer"
"""What diffusers' pipelines call the network, also those that have a second one."""

_IN_PEFT_MODEL = "base_model.model."


def write_adapters(described: Mapping[str, Any], read: Callable[[str], Tensor], output: Path) -> list[str]:
    """Writes every adapter of a network: one into the folder itself, several into folders of their names.

    Args:
        described: What `describe_adapters` said when the checkpoint was saved.
        read: Returns a weight of the network by its name.
        output: The folder.

    Returns:
        For each adapter, what was written where, in words.

    Raises:
        CheckpointError: If an adapter makes sense with weights of its base only which no file of adapters holds, or the
            checkpoint does not say which weights are the adapter's. Also if its name leads out of the folder.
    """
    configs: Mapping[str, dict[str, Any]] = described["configs"]
    for name, config in configs.items():
        if changes_base(config):
            raise CheckpointError(
                f"The adapter {name!r} has init_lora_weights={config['init_lora_weights']!r}, which takes its initial "
                "values out of the base: alone it does not fit the base's weights. Use --merge."
            )
        if not (output / name).resolve().is_relative_to(output.resolve()):
            raise CheckpointError(f"The adapter {name!r} has the name of a place outside of {output}.")
        if not described.get("files", {}).get(name):
            raise CheckpointError(
                f"The checkpoint does not say which weights are those of the adapter {name!r}. Use --merge, or build "
                "the network as in training, fill it with strategies.read_weights, and save it by its own method."
            )
    said = []
    for name, config in configs.items():
        weights = {key: read(own) for key, own in described["files"][name].items()}
        folder = output / name if len(configs) > 1 else output
        folder.mkdir(parents=True, exist_ok=True)
        _write_for_peft(folder, config, weights)
        said.append(f"{name} -> {folder}: {PEFT_FILE} for peft")
        reason = _why_not_for_diffusers(config, weights)
        if reason is None:
            _write_for_diffusers(folder, config, weights)
            said[-1] += f", {DIFFUSERS_FILE} for diffusers"
        else:
            (folder / DIFFUSERS_FILE).unlink(missing_ok=True)  # of another export
            said[-1] += f"; diffusers' loaders take no {reason}: load it by peft, or use --merge"
    return said


def _write_for_peft(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    inside = {key: key if key.startswith("base_model.") else f"{_IN_PEFT_MODEL}{key}" for key in weights}
    _save(folder / PEFT_FILE, {inside[key]: value for key, value in weights.items()}, {})
    text = json.dumps({**config, "inference_mode": True}, indent=2, sort_keys=True)
    (folder / PEFT_CONFIG).write_text(text, encoding="utf-8")


def _write_for_diffusers(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    header = {f"{_IN_PIPELINE}.{key}": value for key, value in config.items()}
    _save(
        folder / DIFFUSERS_FILE,
        {f"{_IN_PIPELINE}.{key.removeprefix(_IN_PEFT_MODEL)}": value for key, value in weights.items()},
        {"lora_adapter_metadata": json.dumps(header, indent=2, sort_keys=True)},
    )


def _why_not_for_diffusers(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> str | None:
    """What diffusers would refuse or load wrongly; None if there is nothing."""
    if config["peft_type"] != "LORA":
        return f"adapters of type {config['peft_type']}"
    if config.get("target_parameters"):
        return "target_parameters"
    others = [key for key in weights if "lora" not in key]
    return f"weights beside those of LoRA, such as {others[0]}" if others else None


def _save(file: Path, weights: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    from safetensors.torch import save_file

    save_file({key: value.contiguous() for key, value in weights.items()}, file, {"format": "pt", **header})
