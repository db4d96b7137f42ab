"""What `Trainer(strategy=...)` receives.

`SequenceParallelDDPStrategy`        registered as "ulysses_ddp" and "usp_ddp"
`SequenceParallelDeepSpeedStrategy`  registered as "ulysses_deepspeed_stage_1", "..._2" and "..._3"
`SequenceParallelFSDP2Strategy`      registered as "ulysses_fsdp2" and "usp_fsdp2"
`read_weights`                       the weights of a checkpoint, without a Trainer
`register_strategies`                makes the names known to Lightning; importing `lightning_videoscale` does it
"""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_videoscale.strategies.checkpoints.folder import read_weights
from lightning_videoscale.strategies.ddp import SequenceParallelDDPStrategy
from lightning_videoscale.strategies.deepspeed import SequenceParallelDeepSpeedStrategy
from lightning_videoscale.strategies.fsdp2 import SequenceParallelFSDP2Strategy

__all__ = [
    "SequenceParallelDDPStrategy",
    "SequenceParallelDeepSpeedStrategy",
    "SequenceParallelFSDP2Strategy",
    "read_weights",
    "register_strategies",
]


def register_strategies() -> None:
    """Registers the names by which a Trainer selects our strategies."""
    StrategyRegistry.register(
        "ulysses_ddp",
        SequenceParallelDDPStrategy,
        description="DDP with Ulysses sequence parallelism over the devices of each node",
    )
    StrategyRegistry.register(
        "usp_ddp",
        SequenceParallelDDPStrategy,
        description="DDP with Ulysses in rings of two over the devices of each node",
        ring_size=2,
    )
    StrategyRegistry.register(
        "ulysses_fsdp2",
        SequenceParallelFSDP2Strategy,
        description="FSDP2 with Ulysses sequence parallelism over the devices of each node",
    )
    StrategyRegistry.register(
        "usp_fsdp2",
        SequenceParallelFSDP2Strategy,
        description="FSDP2 with Ulysses in rings of two over the devices of each node",
        ring_size=2,
    )
    for stage in (1, 2, 3):
        StrategyRegistry.register(
            f"ulysses_deepspeed_stage_{stage}",
            SequenceParallelDeepSpeedStrategy,
            description=f"DeepSpeed ZeRO-{stage} with Ulysses sequence parallelism over the devices of each node",
            stage=stage,
        )
