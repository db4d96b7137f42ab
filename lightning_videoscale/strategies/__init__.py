"""What `Trainer(strategy=...)` receives.

`SequenceParallelDDPStrategy`        registered as "ulysses_ddp" and "usp_ddp", and with the suffixes
                                     "_find_unused_parameters_true" and "_notebook"
`SequenceParallelDeepSpeedStrategy`  registered as "ulysses_deepspeed_stage_1", "..._2" and "..._3"
`SequenceParallelFSDP2Strategy`      registered as "ulysses_fsdp2" and "usp_fsdp2"
`read_weights`                       the weights of a checkpoint, without a Trainer
`register_strategies`                makes the names known to Lightning; importing this does it, once
"""

from __future__ import annotations

from lightning_videoscale.strategies.checkpoints.folder import read_weights
from lightning_videoscale.strategies.ddp import SequenceParallelDDPStrategy
from lightning_videoscale.strategies.deepspeed import SequenceParallelDeepSpeedStrategy
from lightning_videoscale.strategies.fsdp2 import SequenceParallelFSDP2Strategy
from lightning_videoscale.strategies.registration import register_strategies

__all__ = [
    "SequenceParallelDDPStrategy",
    "SequenceParallelDeepSpeedStrategy",
    "SequenceParallelFSDP2Strategy",
    "read_weights",
    "register_strategies",
]

register_strategies()
