"""`ulysses_deepspeed_stage_*` as a Trainer uses them: names, batches, weights, evaluation, timeouts, messages."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateFinder
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.parallel import SplitPlan
from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelDeepSpeedStrategy
from tests.distributed.pool import ProcessPool
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed
from tests.models import tiny_wan

Ranks = Callable[[int], ProcessPool]
NOTHING_TO_SPLIT = SplitPlan({}, {}, {}, lambda model, context: lambda: None)


def trainer(strategy: Any, **kwargs: Any) -> pl.Trainer:
    defaults = {"max_steps": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    devices = dist.get_world_size() if dist.is_initialized() else 1
    return pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, enable_model_summary=False, **(defaults | kwargs)
    )


# -- selecting -----------------------------------------------------------------------------------------------------


def test_the_names_are_registered() -> None:
    names = {f"ulysses_deepspeed_stage_{stage}" for stage in (1, 2, 3)}
    assert names <= set(StrategyRegistry.available_strategies())


def test_without_deepspeed_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "lightning-videoscale\[zero\]"'):
        pl.Trainer(strategy="ulysses_deepspeed_stage_2", accelerator="cpu")


def build_by_name(stage: int) -> tuple[str, int, str]:
    with deepspeed_on_cpu():
        built = trainer(f"ulysses_deepspeed_stage_{stage}").strategy
        return type(built).__name__, built.config["zero_optimization"]["stage"], type(built.precision_plugin).__name__


def messages() -> list[str]:
    found = []

    def note(function: Callable[[], Any]) -> None:
        try:
            function()
        except ValueError as error:
            found.append(str(error))

    with deepspeed_on_cpu():
        note(lambda: SequenceParallelDeepSpeedStrategy(config={"sequence_parallel_size": 2}))
        note(lambda: trainer("ulysses_deepspeed_stage_2", precision="64-true"))
        import deepspeed.accelerator as accelerator

        original = accelerator.get_accelerator
        accelerator.get_accelerator = lambda: type("Gpu", (), {"device_name": lambda self: "cuda"})()
        try:
            note(lambda: trainer(scaling(2, 2)).fit(Scale(), DataLoader(torch.ones(8), batch_size=2)))
        finally:
            accelerator.get_accelerator = original
    return found


@needs_deepspeed
def test_what_is_refused_and_why(ranks: Ranks) -> None:
    own, precision, device = ranks(4).run(messages)[0]
    assert "sequence_parallel_size" in own
    assert "precision='64-true'" in precision
    assert (
        "The Trainer runs on 'cpu' and DeepSpeed on 'cuda': set the environment variable DS_ACCELERATOR=cpu" in device
    )


@needs_deepspeed
def test_a_name_stands_for_its_stage(ranks: Ranks) -> None:
    for stage in (1, 3):
        expected = ("SequenceParallelDeepSpeedStrategy", stage, "DeepSpeedPrecision")
        assert ranks(4).run(build_by_name, stage)[0] == expected


def offloading() -> tuple[str, str]:
    with deepspeed_on_cpu():
        built = SequenceParallelDeepSpeedStrategy(3, offload_optimizer=True, offload_parameters=True)
    zero = built.config["zero_optimization"]
    return zero["offload_optimizer"]["device"], zero["offload_param"]["device"]


@needs_deepspeed
def test_offloading_is_passed_on(ranks: Ranks) -> None:
    assert ranks(4).run(offloading)[0] == ("cpu", "cpu")


# -- batches, weights, sizes, timeouts -----------------------------------------------------------------------------


class Scale(pl.LightningModule):
    """One weight, from which a step takes away the mean of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.net.weight)
        self.seen: list[tuple[list[float], float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"] if isinstance(batch, dict) else batch
        self.seen.append((x.flatten().tolist(), torch.rand(()).item()))
        return self.net(x.view(-1, 1)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def scaling(stage: int, ulysses_size: int, **kwargs: Any) -> SequenceParallelDeepSpeedStrategy:
    return SequenceParallelDeepSpeedStrategy(stage, ulysses_size, modules=["net"], plan=NOTHING_TO_SPLIT, **kwargs)


def fit_scale() -> tuple[list[Any], dict[str, Any], float]:
    torch.manual_seed(100 + dist.get_rank())  # unseeded ranks start anywhere
    with deepspeed_on_cpu():
        selected, module = scaling(2, 2, timeout=timedelta(seconds=77)), Scale()
        runner = trainer(selected, accumulate_grad_batches=2)
        runner.fit(module, DataLoader(torch.arange(16.0), batch_size=2))
        engine = selected.deepspeed_engine
        sizes = {"micro": engine.train_micro_batch_size_per_gpu(), "all": engine.train_batch_size()}
        timeout = engine.seq_data_parallel_group._get_backend(torch.device("cpu")).options._timeout
    return module.seen, sizes, timeout.total_seconds()


@needs_deepspeed
def test_groups_share_batches_and_random_numbers(ranks: Ranks) -> None:
    first, peer, other, others_peer = ranks(4).run(fit_scale)
    assert first[0] == peer[0] != other[0] == others_peer[0]
    assert len({value for values, _ in first[0] + other[0] for value in values}) == 8
    assert {random for _, random in first[0]}.isdisjoint(random for _, random in other[0])


@needs_deepspeed
def test_deepspeeds_world_is_all_ranks_and_its_groups_keep_the_timeout(ranks: Ranks) -> None:
    for _, sizes, timeout in ranks(4).run(fit_scale):
        assert sizes == {"micro": 1, "all": 1 * 2 * 4}
        assert timeout == 77


class Weight:
    def __init__(self, loss_weight: float) -> None:
        self.loss_weight = loss_weight


def fit_weighted(stage: int) -> float:
    from deepspeed.utils import safe_get_full_fp32_param

    batch = {"x": torch.ones(2), "meta": Weight([0.5, 1.5][dist.get_rank() // 2])}
    module = Scale()
    with deepspeed_on_cpu():
        trainer(scaling(stage, 2), accumulate_grad_batches=2).fit(module, DataLoader([batch] * 4, batch_size=None))
    return float(safe_get_full_fp32_param(module.net.weight))


@needs_deepspeed
def test_the_loss_weight_of_the_plan_is_applied_once(ranks: Ranks) -> None:
    # d loss / d weight = 1 on every rank, so the step is the mean of the weights, 0.5 and 1.5.
    for stage in (1, 3):
        assert ranks(4).run(fit_weighted, stage) == [0.0] * 4


# -- manual optimization, averages ---------------------------------------------------------------------------------


class ByHand(Scale):
    """Accumulates by itself: one step for two backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx) / 2)
        if batch_idx % 2:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def train_by_hand(stage: int) -> float | str:
    from deepspeed.utils import safe_get_full_fp32_param

    module = ByHand()
    with deepspeed_on_cpu():
        try:
            trainer(scaling(stage, 2)).fit(module, DataLoader([torch.ones(2), torch.zeros(2)] * 2, batch_size=None))
        except ValueError as error:
            return str(error)
        return float(safe_get_full_fp32_param(module.net.weight))


@needs_deepspeed
def test_gradients_accumulated_by_hand_are_kept_or_refused(ranks: Ranks) -> None:
    assert ranks(2).run(train_by_hand, 3) == [0.5] * 2  # 1 - (1 + 0) / 2
    for stage in (1, 2):
        assert (
            f"ran backward twice before an optimizer step, and ZeRO stage {stage} would drop"
            in ranks(2).run(train_by_hand, stage)[0]
        )


class Clipping(Scale):
    """Clips by itself in one of the ways that Lightning documents. The gradient is 1."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.automatic_optimization = way, way != "by hand"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.25, "norm")
        optimizer.step()
        return None

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.way == "other":
            self.clip_gradients(optimizer, 0.5, "norm")
        else:
            super().configure_gradient_clipping(optimizer, *args, **kwargs)


def clip(way: str, in_config: float | None = None, **kwargs: Any) -> float | str:
    from deepspeed.utils import safe_get_full_fp32_param

    with deepspeed_on_cpu():
        selected, module = scaling(1, 2), Clipping(way)
        if in_config is not None:
            selected.config["gradient_clipping"] = in_config
        try:
            trainer(selected, **kwargs).fit(module, DataLoader(torch.ones(4), batch_size=2))
        except ValueError as error:
            return str(error)
        return float(safe_get_full_fp32_param(module.net.weight))


@needs_deepspeed
def test_gradients_are_clipped_by_deepspeed_or_an_error_says_that_they_are_not(ranks: Ranks) -> None:
    pool = ranks(2)
    for run in ({"way": "default", "gradient_clip_val": 0.25}, {"way": "by hand", "in_config": 0.25}):
        assert pool.run(functools.partial(clip, **run)) == pytest.approx([0.75] * 2, rel=1e-4)
    assert "clip_gradients was called with 0.5" in pool.run(clip, "other")[0]
    message = pool.run(clip, "by hand")[0]
    assert "0.25" in message and "DeepSpeed" in message


def message_about(callback: type[pl.Callback]) -> str:
    with deepspeed_on_cpu():
        try:
            trainer(scaling(2, 2), callbacks=[callback()]).fit(Scale(), DataLoader(torch.ones(4)))
        except ValueError as error:
            return str(error)
    return "no error"


@needs_deepspeed
def test_averages_of_partitioned_weights_are_refused(ranks: Ranks) -> None:
    assert "['EMAWeightAveraging']" in ranks(2).run(message_about, EMAWeightAveraging)[0]


@needs_deepspeed
def test_a_search_for_a_learning_rate_is_refused(ranks: Ranks) -> None:
    assert "Search under ulysses_fsdp2 or ulysses_ddp" in ranks(2).run(message_about, LearningRateFinder)[0]


# -- evaluation ----------------------------------------------------------------------------------------------------


class Denoiser(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = tiny_wan()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        text = torch.linspace(-1, 1, 80).view(1, 5, 16).expand(len(batch), -1, -1)
        loss: Tensor = self.transformer(batch, torch.full((len(batch),), 500.0), text).sample.square().mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def evaluate_between_fits(stage: int | None) -> list[float]:
    """Validation during fit, alone, after another fit of the same module, and a prediction."""
    loader = DataLoader(torch.randn(8, 4, 1, 6, 10, generator=torch.Generator().manual_seed(1)), batch_size=2)
    with deepspeed_on_cpu():
        sizes = {"ulysses_size": dist.get_world_size()}
        selected: Any = SequenceParallelDeepSpeedStrategy(stage, **sizes) if stage else SequenceParallelDDPStrategy()
        runner, module, losses = trainer(selected, max_steps=2, val_check_interval=2), Denoiser(), []
        for steps in (2, 4):
            runner.fit_loop.epoch_loop.max_steps = steps
            runner.fit(module, loader, loader)
            losses.append(float(runner.callback_metrics["loss"]))
            losses.append(float(runner.validate(module, loader, verbose=False)[0]["loss"]))
        losses += [float(loss) for loss in runner.predict(module, loader)]
    return losses


@needs_deepspeed
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_the_loops_follow_one_another_on_one_module(ranks: Ranks, stage: int) -> None:
    (expected,) = ranks(1).run(evaluate_between_fits, None)
    assert expected[0] == expected[1] != expected[2] == expected[3]
    for got in ranks(2).run(evaluate_between_fits, stage):
        assert got == pytest.approx(expected, rel=1e-5)


def train_and_validate_in_bfloat16() -> list[torch.dtype]:
    class Noting(Scale):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            dtypes.append(self.dtype)
            self.net(torch.ones(1, 1).to(self.dtype))

    dtypes: list[torch.dtype] = []
    loader = DataLoader(torch.arange(4.0), batch_size=2)
    with deepspeed_on_cpu():
        for run in (
            lambda runner: runner.fit(Noting(), loader, loader),
            lambda runner: runner.validate(Noting(), loader),
        ):
            run(trainer(scaling(2, 1), precision="bf16-mixed", num_sanity_val_steps=1, limit_val_batches=1))
    return dtypes


@needs_deepspeed
def test_the_module_knows_its_dtype_in_bfloat16(ranks: Ranks) -> None:
    (dtypes,) = ranks(1).run(train_and_validate_in_bfloat16)
    assert len(dtypes) >= 2 and set(dtypes) == {torch.bfloat16}
