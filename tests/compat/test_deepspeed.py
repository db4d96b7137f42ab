"""What we read of ZeRO's bookkeeping is so in a real engine of the installed DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.compat import deepspeed as private
from lightning_videoscale.compat.lightning import SettledDeepSpeedStrategy, set_up_deepspeed_processes
from lightning_videoscale.compat.patching import patch
from lightning_videoscale.strategies import SequenceParallelDeepSpeedStrategy
from tests.distributed.pool import ProcessPool
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed
from tests.timing.slow_training import NOTHING_TO_SPLIT

Ranks = Callable[[int], ProcessPool]
QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
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
        from deepspeed.utils import safe_get_full_optimizer_state, safe_get_local_fp32_param

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
        assert private.stepping_optimizers(optimizer) == [base]
        for piece in pieces:
            assert piece.group == 0
            where = private.ranges(piece)
            assert [index for part in where.values() for index in part] == list(range(12))
            for parameter, part in where.items():
                fragment = (
                    safe_get_local_fp32_param(parameter)
                    if self.partitioned == {True}
                    else parameter._hp_mapping.hp_fragment
                )  # type: ignore[attr-defined]
                assert fragment.numel() == len(part)
                assert fragment.data_ptr() == piece.flat[part.start :].data_ptr()
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
        runner = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, callbacks=[looking], **QUIET)
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
    assert private.own_values(weight).data_ptr() == weight.data_ptr()
    assert not private.is_gathered(weight)
    assert not private.swaps_to_disk(optimizer)
    assert private.loss_scale(optimizer) == {}
    private.set_loss_scale(optimizer, {})
    private.forget_gradients(optimizer)


class Writing(pl.Callback):
    """Writes this rank's number, from 1 on, into all that it holds of the parameters, and then what was there."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        from deepspeed.runtime.zero import GatheredParameters

        parameters = list(pl_module.parameters())
        with GatheredParameters(parameters):
            self.gathered = [private.is_gathered(parameter) for parameter in parameters]
        self.apart = [private.is_gathered(parameter) for parameter in parameters]
        held = [private.own_values(parameter).clone() for parameter in parameters]
        for parameter in parameters:
            private.own_values(parameter).fill_(dist.get_rank() + 1)
        with GatheredParameters(parameters):
            self.values = [parameter.flatten().tolist() for parameter in parameters]
        for parameter, values in zip(parameters, held, strict=True):
            private.own_values(parameter).copy_(values)
        self.has_setting = hasattr(trainer.strategy.deepspeed_engine.optimizer, "swap_optimizer")  # type: ignore[attr-defined]


class Forgetting(pl.Callback):
    """Forgets gradients between two micro-batches of a step, and after a step; notes whether there are any left."""

    def __init__(self) -> None:
        self.left: list[tuple[bool, bool]] = []

    def note(self, trainer: pl.Trainer) -> None:
        optimizer = trainer.strategy.deepspeed_engine.optimizer  # type: ignore[attr-defined]
        held = [optimizer.grad_partitions_flat_buffer]
        held += [flat.grad for flat in optimizer.fp32_partitioned_groups_flat if flat.grad is not None]
        before = all(bool(x.any()) for x in held)
        private.forget_gradients(optimizer)
        self.left.append((before, any(bool(x.any()) for x in held)))

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self.left or trainer.fit_loop.batch_idx == 1:
            self.note(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.note(trainer)


def train(stage: int, callback: pl.Callback, **settings: Any) -> pl.Callback:
    with deepspeed_on_cpu():
        strategy = SequenceParallelDeepSpeedStrategy(stage, 1, modules=["net"], plan=NOTHING_TO_SPLIT)
        settings = {"max_steps": 1, "callbacks": [callback]} | QUIET | settings
        runner = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, **settings)
        runner.fit(Two(), DataLoader(torch.ones(8, 3)))
    return callback


def written(stage: int) -> tuple[Any, ...]:
    writing: Any = train(stage, Writing())
    return writing.gathered, writing.apart, writing.values, writing.has_setting


@needs_deepspeed
def test_a_rank_holds_a_piece_under_stage_3(ranks: Ranks) -> None:
    for gathered, apart, values, has_setting in ranks(2).run(written, 3):
        assert gathered == [True] * 3 and apart == [False] * 3
        assert values == [[1.0] * (n // 2) + [2.0] * (n // 2) for n in (12, 4, 8)]
        assert has_setting  # which `swaps_to_disk` takes for off where it is gone


@needs_deepspeed
def test_a_rank_holds_whole_parameters_under_stage_2(ranks: Ranks) -> None:
    for rank, (gathered, apart, values, _) in enumerate(ranks(2).run(written, 2), 1):
        assert gathered == apart == [False] * 3
        assert values == [[float(rank)] * n for n in (12, 4, 8)]


def forgotten() -> list[tuple[bool, bool]]:
    forgetting: Any = train(3, Forgetting(), accumulate_grad_batches=2)
    left: list[tuple[bool, bool]] = forgetting.left
    return left


@needs_deepspeed
def test_gradients_are_forgotten_between_steps_alone(ranks: Ranks) -> None:
    assert ranks(2).run(forgotten) == [[(True, True), (True, False)]] * 2


class Settled(SettledDeepSpeedStrategy):
    """Lightning's on a CPU, as it is but for what it checks of devices."""

    def setup_environment(self) -> None:
        self.engines: list[str] = []
        self.parallel_devices = [torch.device("cpu", 0)]
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        from deepspeed.comm import comm

        super(DeepSpeedStrategy, self).setup_distributed()
        comm.cdb = None  # as in a process that has not used DeepSpeed
        self.were_joined = comm.is_initialized()
        set_up_deepspeed_processes(self)
        self.are_joined = comm.is_initialized()

    def initialize_inference(self, model: nn.Module) -> None:
        super().initialize_inference(model)
        self.engines.append(type(self.model).__name__)


def settled() -> tuple[Any, ...]:
    with deepspeed_on_cpu():
        strategy = Settled(stage=1)
        runner = pl.Trainer(
            strategy=strategy, accelerator="cpu", devices=1, max_steps=1, use_distributed_sampler=False, **QUIET
        )
        module, loader = Two(), DataLoader(torch.ones(3, 3), batch_sampler=[[0, 1], [2]])  # of no one size
        runner.fit(module, loader)
        engines_of_fit = list(strategy.engines)
        runner.validate(module, loader, verbose=False)
    assert isinstance(strategy.config, dict)
    size = strategy.config["train_micro_batch_size_per_gpu"]
    return strategy.were_joined, strategy.are_joined, size, engines_of_fit, strategy.engines


@needs_deepspeed
def test_lightnings_strategy_joins_processes_and_makes_engines_by_public_methods(ranks: Ranks) -> None:
    assert ranks(1).run(settled) == [(False, True, 1, [], ["DeepSpeedEngine"])]


class Pieces(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizer = trainer.strategy.deepspeed_engine.optimizer  # type: ignore[attr-defined]
        pieces = private.flat_pieces(optimizer)
        assert pieces is not None
        base = private.base_optimizer(optimizer)
        self.found = [
            type(optimizer).__name__,
            {parameter for piece in pieces for parameter in piece.parameters} == set(pl_module.parameters()),
            [(piece.flat.numel() >= 12, piece.flat.dtype, piece.group, piece.flat in base.state) for piece in pieces],
        ]


def in_bfloat16() -> list[Any]:
    callback = Pieces()
    with deepspeed_on_cpu():
        config = {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}
        config |= {"bf16": {"enabled": True}}
        strategy = SequenceParallelDeepSpeedStrategy(1, 1, modules=["net"], plan=NOTHING_TO_SPLIT, config=config)
        settings: dict[str, Any] = {"max_steps": 1, "callbacks": [callback], "precision": "bf16-mixed"}
        runner = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, **settings, **QUIET)
        runner.fit(Two(), DataLoader(torch.ones(8, 3)))
    return callback.found


@needs_deepspeed
def test_pieces_of_bfloat16_with_gradients_in_float32(ranks: Ranks) -> None:
    for found in ranks(2).run(in_bfloat16):
        assert found == ["BF16_Optimizer", True, [(True, torch.float32, 0, True)]]
