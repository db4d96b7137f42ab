"""What we read of ZeRO's bookkeeping is so in a real engine of the installed DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.compat import deepspeed as private
from lightning_videoscale.compat.patching import patch
from lightning_videoscale.strategies import SequenceParallelDeepSpeedStrategy
from tests.distributed.pool import ProcessPool
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed
from tests.timing.slow_training import NOTHING_TO_SPLIT

Ranks = Callable[[int], ProcessPool]
WAITS = {
    1: {"reduce_ipg_grads"},
    2: {"reduce_ipg_grads"},
    3: {"fetch_sub_module", "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"},
}


class Two(pl.LightningModule):
    """Two layers of 12 trained elements and a bias of 4, in one group of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.5)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.0)


class Looking(pl.Callback):
    """Looks at the engine when it has trained."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.called: set[str] = set()
        for owner, name in private.zero_waits(trainer.strategy.deepspeed_engine.optimizer):  # type: ignore[attr-defined]
            patch(owner, name, self._noted(name, getattr(owner, name)))

    def _noted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.called.add(name)
            return method(*args, **kwargs)

        return noted

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        from deepspeed.utils import safe_get_full_optimizer_state

        optimizer = trainer.strategy.deepspeed_engine.optimizer  # type: ignore[attr-defined]
        base = private.base_optimizer(optimizer)
        pieces = private.flat_pieces(optimizer)
        assert pieces is not None
        parameters = [parameter for piece in pieces for parameter in piece.parameters]
        assert set(parameters) == set(pl_module.parameters())
        assert isinstance(base, torch.optim.Adam)
        assert not private.swaps_to_disk(optimizer)
        assert dist.get_world_size(private.data_parallel_group()) == 2
        self.partitioned = {private.is_partitioned(parameter) for parameter in parameters}
        self.shapes = sorted(tuple(private.full_shape(parameter)) for parameter in parameters)
        self.elements = sorted(map(private.full_numel, parameters))
        self.flat = sum(piece.flat.numel() for piece in pieces)
        for piece in pieces:
            assert piece.group == 0
            assert set(piece.flat.tolist()) <= {0.5, 0.0}  # the last rank's is padded
            assert piece.flat in base.state
            if not private.is_partitioned(piece.parameters[0]):
                for parameter in piece.parameters:
                    if parameter._hp_mapping is not None:  # type: ignore[attr-defined]  # this rank has a part of it
                        parameter._hp_mapping.optim_fragment = None  # type: ignore[attr-defined]
                private.link_states(piece.parameters, piece.flat, base.state)
            for parameter in piece.parameters:
                state = safe_get_full_optimizer_state(parameter, "exp_avg")
                assert state.shape == private.full_shape(parameter)
                if private.is_partitioned(parameter):
                    whole = torch.full(private.full_shape(parameter), 0.5)
                    assert private.own_piece(parameter, whole)[0] == parameter.ds_tensor.flatten()[0] == 0.5
                    assert private.own_piece(parameter, whole).shape == parameter.ds_tensor.flatten().shape


def look(stage: int) -> tuple[Any, ...]:
    looking, module = Looking(), Two()
    with deepspeed_on_cpu():
        strategy = SequenceParallelDeepSpeedStrategy(stage, 1, modules=["net"], plan=NOTHING_TO_SPLIT)
        quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        runner = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, callbacks=[looking], **quiet)
        runner.fit(module, DataLoader(torch.ones(4, 3)))
        runner.validate(module, DataLoader(torch.ones(4, 3)), verbose=False)  # by an engine of its own
    return looking.called, looking.partitioned, looking.shapes, looking.elements, looking.flat


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_pieces_states_and_waits(ranks: Ranks, stage: int) -> None:
    for called, partitioned, shapes, elements, flat in ranks(2).run(look, stage):
        assert called == WAITS[stage]
        assert partitioned == {stage == 3}
        assert shapes == [(2, 4), (4,), (4, 3)]
        assert elements == [4, 8, 12]
        assert flat == 12  # of 24 over two ranks


def test_an_optimizer_of_torch_has_no_pieces_and_waits_for_nobody() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    assert private.flat_pieces(optimizer) is None
    assert private.zero_waits(optimizer) == []
    assert not private.is_partitioned(weight)
    assert private.full_shape(weight) == (2,)
    assert private.full_numel(weight) == 2
