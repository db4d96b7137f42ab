"""One model of each family trains in bfloat16 over NCCL, as near to float64 on two GPUs as on one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_videoscale.compat.torch.trees import tree_leaves, tree_map_only
from lightning_videoscale.parallel import SequenceMesh, parallelize
from tests.distributed.families.harness import Case, Family, lifted_casts
from tests.distributed.families.test_parity import FAMILIES
from tests.distributed.pool import ProcessPool
from tests.distributed.summing import sum_over_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

Ranks = Callable[[int], ProcessPool]
STEPS = 20
# Not cuDNN, whose plans torch takes for gradients of any layout, so that Flux alone has NaN: see docs/limits.md.
OTHERS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LENGTHS = {"text": 9, "frames": 3, "side": 5, "batch": 2}


def gradients_of(model: nn.Module, inputs: Mapping[str, Any], autocast: bool) -> dict[str, Tensor]:
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext():
        outputs = model(**inputs)
    tensors = tree_leaves(dict(outputs) if isinstance(outputs, Mapping) else outputs)
    loss = sum((x.double() - 0.1).square().mean() for x in tensors if isinstance(x, Tensor))
    assert isinstance(loss, Tensor)
    loss.backward()
    named = model.named_parameters()
    return {name: (torch.zeros_like(p) if p.grad is None else p.grad).double() for name, p in named}


def distance(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    return float(sum((gradients[name] - exact[name]).square().sum() for name in exact))


def errors(name: str, settings: Mapping[str, Any]) -> tuple[float, float]:
    """Relative errors of all gradients of a training, of one GPU and of a group of them."""
    device = torch.device("cuda", dist.get_rank())
    family: Family = FAMILIES[name]
    mesh = SequenceMesh.create("cuda", ulysses_size=dist.get_world_size())
    single, double = Case(name, settings=settings, float32=True), Case(name, settings=settings)
    exact, alone, split = (
        family.model(double).to(device),
        family.model(single).to(device),
        family.model(single).to(device),
    )
    parallelize(split, mesh)
    optimizer = torch.optim.SGD(exact.parameters(), lr=1e-2)
    of_alone = of_split = norm = 0.0
    for step in range(STEPS):
        for model in (alone, split):
            for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
                mine.data.copy_(theirs)
        inputs = tree_map_only(Tensor, lambda x: x.to(device), _exact_times(family.inputs(single, step)))
        with sdpa_kernel(OTHERS):
            whole = gradients_of(alone, inputs, autocast=True)
        sliced = gradients_of(split, inputs, autocast=True)
        sum_over_ranks(sliced.values(), mean=True)
        with lifted_casts():
            reference = gradients_of(exact, tree_map_only(Tensor, _double, inputs), autocast=False)
        of_alone, of_split = of_alone + distance(whole, reference), of_split + distance(sliced, reference)
        norm += sum(float(gradient.square().sum()) for gradient in reference.values())
        torch.nn.utils.clip_grad_norm_(exact.parameters(), 1.0)
        optimizer.step()
    return (of_alone / norm) ** 0.5, (of_split / norm) ** 0.5


def _exact_times(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Powers of two, which a thousand times are exact in bfloat16: Flux and its kin scale them after their cast."""
    scaled = ("timestep", "guidance")
    return {
        name: 2.0 ** x.double().log2().round().float()
        if name in scaled and isinstance(x, Tensor) and x.is_floating_point()
        else x
        for name, x in inputs.items()
    }


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


@pytest.mark.parametrize("name", FAMILIES)
def test_two_gpus_are_as_near_to_float64_as_one(
    gpu_ranks: Ranks, record_property: Callable[[str, object], None], name: str
) -> None:
    settings = {**LENGTHS, **FAMILIES[name].variants[0]}
    for alone, split in gpu_ranks(2).run(errors, name, settings):
        record_property("errors of one GPU and of two", (alone, split))
        assert 1e-4 < alone < 0.3
        assert split <= 1.05 * alone
