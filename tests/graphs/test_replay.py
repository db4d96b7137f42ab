"""Gradients of a replayed pass belong to whoever takes them. What a GPU would do here, plain functions do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_videoscale.compat.torch.trees import tree_flatten
from lightning_videoscale.graphs.capture import CapturedPass, Segment
from lightning_videoscale.graphs.replay import Tenancy, replay


class Work:
    """The same work on the same memory, as often as it is replayed."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.replay = work


class Product(nn.Module):
    """The sum over ``x * weight``, from one pass to the next in the same memory."""

    def __init__(self, lends: bool = False) -> None:
        super().__init__()
        self._lends = lends
        self.weight = nn.Parameter(torch.ones(3))
        x, out, gradient, of_weight = (torch.zeros(3) for _ in range(4))
        forward: Any = Work(lambda: out.copy_(x * self.weight.detach()))
        backward: Any = Work(lambda: of_weight.copy_(gradient * x))
        leaves, structure = tree_flatten((out,))
        self.pool = of_weight
        segments = [Segment(backward, [self.weight], [of_weight])]
        self._captured = CapturedPass([x], forward, leaves, structure, [gradient], segments, [None])
        self._tenancy = Tenancy()

    def forward(self, x: float) -> Tensor:
        (out,) = replay(self._captured, [torch.full((3,), x)], self._tenancy, self._lends)
        total: Tensor = out.sum()
        return total


@pytest.fixture
def product() -> Product:
    return Product()


def test_gradients_that_are_returned_stay_as_they_are(product: Product) -> None:
    (first,) = torch.autograd.grad(product(1.0), [product.weight])
    (second,) = torch.autograd.grad(product(5.0), [product.weight])
    assert (first.tolist(), second.tolist()) == ([1.0] * 3, [5.0] * 3)


def test_a_hook_may_keep_gradients(product: Product) -> None:
    kept: list[Tensor] = []
    product.weight.register_hook(kept.append)
    for x in (1.0, 7.0):
        product(x).backward()
    assert [x.tolist() for x in kept] == [[1.0] * 3, [7.0] * 3]


def test_accumulated_gradients_have_memory_of_their_own(product: Product) -> None:
    product(2.0).backward()
    gradient = product.weight.grad
    product(3.0).backward()
    assert gradient is not None
    assert gradient.tolist() == [5.0] * 3
    assert gradient.data_ptr() != product.pool.data_ptr()


def test_gradients_are_not_copied_where_they_are_added_up(product: Product) -> None:
    seen: list[int] = []
    accumulate: Any = torch.autograd.graph.get_gradient_edge(product.weight).node
    accumulate.register_prehook(lambda gradients: seen.append(gradients[0].data_ptr()))
    product(2.0).backward()
    product(2.0).backward(inputs=[product.weight])
    assert seen == [product.pool.data_ptr()] * 2


class Copies(TorchDispatchMode):
    """Counts what copies gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(op)] += 1
        return op(*args, **(kwargs or {}))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("lends", [False, True])
def test_lent_gradients_are_copied_once_into_buckets(lends: bool) -> None:
    product = Product(lends)
    network = DistributedDataParallel(product, gradient_as_bucket_view=True)
    places = list[int]()
    for x in (2.0, 5.0, 4.0):
        network.zero_grad()
        loss = network(x)
        with Copies() as copies:
            loss.backward()
        gradient = product.weight.grad
        assert gradient is not None and gradient.tolist() == [x] * 3
        assert copies.counts["aten.mul.out"] == 1, "into the bucket"
        assert copies.counts["aten.clone.default"] + copies.counts["aten.new_empty_strided.default"] == (not lends)
        places.append(gradient.data_ptr())
    assert places[1] == places[2] != product.pool.data_ptr(), "in the bucket, which is another one in the first step"


@pytest.mark.usefixtures("group")
def test_what_nobody_has_copied_is_copied_when_backward_ends() -> None:
    product = Product(lends=True)
    network = DistributedDataParallel(product, gradient_as_bucket_view=True)
    with network.no_sync():
        network(2.0).backward()
        kept = product.weight.grad
        assert kept is not None and kept.data_ptr() != product.pool.data_ptr()
        network(3.0).backward()
    assert kept.tolist() == [5.0] * 3
    network(4.0).backward()
    assert product.weight.grad is not None and product.weight.grad.tolist() == [9.0] * 3
    product.zero_grad()
    product(6.0).backward()  # beside DDP
    product(1.0).backward()
    assert product.weight.grad.tolist() == [7.0] * 3


def test_who_sees_a_gradient_that_was_added_may_keep_it() -> None:
    product, kept = Product(lends=True), list[Tensor]()

    def keep(weight: Tensor) -> None:
        assert weight.grad is not None
        kept.append(weight.grad)
        weight.grad = None

    product.weight.register_post_accumulate_grad_hook(keep)
    for x in (1.0, 7.0):
        product(x).backward()
    assert [x.tolist() for x in kept] == [[1.0] * 3, [7.0] * 3]


def product_of_two() -> tuple[Tensor, list[nn.Parameter]]:
    """The sum over ``x * first * second`` of one replay, whose backward has two segments."""
    first, second = (nn.Parameter(torch.full((3,), value)) for value in (2.0, 3.0))
    x, out, gradient, of_first, of_second = (torch.zeros(3) for _ in range(5))
    forward: Any = Work(lambda: out.copy_(x * first.detach() * second.detach()))
    late: Any = Work(lambda: of_second.copy_(gradient * x * first.detach()))
    early: Any = Work(lambda: of_first.copy_(gradient * x * second.detach()))
    segments = [Segment(late, [second], [of_second]), Segment(early, [first], [of_first])]
    leaves, structure = tree_flatten((out,))
    captured = CapturedPass([x], forward, leaves, structure, [gradient], segments, [None])
    (result,) = replay(captured, [torch.ones(3)], Tenancy())
    return result.sum(), [first, second]


def test_a_backward_that_stops_halfway_is_the_only_one() -> None:
    """Its layers have freed their activations: as for a weight between two losses, by gradients of the last layer."""
    loss, (first, second) = product_of_two()
    (of_second,) = torch.autograd.grad(loss, [second], retain_graph=True)
    assert of_second.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="only some gradients"):
        loss.backward()
    loss, (first, second) = product_of_two()
    loss.backward()
    assert first.grad is not None and second.grad is not None
    assert (first.grad.tolist(), second.grad.tolist()) == ([3.0] * 3, [2.0] * 3)
