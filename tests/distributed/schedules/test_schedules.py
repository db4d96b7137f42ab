"""Every schedule computes what the serial one does: in a layer of any shape, in a model as users have it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, get_args

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.parallel import SequenceMesh, SplitPlan, parallelize
from lightning_videoscale.parallel.schedules import ScheduleName
from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from tests.distributed.pool import ProcessPool
from tests.distributed.schedules.random_layers import Shape, random_shape, run_layer
from tests.distributed.summing import sum_over_ranks
from tests.distributed.wan_training import Clips, RectifiedFlow
from tests.models import gradient_error, lifted_float_casts, tiny_wan

Ranks = Callable[[int], ProcessPool]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)  # "serial" first


# -- a layer of any shape ------------------------------------------------------------------------------------------

mesh_of = cache(lambda ring, ulysses: SequenceMesh.create("cpu", ring_size=ring, ulysses_size=ulysses))


def layer_difference(ring: int, shape: Shape) -> float:
    """The largest of output and gradients, relative to the tensor's norm or to a thousandth of all."""
    with lifted_float_casts():
        mesh = mesh_of(ring, dist.get_world_size() // ring)
        serial, *others = (run_layer(mesh, schedule, shape) for schedule in SCHEDULES)
    return max(gradient_error(other, serial) for other in others)


def check_layers(ranks: Ranks, size: int, ring: int, text: bool, count: int) -> None:
    @settings(max_examples=count, deadline=None)
    @given(st.randoms(use_true_random=False).map(partial(random_shape, ulysses_size=size // ring, text=text)))
    def check(shape: Shape) -> None:
        assert max(ranks(size).run(layer_difference, ring, shape)) < 1e-12

    check()


LAYOUTS = pytest.mark.parametrize(("size", "ring"), [(2, 1), (3, 1), (4, 1), (4, 2)])
STREAMS = pytest.mark.parametrize("text", [False, True], ids=["one stream", "two streams"])


@STREAMS
@pytest.mark.parametrize(
    ("size", "ring"), [(3, 1), (4, 2), *(pytest.param(size, 1, marks=pytest.mark.full) for size in (2, 4))]
)
def test_layers_of_random_shapes_equal_serial_ones(ranks: Ranks, size: int, ring: int, text: bool) -> None:
    check_layers(ranks, size, ring, text, 5)


@pytest.mark.full
@pytest.mark.timeout(3600)
@STREAMS
@LAYOUTS
def test_a_thousand_layers_of_random_shapes_equal_serial_ones(ranks: Ranks, size: int, ring: int, text: bool) -> None:
    check_layers(ranks, size, ring, text, 125)


# -- a model as users have it --------------------------------------------------------------------------------------


def prepare(model: nn.Module, habit: str) -> None:
    """What a user does to a model before it is split, not always on all ranks."""
    if habit.startswith("fused"):
        inject_fused_kernels(model, backend="reference", recompute_norms=habit.endswith("recomputed"))
    if habit == "lora":
        config = LoraConfig(r=2, target_modules=["attn1.to_q", "attn1.to_v", "attn1.to_out.0"], init_lora_weights=False)
        torch.manual_seed(1)
        inject_adapter_in_model(config, model)
    if habit == "projections fused":
        model.fuse_qkv_projections()
    if habit == "hooks on one rank" and dist.get_rank() == 1:
        for path, module in model.named_modules():
            if path.endswith(("attn1.to_k", "attn1.to_out.0")):
                module.register_forward_hook(lambda *_: None)
    if habit == "frozen":
        model.requires_grad_(False)
        model.blocks[0].attn1.norm_k.requires_grad_(True)
        model.blocks[1].attn1.to_v.bias.requires_grad_(True)
    if habit == "checkpointed":
        model.enable_gradient_checkpointing()
    if habit == "other tables":
        model.blocks[0].register_forward_pre_hook(lambda _, args: (*args[:3], tuple(t.clone() for t in args[3])))
    if habit == "dropout":
        for block in model.blocks:
            block.attn1.to_out[1].p = 0.5


def run_model(schedule: ScheduleName, habit: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    model = tiny_wan(num_attention_heads=5)
    model.to(dtype)
    prepare(model, habit)
    generator = torch.Generator().manual_seed(7)
    clips = torch.randn(2, 4, 3, 4, 6, generator=generator, dtype=torch.float64).to(dtype)
    text = torch.randn(2, 5, 16, generator=generator, dtype=torch.float64).to(dtype)
    with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()) as mesh:
        undo = parallelize(model, mesh, schedule=schedule)
        torch.manual_seed(11)
        passes = [model(clips * scale, torch.tensor([100.0, 500.0]), text).sample for scale in (1.0, 0.5)]
        sum(out.square().mean() for out in passes).backward()  # type: ignore[union-attr]
        undo()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    sum_over_ranks(gradients.values())
    return {"output": torch.cat(passes).detach(), **gradients}


def model_difference(habit: str) -> float:
    with lifted_float_casts():
        serial, *others = (run_model(schedule, habit) for schedule in SCHEDULES)
    return max(gradient_error(other, serial) for other in others)


@pytest.mark.parametrize(
    "habit",
    [
        "plain",
        "fused",
        "hooks on one rank",
        "checkpointed",
        "dropout",
        "other tables",
        *(  # of other families, in test_hidden_exchange.py
            pytest.param(habit, marks=pytest.mark.full)
            for habit in ("fused, recomputed", "lora", "projections fused", "frozen")
        ),
    ],
)
def test_a_model_as_users_have_it(ranks: Ranks, habit: str) -> None:
    assert max(ranks(3).run(model_difference, habit)) < 1e-11


def error_in_bfloat16(schedule: ScheduleName) -> float:
    """Of output and gradients, over float64's."""
    with lifted_float_casts():
        exact = run_model("serial", "fused")
    model = run_model(schedule, "fused", torch.bfloat16)
    errors = [float((model[name].double() - x).norm() / x.norm()) for name, x in exact.items() if "attn1" in name]
    return sum(errors) / len(errors)


def test_it_rounds_no_more_than_serial_code(ranks: Ranks) -> None:
    serial, *others = (ranks(2).run(error_in_bfloat16, schedule)[0] for schedule in SCHEDULES)
    assert max(others) <= 1.05 * serial


def autocast_outputs(schedule: ScheduleName) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        found = run_model(schedule, "plain", torch.float32)
    output = found.pop("output")
    assert found and all(gradient.dtype is torch.float32 for gradient in found.values())
    return output


def test_under_autocast(ranks: Ranks) -> None:
    serial, *others = (ranks(2).run(autocast_outputs, schedule)[0] for schedule in SCHEDULES)
    assert max(float((serial - other).norm() / serial.norm()) for other in others) < 1e-2


# -- what it cannot ------------------------------------------------------------------------------------------------


def objections() -> dict[str, str]:
    found = {}

    def note(what: str, act: Callable[[nn.Module], Any], schedule: ScheduleName = "sliced") -> None:
        model = tiny_wan()
        undo = parallelize(model, mesh, schedule=schedule)
        try:
            act(model)
        except (ValueError, NotImplementedError) as error:
            found[what] = str(error)
        undo()

    def forward(model: nn.Module, **changes: Any) -> Tensor:
        given = {"hidden_states": torch.ones(1, 4, 1, 4, 4, requires_grad=True), "timestep": torch.ones(1)}
        out: Tensor = model(**(given | {"encoder_hidden_states": torch.ones(1, 3, 16)} | changes)).sample
        return out

    def hooked(model: nn.Module) -> None:
        model.blocks[1].attn1.norm_q.register_forward_hook(lambda *_: None)
        forward(model)

    def penalty(model: nn.Module) -> None:
        out = forward(model)
        torch.autograd.grad(out.sum(), list(model.parameters()), create_graph=True)

    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        note("a norm's hook", hooked)
        note("a second derivative", penalty)
        plan = SplitPlan({}, {}, {}, lambda model, context: lambda: None)
        try:
            parallelize(nn.Linear(2, 2), mesh, plan, schedule="sliced")
        except ValueError as error:
            found["another plan"] = str(error)
    return found


def test_what_it_cannot_is_said(ranks: Ranks) -> None:
    for found in ranks(2).run(objections):
        assert "norm_q" in found["a norm's hook"] and "blocks.1.attn1" in found["a norm's hook"]
        assert "schedule='serial'" in found["a second derivative"]
        assert "Linear" in found["another plan"] and "'sliced'" in found["another plan"]


def test_a_schedule_that_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"schedule='slices'"):
        SequenceParallelDDPStrategy(schedule="slices")  # type: ignore[arg-type]


def described() -> str:
    strategy = SequenceParallelDDPStrategy(schedule="sliced")
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, logger=False, enable_progress_bar=False, max_steps=1,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(RectifiedFlow(), DataLoader(Clips((2, 4, 4), torch.float32), batch_size=1))
    return str(strategy.describe()["schedule"])


def test_the_report_names_the_schedule(ranks: Ranks) -> None:
    assert ranks(2).run(described) == ["sliced"] * 2
