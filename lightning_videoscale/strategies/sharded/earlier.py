"""What another Trainer's strategy, or code of the user's, has left on a LightningModule, refused with the way out."""

from __future__ import annotations

from torch import nn

from lightning_videoscale.compat.deepspeed import hooked_by_deepspeed, is_partitioned
from lightning_videoscale.strategies.lightning_messages import first_names
from lightning_videoscale.strategies.units import sharded_modules

_WAY_OUT = (
    "Use a LightningModule with the Trainer that sharded it. A new LightningModule goes on from that one's checkpoint: "
    "trainer.save_checkpoint(path), then fit(new, ckpt_path=path)."
)


def refuse_sharded(module: nn.Module, strategy: str) -> None:
    """Raises a ``ValueError`` if ``fully_shard`` was applied to a module before the strategy had it."""
    if sharded := sharded_modules(module):
        raise ValueError(
            f"fully_shard was applied to {sharded} before {strategy} had the model, which takes it whole: leave it out "
            f"of configure_model. {_WAY_OUT}"
        )


def refuse_zero(module: nn.Module, strategy: str, *, hooks: bool) -> None:
    """Refuses what is still ZeRO's.

    Args:
        module: What is about to be set up.
        strategy: The class that sets it up.
        hooks: Whether stages 1 and 2 are refused too, whose hooks would go on to take gradients.

    Raises:
        ValueError: If a DeepSpeed strategy holds its parameters.
    """
    held = [name for name, p in module.named_parameters() if is_partitioned(p) or (hooks and hooked_by_deepspeed(p))]
    if held:
        raise ValueError(
            f"{first_names(held)} are held by the DeepSpeed strategy of another Trainer, and {strategy} takes the "
            f"model as it was before. {_WAY_OUT}"
        )
