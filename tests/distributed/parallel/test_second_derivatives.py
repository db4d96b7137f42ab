"""Derivatives through a split network other than one backward: exact, as on one device, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from lightning_videoscale.parallel import (
    SequenceMesh,
    check_loss,
    find_plan,
    parallelize,
    sequence_parallel_attention,
)
from lightning_videoscale.strategies import (
    SequenceParallelDDPStrategy,
    SequenceParallelDeepSpeedStrategy,
    SequenceParallelFSDP2Strategy,
)
from tests.distributed.pool import ProcessPool
from tests.distributed.summing import sum_over_ranks
from tests.distributed.wan_training import Clips, RectifiedFlow
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed
from tests.models import gradient_error, lifted_float_casts, tiny_wan

Ranks = Callable[[int], ProcessPool]
SHAPE = (3, 2, 6)  # nine tokens: uneven over two ranks
LONGER = (5, 2, 6)


def averaged(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    sum_over_ranks(gradients.values(), mean=True)
    return gradients


def penalized(split: bool, checkpointing: bool = False, heads: int = 4, passes: int = 1) -> dict[str, Tensor]:
    """Gradients of a loss with a penalty on the gradients of all inputs, of passes of different lengths."""
    with lifted_float_casts(), sdpa_kernel(SDPBackend.MATH):
        network, captions = tiny_wan(num_attention_heads=heads).double(), nn.Linear(16, 16, bias=False).double()
        nn.init.eye_(captions.weight)
        if checkpointing:
            network.enable_gradient_checkpointing()
        if split:
            parallelize(network, SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()))
        loss = torch.zeros((), dtype=torch.float64)
        noises = []
        for shape in (SHAPE, LONGER)[:passes]:
            batch = next(iter(DataLoader(Clips(shape, torch.float64), batch_size=2)))
            noise, text = batch["noise"].requires_grad_(), captions(batch["text"])
            velocity = network(noise, batch["time"] * 1000, encoder_hidden_states=text).sample
            error = (velocity - batch["latents"]).square().mean()
            of_noise, of_text = torch.autograd.grad(error, (noise, text), create_graph=True)
            loss = loss + error + (of_noise.square().sum().sqrt() - 1).square() + (of_text**3).sum() * 1e4
            noises.append(noise)
        check_loss(loss)
        loss.backward()
    found = {f"network.{name}": p.grad for name, p in network.named_parameters() if p.grad is not None}
    assert captions.weight.grad is not None
    of_inputs = {f"noise {i}": noise.grad for i, noise in enumerate(noises) if noise.grad is not None}
    return averaged(found | {"captions": captions.weight.grad}) | of_inputs


@pytest.mark.parametrize(
    ("checkpointing", "heads", "passes"),
    [(False, 4, 1), (False, 3, 2), pytest.param(True, 4, 2, id="checkpointing")],
)
def test_a_penalty_on_gradients_of_inputs_is_exact(ranks: Ranks, checkpointing: bool, heads: int, passes: int) -> None:
    whole = ranks(2).run(penalized, False, heads=heads, passes=passes)[0]
    for found in ranks(2).run(penalized, True, checkpointing, heads, passes):
        assert gradient_error(found, whole) < 1e-10


def of_attention(kv_heads: int, ring_size: int = 1) -> float:
    """Relative error of the gradients of a gradient, of one with few key/value heads against dense attention."""
    size = dist.get_world_size()
    mesh = SequenceMesh.create("cpu", ulysses_size=size // ring_size, ring_size=ring_size)
    generator = torch.Generator().manual_seed(0)
    lengths, heads = (3, 2, 2)[:size], (6, kv_heads, kv_heads)
    drawn = [torch.randn(2, sum(lengths), count, 4, generator=generator).double() for count in heads]
    weights = [torch.randn(x.shape, generator=generator).double() for x in (*drawn, drawn[0])]
    mine = slice(sum(lengths[: mesh.sp.rank]), sum(lengths[: mesh.sp.rank + 1]))

    def second(tokens: slice, attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        inputs = [x[:, tokens].clone().requires_grad_() for x in drawn]
        loss = (attend(*inputs).square() * weights[3][:, tokens]).sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        return torch.autograd.grad(sum((g * w[:, tokens]).sum() for g, w in zip(first, weights, strict=False)), inputs)

    def dense(*inputs: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in inputs)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    with sdpa_kernel(SDPBackend.MATH):
        found = second(mine, lambda *inputs: sequence_parallel_attention(*inputs, mesh, lengths=lengths))
        expected = second(slice(None), dense)
    return max(float((x - y[:, mine]).norm() / y.norm()) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_attention_alone_is_exact(ranks: Ranks, kv_heads: int) -> None:
    assert max(ranks(3).run(of_attention, kv_heads)) < 1e-12


def test_ring_attention_says_that_it_has_no_second_derivative(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"(?s)NotImplementedError: .*ring_size=1.*SDPBackend\.MATH"):
        ranks(2).run(of_attention, 2, ring_size=2)


def refused(transform: str, known_plan: bool) -> str:
    network = tiny_wan()
    mesh = SequenceMesh.create("cpu", ulysses_size=dist.get_world_size())
    plan = None if known_plan else replace(find_plan(network), exact=False)
    parallelize(network, mesh, plan)
    batch = next(iter(DataLoader(Clips(SHAPE, torch.float32), batch_size=2)))
    parameters = dict(network.named_parameters())

    def velocity(noise: Tensor) -> Tensor:
        kwargs = {"encoder_hidden_states": batch["text"]}
        found: Tensor = torch.func.functional_call(network, parameters, (noise, batch["time"] * 1000), kwargs).sample
        return found

    noise = batch["noise"]
    with pytest.raises(NotImplementedError) as caught:
        if transform == "grad":
            torch.func.grad(lambda x: velocity(x).sum())(noise)
        elif transform == "vjp":
            torch.func.vjp(velocity, noise)
        elif transform == "vmap":
            torch.func.vmap(velocity)(noise[None])
        elif transform == "jvp":
            torch.func.jvp(velocity, (noise,), (noise,))
        else:
            with forward_ad.dual_level():
                velocity(forward_ad.make_dual(noise, noise))
    assert velocity(noise).isfinite().all()  # an ordinary call still works, and so does a level nobody uses
    with forward_ad.dual_level():
        assert velocity(noise).isfinite().all()
    return str(caught.value)


@pytest.mark.parametrize("known_plan", [True, False])
@pytest.mark.parametrize("transform", ["grad", "vjp", "vmap", "jvp", "forward_ad"])
def test_transforms_are_refused_by_name(ranks: Ranks, transform: str, known_plan: bool) -> None:
    for message in ranks(2).run(refused, transform, known_plan):
        assert "WanTransformer3DModel" in message
        assert "torch.autograd.grad" in message


def transformed_on_one_rank() -> Tensor:
    mesh = SequenceMesh.create("cpu", ulysses_size=1)
    q = torch.ones(1, 3, 2, 4)
    return torch.func.grad(lambda x: sequence_parallel_attention(x, q, q, mesh).sum())(q)


def test_transforms_work_where_nothing_is_split(ranks: Ranks) -> None:
    assert ranks(2).run(transformed_on_one_rank)[0].shape == (1, 3, 2, 4)


class WithGradientPenalty(RectifiedFlow):
    """Adds a penalty on the gradient of the velocity with respect to the noisy latents."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        noise = batch["noise"].requires_grad_()
        loss = super().loss(batch | {"noise": noise})
        of_noise = torch.autograd.grad(loss, noise, create_graph=True)[0]
        return loss + (of_noise.square().sum() * 1e3 - 1).square()


STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "ddp": SequenceParallelDDPStrategy,
    "fsdp2": SequenceParallelFSDP2Strategy,
    "zero": SequenceParallelDeepSpeedStrategy,
}


def trained(strategy: str, dtype: torch.dtype = torch.float64, **arguments: int) -> dict[str, Tensor]:
    with (
        lifted_float_casts(),
        sdpa_kernel(SDPBackend.MATH),
        deepspeed_on_cpu() if strategy == "zero" else nullcontext(),
    ):
        module = WithGradientPenalty(compute_dtype=dtype).to(dtype)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=STRATEGIES[strategy](**arguments),
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(Clips(SHAPE, dtype), batch_size=2))
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def test_ddp_trains_with_a_gradient_penalty(ranks: Ranks) -> None:
    split, whole = ranks(2).run(trained, "ddp", ulysses_size=2), ranks(1).run(trained, "ddp")[0]
    initial = dict(tiny_wan().double().named_parameters())
    assert any((whole[f"transformer.{name}"] - p).abs().max() > 1e-4 for name, p in initial.items())
    for found in split:
        assert max(float((found[name] - whole[name]).abs().max()) for name in whole) < 1e-8


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.full)])
def test_zero_trains_with_a_gradient_penalty(ranks: Ranks, stage: int) -> None:
    """In float32, the only precision of ZeRO's optimizer states."""
    split = ranks(2).run(trained, "zero", torch.float32, stage=stage, ulysses_size=2)
    whole = ranks(1).run(trained, "ddp", torch.float32)[0]
    for found in split:
        assert gradient_error(found, whole) < 1e-4


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [("fsdp2", {}), pytest.param("zero", {"stage": 3}, marks=needs_deepspeed)],
)
def test_a_second_backward_through_sharded_parameters_is_refused(
    ranks: Ranks, strategy: str, arguments: dict[str, int]
) -> None:
    with pytest.raises(AssertionError, match=r"(?s)NotImplementedError: .*WanTransformer3DModel.*ulysses_ddp"):
        ranks(2).run(trained, strategy, torch.float32, ulysses_size=2, **arguments)
