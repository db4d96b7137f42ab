"""The share of the memory traffic that is fused, by the count of modules and by the operations of a forward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_videoscale.compat.torch.trees import tree_leaves
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.injection.traffic import blocks, fused_share, traffic
from tests.distributed.families.harness import Case
from tests.distributed.families.test_parity import FAMILIES

# Not pointwise or a norm: products, attention, and what only moves tokens, such as before an exchange of heads.
OTHERS = ("mm", "attention", "convolution", "cat", "clone", "copy", "empty", "stack", "repeat", "pad", "index", "_view")
LENGTH = {"frames": 4, "side": 8, "batch": 1}
SOME = (
    *("wan", "wan_animate", "hunyuan_video", "ltx2", "mochi", "cosmos", "flux", "chroma", "cogview4", "flux2"),
    "z_image",  # whose feed-forwards call their activation
)


class Moved(TorchDispatchMode):
    """Bytes of floating-point numbers that PyTorch's own operations read and write inside of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.depth = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        namespace, _, name = function._schema.name.partition("::")
        if self.depth and namespace == "aten" and not function.is_view and not any(word in name for word in OTHERS):
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
            if all(x.is_floating_point() for x in tensors):
                self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        return result

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        def step(by: int) -> Any:
            def hook(*_: Any) -> None:
                self.depth += by

            return hook

        hooks = [block.register_forward_pre_hook(step(1)) for block in blocks(model).values()]
        hooks += [block.register_forward_hook(step(-1)) for block in blocks(model).values()]
        with torch.no_grad(), self:
            yield
        for hook in hooks:
            hook.remove()


def moved(model: nn.Module, inputs: Any) -> int:
    count = Moved()
    with count.inside(model):
        model(**inputs)
    return count.bytes


def some_by_default() -> list[Any]:
    return [name if name in SOME else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES]


@pytest.mark.parametrize("name", some_by_default())
def test_the_share_is_that_of_the_operations(name: str) -> None:
    family = FAMILIES[name]
    case = Case(name, settings=family.variants[0] | LENGTH, float32=True)
    model, inputs = family.model(case), family.inputs(case, 0)
    assert fused_share(model) == 0
    eager = moved(model, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is skipped
        report = inject_fused_kernels(model, "reference")
    assert report.fused_share == pytest.approx(1 - moved(model, inputs) / eager, abs=0.1)
    if report.fused_share:
        assert f"fused: about {report.fused_share:.0%} of what norms" in str(report)
    report.undo()
    assert fused_share(model) == 0


def test_a_second_injection_counts_what_is_fused_already() -> None:
    model = FAMILIES["wan"].model(Case("wan"))
    first = inject_fused_kernels(model, "reference")
    assert inject_fused_kernels(model, "reference").fused_share == first.fused_share == 1


@pytest.mark.parametrize("name", ["wan", "hunyuan_video"])
def test_adapters_are_not_counted(name: str) -> None:
    plain, adapted = (FAMILIES[name].model(Case(name, adapters=adapters)) for adapters in (False, True))
    assert [each[1:] for each in traffic(plain)] == [each[1:] for each in traffic(adapted)]


class PlainAttention(nn.Module):
    """Of a user: one projection, no processor."""

    processor = None

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)


class GateMLP(nn.Module):
    """A feed-forward by its name, without Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.GELU()


def test_blocks_of_users_are_counted_as_far_as_they_are_known() -> None:
    block = nn.ModuleDict({"norm": nn.LayerNorm(8), "attention": PlainAttention(), "mlp": GateMLP()})
    model = nn.ModuleDict({"blocks": nn.ModuleList([block])})
    assert [(each.kind, each.elements) for each in traffic(model)] == [
        ("modulation", 0),
        ("norm", 16),
        ("activation", 0),
    ]
    assert fused_share(model) == 0


def test_a_model_without_blocks_has_no_share() -> None:
    assert fused_share(nn.Linear(2, 2)) is None
    assert inject_fused_kernels(nn.Linear(2, 2), "reference").fused_share is None
