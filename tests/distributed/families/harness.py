"""A case of a model family: a tiny random model and its inputs, and how far its split self is from one device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from lightning_videoscale.compat.torch.trees import tree_leaves
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.parallel import SequenceMesh, SplitPlan, parallelize, verify_plan
from lightning_videoscale.parallel.schedules import ScheduleSetting
from lightning_videoscale.strategies.blocks import checkpoint_activations
from tests.distributed.summing import sum_over_ranks
from tests.models import gradient_error

Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """What may matter of a call.

    Attributes:
        family: Key of `FAMILIES`.
        mesh: Sizes (dp, ring, ulysses).
        settings: Arguments of the family's `build` and `inputs`: variants of the model, lengths, batch size.
        checkpointing: Whether activation checkpointing is on, the model's own if it has one.
        float32: Whether to compute in float32, with the model's own casts; else in float64 without them.
        fused: Whether the split model has fused kernels.
        adapters: Whether all that trains is LoRA in every Linear of the blocks.
        schedule: In which order it exchanges.
    """

    family: str
    mesh: tuple[int, int, int] = (1, 1, 4)
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    checkpointing: bool = False
    float32: bool = False
    fused: bool = False
    adapters: bool = False
    schedule: ScheduleSetting = "serial"

    @property
    def ranks(self) -> int:
        dp, ring, ulysses = self.mesh
        return dp * ring * ulysses


class Family:
    """One class of models.

    Args:
        build: Returns a tiny model, given settings that it knows; others are for `inputs`.
        inputs: Returns what it is called with, by name, drawn from torch's generator.
        variants: Settings of either that matter beside lengths and batch size.
        spread: Standard deviation of the weights.
    """

    def __init__(
        self,
        build: Callable[..., nn.Module],
        inputs: Callable[..., Inputs],
        variants: Sequence[Mapping[str, Any]] = ({},),
        spread: float = 0.3,
    ) -> None:
        self._build, self._inputs, self.variants, self._spread = build, inputs, variants, spread

    def model(self, case: Case) -> nn.Module:
        """Seeded; all parameters are random, also those that start at zero."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self._build(**case.settings).train()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn_like(parameter) * (self._spread if parameter.ndim > 1 else 0.1))
                    if parameter.ndim == 1:
                        parameter.add_(0.5)
            if case.adapters:
                add_adapters(model)
        if case.checkpointing:
            getattr(model, "enable_gradient_checkpointing", lambda: checkpoint_activations(model))()
        return model if case.float32 else model.double()

    def inputs(self, case: Case, dp_rank: int) -> Inputs:
        """Different for each group, the same for its ranks."""
        with torch.random.fork_rng():
            torch.manual_seed(1 + dp_rank)
            inputs = self._inputs(**case.settings)
        return inputs if case.float32 else _doubled(inputs)


def add_adapters(model: nn.Module) -> None:
    """Freezes a model and adds LoRA of rank 2 to every Linear of its blocks."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    inside = [name for name in linears if re.search(r"\.\d+\.", name)]
    model.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=inside, init_lora_weights=False), model)


@contextmanager
def lifted_casts(own: torch.dtype = torch.float64) -> Iterator[None]:
    """Lets float64 through the casts to float32 and bfloat16 that diffusers' models have.

    Of ``own`` float32, through those to bfloat16: where split and whole round to different sides, they differ by that.
    """
    to, as_float, norm = Tensor.to, Tensor.float, torch.linalg.vector_norm
    halves = (torch.bfloat16, torch.float16)
    narrower = (torch.float32, *halves) if own is torch.float64 else halves

    def kept(argument: Any) -> Any:
        narrow = argument.dtype if isinstance(argument, Tensor) else argument
        return own if narrow in narrower else argument

    def lifted_to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.dtype is own:
            args, kwargs = tuple(map(kept, args)), {name: kept(value) for name, value in kwargs.items()}
        return to(x, *args, **kwargs)

    def lifted_float(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x if x.dtype is own else as_float(x, *args, **kwargs)

    def lifted_norm(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        return norm(x, *args, dtype=None if x.dtype is own else dtype, **kwargs)

    def promoting(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Of functions that take no mixed dtypes: what a model makes in float32 from the start meets float64."""

        def call(*args: Any, **kwargs: Any) -> Tensor:
            if any(isinstance(x, Tensor) and x.dtype is torch.float64 for x in args):
                args = tuple(x.double() if isinstance(x, Tensor) and x.dtype is torch.float32 else x for x in args)
            return function(*args, **kwargs)

        return call

    with ExitStack() as patches:
        patches.enter_context(patch.object(F, "linear", promoting(F.linear)))
        patches.enter_context(patch.object(torch, "einsum", promoting(torch.einsum)))
        patches.enter_context(patch.object(Tensor, "to", lifted_to))
        patches.enter_context(patch.object(Tensor, "float", lifted_float))
        patches.enter_context(patch.object(torch.linalg, "vector_norm", lifted_norm))
        yield


def errors_of(case: Case, family: Family, plan: SplitPlan | None = None) -> dict[str, float]:
    """Relative errors of outputs, loss and gradients on this rank of a case's mesh."""
    dp, ring, ulysses = case.mesh
    assert dist.get_world_size() == case.ranks
    mesh = SequenceMesh.create("cpu", ulysses_size=ulysses, ring_size=ring)
    whole, sliced = family.model(case), family.model(case)
    if case.fused:
        inject_fused_kernels(sliced)
    undo = parallelize(sliced, mesh, plan, verify_plan=False, schedule=case.schedule)
    with ExitStack() as contexts:
        contexts.callback(undo)
        contexts.enter_context(lifted_casts(torch.float32 if case.float32 else torch.float64))
        everyone = [family.inputs(case, rank) for rank in range(dp)]
        expected = [run(whole, inputs) for inputs in everyone]
        got = run(sliced, everyone[mesh.dp.rank])
        sum(loss for _, loss in expected).backward()
        (got[1] * dp).backward()  # as the mean over groups takes back
    gradients, reference = (
        {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
        for model in (sliced, whole)
    )
    sum_over_ranks(gradients.values(), mean=True)
    outputs = zip(got[0], expected[mesh.dp.rank][0], strict=True)
    return {
        "outputs": max(float((x - y).norm() / y.norm()) for x, y in outputs),
        "loss": abs(got[1].item() / expected[mesh.dp.rank][1].item() - 1),
        "gradients": gradient_error(gradients, reference),
        "norm": float(torch.stack([g.norm() for g in reference.values()]).norm()),
    }


def complaint(case: Case, family: Family, plan: SplitPlan) -> str:
    """What is said of a plan when it is applied, at the first call, or by `verify_plan`; empty if nothing."""
    return complaints(case, family, {"": plan})[""]


def complaints(case: Case, family: Family, plans: Mapping[str, SplitPlan]) -> dict[str, str]:
    """As `complaint`, of several plans by name. A rank that waited in vain for another raises."""
    found = {}
    with SequenceMesh.create("cpu", ulysses_size=case.mesh[2], ring_size=case.mesh[1]) as mesh, lifted_casts():
        for name, plan in plans.items():
            found[name] = ""
            try:
                verify_plan(family.model(case), mesh, plan, kwargs=family.inputs(case, mesh.dp.rank))
            except Exception as error:
                if "gloo" in str(error):
                    raise
                found[name] = f"{type(error).__name__}: {error}"
    return found


def run(model: nn.Module, inputs: Inputs) -> tuple[list[Tensor], Tensor]:
    """What a model returns, and a loss that depends on all of it."""
    outputs = model(**inputs)
    leaves = tree_leaves(dict(outputs) if isinstance(outputs, Mapping) else outputs)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    loss = sum(
        (x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).view_as(x)).mean()
        + 0.1 * x.square().mean()
        for x in tensors
    )
    assert isinstance(loss, Tensor)
    return [x.detach() for x in tensors], loss


def _doubled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _doubled(x) for name, x in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map(_doubled, value))
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
