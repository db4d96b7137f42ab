"""`videoscale export`: what a checkpoint trained, for diffusers' ``from_pretrained`` or as files of adapters."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from lightning_videoscale.cli.adapter_files import write_adapters
from lightning_videoscale.compat.diffusers import CLASS_NAME
from lightning_videoscale.strategies.checkpoints.errors import CheckpointError
from lightning_videoscale.strategies.checkpoints.fingerprints import Fingerprint
from lightning_videoscale.strategies.checkpoints.folder import CheckpointFolder
from lightning_videoscale.strategies.checkpoints.frozen import LEFT_OUT, check_base
from lightning_videoscale.strategies.checkpoints.saved_tensors import SavedTensors


def export(
    checkpoint: str | Path,
    output: Path,
    module: str | None = None,
    merge: bool = False,
    base: Path | None = None,
    averaged: bool | None = None,
) -> list[str]:
    """Writes one network of a checkpoint, or its adapters, without the LightningModule it was part of.

    A network without adapters is written as its ``save_pretrained`` would. Of one with adapters of peft these are
    written, for diffusers' and peft's loaders (see `adapter_files`); or with ``merge`` the network, into whose weights
    those adapters are merged that were active.

    Weights keep the dtype they were saved in: that of the parameters, float32 under ZeRO and of averages. If a callback
    of Lightning's averaged the weights, they are the averaged ones, as in Lightning's own checkpoints.

    Args:
        checkpoint: A checkpoint of one of our strategies, by path or URL.
        output: The folder to write.
        module: Path of the network within the LightningModule. Left out, the one that has adapters, or the one model of
            diffusers.
        merge: Merge adapters into the network.
        base: A folder with the network as it was before training, as for ``from_pretrained``. Needed for a network of
            which the checkpoint holds what trained only; a folder with other weights is an error.
        averaged: The averages of the callback `EMA`, or the weights in training. Left out, the averages if there are
            any.

    Returns:
        What was written where, in words.

    Raises:
        CheckpointError: If that is no checkpoint, has no such network, or one that diffusers does not have; if it is to
            merge and has no adapters; if ``base`` is missing, not needed, or not what was trained on; or if it lacks
            the averages wanted. Also if ``output`` is a file.
        ModuleNotFoundError: If diffusers or peft is missing where it is needed.
    """
    if output.is_file():
        raise CheckpointError(f"{output} is a file, and what is written is a folder: name another.")
    network = _Network.of(CheckpointFolder(checkpoint), module, averaged)
    if scaled := network.adapters.get("scaled"):
        raise CheckpointError(
            f"The adapters {scaled} of {network.path!r} had another scale than their configuration says, as by "
            "set_adapters(names, weights), and neither files nor merging would know: train with a lora_alpha that "
            "holds the scale."
        )
    if network.adapters and not merge:
        if base is not None:
            raise CheckpointError("Files of adapters need no --base: leave it out, or add --merge.")
        return [f"{network.path}, adapter {said}" for said in write_adapters(network.adapters, network.read, output)]
    if merge and not network.adapters:
        raise CheckpointError(f"The checkpoint says of no adapters of {network.path!r}: leave out --merge.")
    if not network.adapters and any("lora_" in name or ".base_layer." in name for name in network.names()):
        raise CheckpointError(
            f"There are adapters among the weights of {network.path!r}, and the checkpoint does not hold their "
            "configuration, as the network had no peft_config: add them by add_adapter or get_peft_model. Or build the "
            "network as in training, and fill it by load_state_dict(strategies.read_weights(checkpoint, module))."
        )
    model = _build(network, base)
    if merge:
        model = _merged(model, network)
    else:
        _fill(model, network, "")
    _write(model, output)
    return [f"{network.path} -> {output}"]


def _write(model: Any, output: Path) -> None:
    from diffusers.utils import SAFE_WEIGHTS_INDEX_NAME

    # What another export left: its shards are removed by diffusers, which would then look for them.
    (output / SAFE_WEIGHTS_INDEX_NAME).unlink(missing_ok=True)
    model.save_pretrained(output)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        written = export(options.checkpoint, options.output, options.module, options.merge, options.base, options.ema)
    except (CheckpointError, OSError, ModuleNotFoundError) as error:
        Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False)
        return 1
    for line in written:
        Console(soft_wrap=True).print(line, markup=False)
    return 0


@dataclass(frozen=True)
class _Network:
    """A network in a checkpoint.

    Attributes:
        path: Where it is in the LightningModule.
        config: Its configuration, if it is a model of diffusers.
        adapters: What `describe_adapters` said; empty if it has none.
        values: All weights of the checkpoint.
        left_out: Fingerprints of the network's weights that are not in the checkpoint, by name in the network.
    """

    path: str
    config: Mapping[str, Any] | None
    adapters: Mapping[str, Any]
    values: SavedTensors
    left_out: Mapping[str, Fingerprint]

    @classmethod
    def of(cls, folder: CheckpointFolder, module: str | None, averaged: bool | None) -> _Network:
        ours = folder.rest.get("lightning_videoscale", {})
        networks, adapters = ours.get("networks", {}), ours.get("adapters", {})
        candidates = adapters or networks
        if module is None and len(candidates) == 1:
            (module,) = candidates
        if module is None or module not in networks | adapters:
            raise CheckpointError(
                f"{folder.path} holds these diffusers models: {sorted(networks)}, and these networks with adapters: "
                f"{sorted(adapters)}. "
                + ("Name one of them with --module." if networks | adapters else "Use `strategies.read_weights`.")
            )
        values = folder.tensors("state_dict")
        values.update(folder.rest["state_dict"])
        if averaged and not folder.has_averages:
            raise CheckpointError(f"{folder.path} has no averaged weights, as no callback EMA ran: leave out --ema.")
        if averaged or (averaged is None and folder.has_averages):
            values |= folder.averages()
        return cls(
            module,
            json.loads(networks[module]) if module in networks else None,
            json.loads(adapters.get(module, "{}")),
            values,
            {
                name.removeprefix(f"{module}."): Fingerprint.from_dict(saved)
                for name, saved in ours.get(LEFT_OUT, {}).items()
                if name.startswith(f"{module}.")
            },
        )

    def read(self, name: str) -> Tensor:
        """Returns a weight of the network by its name in it."""
        full = f"{self.path}.{name}"
        if full not in self.values:
            raise CheckpointError(f"The checkpoint has no weight {full!r}.")
        value: Tensor = self.values[full]
        return value

    def names(self) -> list[str]:
        """The names, in the network, of its weights that the checkpoint holds."""
        prefix = f"{self.path}."
        return [name.removeprefix(prefix) for name in self.values if name.startswith(prefix)]


def _build(network: _Network, base: Path | None) -> Any:
    """The network before training, without values where the checkpoint brings all of them."""
    if network.config is None:
        raise CheckpointError(
            f"{network.path!r} is no model of diffusers, and the checkpoint does not say how to build it: do so as in "
            "training, fill it with load_state_dict(strategies.read_weights(...)), and call merge_and_unload."
        )
    network_class = _diffusers_class(network.config[CLASS_NAME])
    if base is None:
        if network.left_out:
            raise CheckpointError(
                f"The checkpoint leaves out {len(network.left_out)} frozen weights of {network.path!r}: name the "
                "folder of the network before training, as for from_pretrained, with --base."
            )
        with torch.device("meta"):
            return network_class.from_config(network.config)
    if not network.left_out:
        raise CheckpointError(f"The checkpoint holds all weights of {network.path!r}: leave out --base.")
    if not (base / "config.json").is_file():
        raise CheckpointError(
            f"{base} is not the folder of a network, which has a config.json: name it itself, such as "
            f"{base / 'transformer'}."
        )
    dtypes = {fingerprint.dtype for fingerprint in network.left_out.values()}
    return network_class.from_pretrained(base, torch_dtype=_dtype(dtypes.pop()) if len(dtypes) == 1 else None)


def _merged(model: Any, network: _Network) -> Any:
    """Adds the adapters in the way of peft, whichever way they came, fills all, and merges those that were active."""
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('Merging needs peft: pip install "lightning-videoscale[peft]".') from error
    configs = {name: _without_values(config) for name, config in network.adapters["configs"].items()}
    first, *others = configs
    try:
        with torch.device("meta"):
            adapted: Any = peft.get_peft_model(model, configs[first], first)
            for name in others:
                adapted.add_adapter(name, configs[name])
    except NotImplementedError as error:  # what torch raises where values on the meta device are needed
        raise CheckpointError(
            f"peft cannot build adapters of type {configs[first].peft_type.value} without values: leave out --merge, "
            "load the files by PeftModel.from_pretrained, and call merge_and_unload."
        ) from error
    _fill(adapted, network, "" if network.adapters["wrapped"] else "base_model.model.")
    return adapted.merge_and_unload(adapter_names=network.adapters["active"])


def _without_values(config: Mapping[str, Any]) -> Any:
    """The configuration of an adapter that computes no initial values, as from the base's singular vectors."""
    import peft

    config_class: Any = peft.PeftConfig
    built = config_class.from_peft_type(**config)
    if hasattr(built, "init_lora_weights"):
        built.init_lora_weights = False
    return built


def _fill(model: nn.Module, network: _Network, prefix: str) -> None:
    """Gives a model the network's weights; what the checkpoint leaves out it must hold, as it was."""
    held, saved = model.state_dict(), {f"{prefix}{name}": name for name in network.names()}
    then = {f"{prefix}{name}": fingerprint for name, fingerprint in network.left_out.items()}
    base = {name: held[name].to(_dtype(then[name].dtype)) for name in then if name in held}
    check_base(then, {name: Fingerprint.of(value, torch.device("cpu")) for name, value in base.items()})
    weights = base | {name: network.read(own) for name, own in saved.items()}
    lacking, unexpected = [x for x in held if x not in weights], [x for x in weights if x not in held]
    other = [x for x in held if x in weights and held[x].shape != weights[x].shape]
    if lacking or unexpected or other:
        raise CheckpointError(
            f"The weights do not fit a {type(model).__name__}: {_some(lacking)} missing, {_some(unexpected)} "
            f"unexpected, {_some(other)} of other shape. Build the network as in training, and fill it by "
            "network.load_state_dict(strategies.read_weights(checkpoint, module))."
        )
    model.load_state_dict(weights, assign=True)


def _some(names: Iterable[str]) -> str:
    first = list(names)
    return f"{len(first)}" + (f" (such as {first[0]})" if first else "")


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


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
