"""`inject_fused_kernels`: one call that makes a model's blocks use fused kernels."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from lightning_videoscale.compat.diffusers import block_classes
from lightning_videoscale.compat.torch.modules import is_compiled
from lightning_videoscale.families import class_path, known
from lightning_videoscale.injection.branch_bias import last_linear
from lightning_videoscale.injection.fused_block import FusedBlock, fused_block_of, fused_class
from lightning_videoscale.injection.report import InjectionReport, Skipped
from lightning_videoscale.injection.traffic import fused_share
from lightning_videoscale.kernels.backend import BackendName, settle

_ALREADY = "uses fused kernels already"
_UNKNOWN = "no fused forward is known of it"


def inject_fused_kernels(
    model: nn.Module,
    backend: BackendName = "auto",
    extra_blocks: Sequence[FusedBlock] = (),
    *,
    recompute_norms: bool = False,
    device: torch.device | None = None,
) -> InjectionReport:
    """Replaces, in place, the forward of every block of a known class by one that uses fused kernels.

    Parameters, submodules, ``state_dict``, hooks and class names stay as they are. Inject after the model is built (and
    after LoRA layers were added), before it is split, checkpointed, compiled, wrapped or sharded.

    What runs the kernels is decided here for the whole run (`lightning_videoscale.kernels.backend`). Under a process
    group all ranks agree on it, so all of them must call this.

    Args:
        model: The model, or any module that contains it.
        backend: What runs the kernels: "auto", or "cuda", "triton" or "reference", which then runs or raises.
        extra_blocks: Blocks of your own; one with the class path of a known block takes its place.
        recompute_norms: Compute the outputs of the norms, of queries and keys too, again in backward instead of keeping
            them for it: about a quarter of what a Wan block keeps. Gradients are the same to the bit.
        device: Where the model will run. By default the GPU that it is on, or under a process group this rank's; what
            runs the kernels of a model elsewhere is decided at its first call on a device.

    Returns:
        What was replaced and what was skipped and why, with an ``undo()``. A warning names skipped blocks too. Blocks
        of diffusers' transformers of which nothing is known count as skipped.

    Raises:
        ValueError: If there is no such backend.
        RuntimeError: If a known block was compiled already: the compiled code would go on running the old forward.
        TypeError: If the model is no module, or the fused forward's parameters have other names than the original's.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{type(model).__name__} is no nn.Module: give the network, of a pipeline pipeline.transformer."
        )
    setting, meaning = settle(backend, device or _device(model))
    own = {block.class_path: block for block in extra_blocks}
    _refuse_compiled(model, own)
    report = InjectionReport(type(model).__name__, meaning)
    found = [(path, module, _known(module, own)) for path, module in model.named_modules()]
    meant = [(path, module, block) for path, module, block in found if block is not None and block.is_meant(module)]
    meant.sort(key=lambda entry: entry[2].only_with is not None)
    # What is inside comes first, since it decides what is fused around it.
    for path, module, block in sorted(meant, key=lambda entry: (entry[2].only_with is not None, -_depth(entry[0]))):
        reason = _refusal(module, block) or _missing_others(block, model)
        if reason is None:
            fused = fused_class(type(module), block)  # type: ignore[arg-type]  # as in fused_block
            report.replace(path, module, fused, _what(module, block), setting, recompute_norms)
        else:
            report.skipped.append(Skipped(path, type(module).__name__, reason))
    unknown = {path: (module, _UNKNOWN) for path, module in _unknown_blocks(model, own).items()}
    for path, module, _ in meant:
        unknown |= _unknown_attentions(path, module, own)
    report.skipped += [Skipped(path, type(module).__name__, reason) for path, (module, reason) in unknown.items()]
    report.sort([*unknown, *(path for path, _, _ in meant)])
    report.fused_share = fused_share(model)
    if any(skipped.reason != _ALREADY for skipped in report.skipped):
        warnings.warn(str(report), stacklevel=2)
    return report


def _depth(path: str) -> int:
    """How many modules are around the one at a path; the model's own is empty."""
    return path.count(".") + 1 if path else 0


def _device(model: nn.Module) -> torch.device | None:
    """Returns the GPU that a model is on, or, where ranks must agree, the one it will be on."""
    on_gpus = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    if on_gpus or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return min(on_gpus, key=str, default=None)
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def _known(module: nn.Module, own: Mapping[str, FusedBlock]) -> FusedBlock | None:
    """Returns what is known of a module: by its class, or by that of its processor, where one class has several."""
    block: FusedBlock | None = known("FUSED_BLOCKS", type(module), own)
    if block is None and (processor := getattr(module, "processor", None)) is not None:
        block = known("FUSED_ATTENTIONS", type(processor))
    return block


def _unknown_blocks(model: nn.Module, own: Mapping[str, FusedBlock]) -> dict[str, nn.Module]:
    """Returns the transformer blocks that networks of diffusers declare, and of which no family knows anything."""
    found = {}
    for path, network in model.named_modules():
        if type(network).__module__.startswith("diffusers.models.transformers."):
            names = {name for name in block_classes(network) if name.endswith("Block")}
            for inside, module in network.named_modules(prefix=path):
                if type(module).__name__ in names and known("FUSED_BLOCKS", type(module), own) is None:
                    found[inside] = module
    return found


def _unknown_attentions(path: str, block: nn.Module, own: Mapping[str, FusedBlock]) -> dict[str, tuple[nn.Module, str]]:
    """Returns the attentions of a known block whose processors nobody knows, with the reason."""
    found = {}
    for name, child in block.named_children():
        processor = getattr(child, "processor", None)
        if processor is not None and _known(child, own) is None:
            reason = f"its processor is a {class_path(type(processor))}, of which no fused attention is known"
            found[f"{path}.{name}".lstrip(".")] = child, reason
    return found


def _refusal(module: nn.Module, block: FusedBlock) -> str | None:
    if fused_block_of(module) is not None:
        return _ALREADY
    if class_path(type(module)) != block.class_path:
        return (
            f"is a subclass of {block.class_path}, whose forward may differ; register it under its own name, or, if "
            "fully_shard made it, inject before sharding"
        )
    return block.refusal(module)


def _what(module: nn.Module, block: FusedBlock) -> str:
    """Returns what is fused in a block, and which bias gradients its kernels do not sum and why."""
    there = [name for name in block.branches if getattr(module, name) is not None]
    ends = {name: last_linear(module.get_submodule(name)) for name in there}
    as_before = [f"{name} ({end})" for name, end in ends.items() if isinstance(end, str)]
    return block.what + (f"; bias gradients as before: {', '.join(as_before)}" if as_before else "")


def _missing_others(block: FusedBlock, model: nn.Module) -> str | None:
    """The others were replaced before, where that was possible."""
    if block.only_with is None:
        return None
    for path, module in model.named_modules():
        if block.only_with in map(class_path, type(module).__mro__) and fused_block_of(module) is None:
            return f"is replaced together with every {type(module).__name__} only, and {path} was not"
    return None


def _refuse_compiled(model: nn.Module, own: Mapping[str, FusedBlock]) -> None:
    for path, module in model.named_modules():
        if is_compiled(module) and any(_known(inner, own) for inner in module.modules()):
            raise RuntimeError(
                f"{path or type(model).__name__} is compiled already and contains blocks to replace: inject the fused "
                "kernels first and compile afterwards."
            )
