"""Networks that run by CUDA graphs: the same numbers as eagerly, to the bit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelDeepSpeedStrategy
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, RectifiedFlow
from tests.distributed.zero import needs_deepspeed
from tests.gpu.graphs.training import SHAPES, Training, both, draw, graphed, wan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic_algorithms"),
]
Ranks = Callable[[int], ProcessPool]


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_losses_and_norms_are_equal_to_the_bit(dtype: torch.dtype | None, micro_batches: int) -> None:
    eager, other, runs = both(dtype=dtype)
    for number in range(12):
        shape = SHAPES[number % 3]
        assert eager.step(number, shape, micro_batches) == other.step(number, shape, micro_batches)
    assert runs.counts["captured"] == 3
    assert runs.counts["replayed"] == 12 * micro_batches - 6


def freeze(network: Any) -> None:
    network.requires_grad_(False)
    for block in network.blocks:
        block.attn1.to_q.requires_grad_(True)


def drop_out(network: Any) -> None:
    for block in network.blocks:
        block.attn1.to_out[1] = nn.Dropout(0.2)
    network.train()


def own_checkpoints(network: Any) -> None:
    network.enable_gradient_checkpointing()


def own_checkpoints_and_dropout(network: Any) -> None:
    own_checkpoints(network)
    drop_out(network)


@pytest.mark.parametrize("change", [freeze, drop_out, own_checkpoints])
def test_networks_with_other_parts(change: Callable[[nn.Module], object]) -> None:
    eager, other, runs = both(change)
    for number in range(8):
        assert eager.step(number, SHAPES[0]) == other.step(number, SHAPES[0])
    assert runs.counts["replayed"] == 6


def test_checkpoints_that_would_draw_again_stay_eager_and_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    eager, other, runs = both(own_checkpoints_and_dropout)
    for number in range(6):
        assert eager.step(number, SHAPES[0]) == other.step(number, SHAPES[0])
    assert runs.counts["replayed"] == 0
    assert "Checkpoints would draw random numbers again" in capsys.readouterr().out


def reads_a_number(network: Any) -> None:
    """A forward that waits for the device, which no graph can repeat."""
    original = network.blocks[3].forward

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert float(hidden.detach().abs().max()) > 0
        return original(hidden, *args, **kwargs)  # type: ignore[no-any-return]

    network.blocks[3].forward = forward


def test_a_capture_that_breaks_leaves_all_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    eager, other, runs = both(reads_a_number)
    drop_out(eager.network)
    drop_out(other.network)
    for number in range(6):
        assert eager.step(number, SHAPES[0]) == other.step(number, SHAPES[0])
    assert runs.counts["replayed"] == 0
    assert "its capture failed" in capsys.readouterr().out
    sound, by_graphs, runs = both(drop_out)
    for number in range(6):
        assert sound.step(number, SHAPES[0]) == by_graphs.step(number, SHAPES[0])
    assert runs.counts["replayed"] == 4
    torch.cuda.empty_cache()  # which does nothing while the allocator believes in a capture
    assert torch.cuda.memory_reserved() < 2**31


def test_validation_and_a_second_forward_before_the_first_backward() -> None:
    eager, other, runs = both()
    for number in range(8):
        seen = []
        for training in (eager, other):
            with torch.no_grad():
                before = float(training.loss(number + 50, SHAPES[1]))
            first, second = training.loss(number, SHAPES[0]), training.loss(number + 20, SHAPES[0])
            (first + second).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            seen.append((before, float(first), float(second)))
        assert seen[0] == seen[1]
    assert runs.counts["busy"] > 0
    assert runs.counts["replayed"] > 8


def test_eval_mode_between_steps_keeps_the_graphs_of_training() -> None:
    eager, other, runs = both(drop_out)
    for number in range(16):
        if number % 2:
            for training in (eager, other):
                training.network.eval()
                with torch.no_grad():
                    training.loss(number, SHAPES[0])
                training.network.train()
        assert eager.step(number, SHAPES[0]) == other.step(number, SHAPES[0])
    assert runs.counts["captured"] == 2
    assert runs.counts["replayed"] == 14 + 6


def test_an_output_that_is_kept_is_not_overwritten() -> None:
    _, other, _ = both()
    for number in range(4):
        other.step(number, SHAPES[0])
    inputs = draw(SHAPES[0], 1)
    with torch.no_grad():
        for _ in range(3):
            other.network(*inputs)
        first = other.network(*inputs).sample
        kept = first.clone()
        other.network(*draw(SHAPES[0], 2))
    assert torch.equal(first, kept)


def test_a_second_backward_is_an_error() -> None:
    _, other, runs = both()
    for number in range(4):
        other.step(number, SHAPES[0])
    loss = other.loss(9, SHAPES[0])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="graphs=False"):
        loss.backward()
    assert runs.counts["replayed"] == 3


def test_gradients_of_inputs() -> None:
    eager, other, runs = both()
    for number in range(6):
        found = []
        for training in (eager, other):
            x, t, text = draw(SHAPES[0], number)
            x.requires_grad_()
            training.network(x, t, text, return_dict=False)[0].square().mean().backward()
            training.optimizer.zero_grad()
            assert x.grad is not None
            found.append(x.grad)
        assert torch.equal(found[0], found[1])
    assert runs.counts["replayed"] == 4


def test_a_counter_of_flops_sees_all_of_them() -> None:
    eager, other, runs = both()
    counts = []
    for training in (eager, other):
        for number in range(4):
            training.step(number, SHAPES[0])
        with FlopCounterMode(display=False) as counter:
            training.step(9, SHAPES[0])
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    assert runs.counts["replayed"] == 2


def test_auto_captures_what_waits_for_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    network = wan(layers=5, fused=False)
    runs, training = graphed(network, "auto"), Training(network)
    for number in range(5):
        training.step(number, SHAPES[0])
    assert runs.counts["replayed"] == 3
    capsys.readouterr()
    with torch.no_grad():  # 61 440 tokens, which keep the device busy
        for number in range(5):
            training.loss(number, (60, 64, 64))
    assert runs.counts["replayed"] == 3
    assert "the host takes" in capsys.readouterr().out


def test_graphs_leave_their_memory_also_where_a_loss_is_kept() -> None:
    _, other, runs = both()
    for number in range(4):
        other.step(number, SHAPES[0])
    kept = other.loss(5, SHAPES[0])
    before = torch.cuda.memory_reserved()
    runs.close()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before
    with pytest.raises(RuntimeError, match="its graphs with it"):
        kept.backward()


class KeepsItsLoss(RectifiedFlow):
    """As many do, to log it later; NCCL's groups end all the same."""

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        self.latest = super().training_step(batch)
        return self.latest


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.all: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.all.append(float(outputs["loss"]))


def train(
    graphs: bool,
    mesh: tuple[int, int],
    precision: Any,
    accumulate: int = 1,
    zero_stage: int = 0,
    breaks: int | None = None,
    **exchange: Any,
) -> tuple[list[float], dict[str, int]]:
    """Losses of a run on a mesh of Ulysses and ring ranks, under DDP or a stage of ZeRO, and how its calls ran.

    On the rank ``breaks``, a capture fails.
    """
    torch.use_deterministic_algorithms(True)
    pl.seed_everything(1, verbose=False)
    module = KeepsItsLoss(num_layers=4, num_attention_heads=4, attention_head_dim=64)
    inject_fused_kernels(module)
    if breaks == dist.get_rank():
        reads_a_number(module.transformer)
    strategy: SequenceParallelDDPStrategy | SequenceParallelDeepSpeedStrategy
    if zero_stage:
        strategy = SequenceParallelDeepSpeedStrategy(zero_stage, *mesh, graphs=graphs, graphs_max_memory=0.5)
    else:
        strategy = SequenceParallelDDPStrategy(*mesh, graphs=graphs, graphs_max_memory=0.5, **exchange)
    losses = Losses()
    counts: dict[str, int] = {}

    class Count(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            counts.update(strategy.describe_graphs())

    trainer = pl.Trainer(
        accelerator="gpu",
        devices=torch.cuda.device_count(),
        strategy=strategy,
        precision=precision,
        max_steps=10,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        callbacks=[losses, Count()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(Clips((3, 8, 8), torch.float32, length=80), batch_size=1))
    return losses.all, counts


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("mesh", "accumulate"), [((1, 1), 1), ((2, 1), 1), ((2, 1), 2)])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_two_gpus_train_as_without_graphs(
    gpu_ranks: Ranks, mesh: tuple[int, int], accumulate: int, precision: str
) -> None:
    pool = gpu_ranks(2)
    eager = pool.run(train, False, mesh, precision, accumulate)
    by_graphs = pool.run(train, True, mesh, precision, accumulate)
    for (expected, _), (found, counts) in zip(eager, by_graphs, strict=True):
        assert found == expected
        assert counts["replayed"] == 10 * accumulate - 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("mesh", "exchange"),
    [
        ((1, 2), {}),
        ((2, 1), {"transport": "symmetric"}),
        ((2, 1), {"transport": "symmetric", "schedule": "sliced"}),
        ((2, 1), {"transport": "symmetric", "schedule": "overlap"}),
        ((2, 1), {"schedule": "sliced"}),
        ((1, 2), {"transport": "symmetric"}),
        ((2, 1), {"activation_checkpointing": True}),
        ((1, 2), {"activation_checkpointing": True, "transport": "symmetric"}),
        ((2, 1), {"activation_checkpointing": True, "transport": "symmetric", "schedule": "sliced"}),
    ],
    ids=str,
)
def test_graphs_repeat_every_exchange(gpu_ranks: Ranks, mesh: tuple[int, int], exchange: dict[str, Any]) -> None:
    pool = gpu_ranks(2)
    eager = pool.run(train, False, mesh, "bf16-mixed", 1, **exchange)
    by_graphs = pool.run(train, True, mesh, "bf16-mixed", 1, **exchange)
    for (expected, _), (found, counts) in zip(eager, by_graphs, strict=True):
        assert found == expected
        assert counts["replayed"] == 8


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mesh", [(1, 1), (2, 1)])
def test_a_capture_that_fails_on_one_rank_leaves_those_of_its_sequence_eager(
    gpu_ranks: Ranks, mesh: tuple[int, int]
) -> None:
    """Ranks with sequences of their own capture what each of them can."""
    pool = gpu_ranks(2)
    eager = pool.run(train, False, mesh, "bf16-mixed")
    by_graphs = pool.run(train, True, mesh, "bf16-mixed", breaks=1)
    assert [losses for losses, _ in by_graphs] == [losses for losses, _ in eager]
    replayed = [counts.get("replayed", 0) for _, counts in by_graphs]
    assert replayed == [8 if mesh == (1, 1) else 0, 0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@needs_deepspeed
@pytest.mark.parametrize(
    ("zero_stage", "accumulate", "precision"),
    [(1, 1, "bf16-mixed"), (2, 1, "bf16-mixed"), (2, 2, "bf16-mixed"), (2, 1, "32-true")],
)
def test_zero_trains_as_without_graphs(gpu_ranks: Ranks, zero_stage: int, accumulate: int, precision: str) -> None:
    pool = gpu_ranks(2)
    eager = pool.run(train, False, (2, 1), precision, accumulate, zero_stage)
    by_graphs = pool.run(train, True, (2, 1), precision, accumulate, zero_stage)
    for (expected, _), (found, counts) in zip(eager, by_graphs, strict=True):
        assert found == expected
        assert counts["replayed"] == 10 * accumulate - 2
