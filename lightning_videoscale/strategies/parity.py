"""Does the split change what is learnt? One batch, computed split and whole, side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_videoscale.compat.lightning.unlogged import nothing_logged


@dataclass(frozen=True)
class ParityReport:
    """What a batch gives when its sequence is split (sp = n) and when it is not (sp = 1).

    Attributes:
        loss: Loss on this rank's batch, split and whole.
        gradient_norm: Norm of the gradient of all parameters, averaged over all ranks, split and whole.
        gradient_errors: Per parameter ‖split - whole‖ / max(‖whole‖, 1e-3 · ‖whole gradient of all parameters‖).
    """

    loss: tuple[float, float]
    gradient_norm: tuple[float, float]
    gradient_errors: dict[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter with the largest error, and that error."""
        return max(self.gradient_errors.items(), key=lambda item: item[1])

    def __str__(self) -> str:
        name, error = self.worst
        return (
            f"loss {self.loss[0]:.6g} split, {self.loss[1]:.6g} whole; "
            f"gradient norm {self.gradient_norm[0]:.6g} split, {self.gradient_norm[1]:.6g} whole; "
            f"largest gradient error {error:.2e} ({name})"
        )


def loss_and_gradients(module: pl.LightningModule, step: Callable[[], Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Runs a step and its backward, and takes the gradients, averaged and whole, away to the CPU; collective.

    Args:
        module: The LightningModule; its parameters must have no gradients yet and have none afterwards.
        step: Returns the loss.
    """
    with nothing_logged(module):
        loss = step()
    loss.backward()
    gradients = {name: _averaged(p.grad) for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return float(loss.detach()), gradients


def compare(split: tuple[float, dict[str, Tensor]], whole: tuple[float, dict[str, Tensor]]) -> ParityReport:
    """Compares two results of `loss_and_gradients`."""
    norms = [torch.stack([g.norm() for g in gradients.values()]).norm() for _, gradients in (split, whole)]
    floor = 1e-3 * norms[1]
    nothing = torch.zeros(())
    errors = {
        name: float((split[1].get(name, nothing) - g).norm() / torch.maximum(g.norm(), floor).clamp_min(1e-300))
        for name, g in whole[1].items()
    }
    return ParityReport((split[0], whole[0]), (float(norms[0]), float(norms[1])), errors)


def _averaged(gradient: Tensor) -> Tensor:
    if isinstance(gradient, DTensor):  # a shard of what FSDP2 has averaged
        return gradient.full_tensor().double().cpu()
    average = gradient.clone()
    dist.all_reduce(average)
    return average.double().cpu() / dist.get_world_size()
