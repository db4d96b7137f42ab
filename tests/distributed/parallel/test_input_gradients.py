"""Gradients of what a split network receives: those of one device, on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_videoscale.parallel import SequenceMesh, SplitPlan, check_loss, parallelize
from tests.distributed.pool import ProcessPool
from tests.distributed.summing import sum_over_ranks
from tests.distributed.wan_training import Clips
from tests.models import gradient_error, lifted_float_casts, tiny_wan

Ranks = Callable[[int], ProcessPool]


def gradients(split: bool, checkpointing: bool = False) -> dict[str, Tensor]:
    """Of two steps of a sampler, the second of which starts from what the first returned."""
    with lifted_float_casts():
        network, captions = tiny_wan().double(), torch.nn.Linear(16, 16, bias=False).double()
        torch.nn.init.eye_(captions.weight)
        if checkpointing:
            network.enable_gradient_checkpointing()
        if split:
            parallelize(network, SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()))
        batch = next(iter(DataLoader(Clips((3, 2, 6), torch.float64), batch_size=2)))  # nine tokens: uneven
        noise, text = batch["noise"].requires_grad_(), captions(batch["text"])
        middle = noise - network(noise, batch["time"] * 1000, encoder_hidden_states=text).sample
        end = middle - network(middle, batch["time"] * 500, encoder_hidden_states=text).sample
        loss = (end - batch["latents"]).square().mean()
        check_loss(loss)
        loss.backward()
    assert noise.grad is not None
    parameters = [*network.named_parameters("network"), *captions.named_parameters("captions")]
    found = {name: p.grad for name, p in parameters if p.grad is not None}
    sum_over_ranks(found.values(), mean=True)
    return found | {"noise": noise.grad}


class Remembering(torch.nn.Module):
    """Writes into what it is given, as models with a cache do."""

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        cache["x"] = x
        return x


def keys_of_a_cache() -> list[str]:
    network, cache = Remembering(), {"earlier": torch.ones(2)}
    plan = SplitPlan({}, {}, {}, lambda model, context: lambda: None)
    parallelize(network, SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()), plan)
    network(torch.ones(2), cache=cache)
    return list(cache)


def test_without_gradients_a_model_is_given_the_same_objects(ranks: Ranks) -> None:
    assert ranks(2).run(keys_of_a_cache)[0] == ["earlier", "x"]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_unrolled_sampler_is_exact(ranks: Ranks, checkpointing: bool) -> None:
    whole = ranks(2).run(gradients, False)[0]
    for found in ranks(2).run(gradients, True, checkpointing):
        assert gradient_error(found, whole) < 1e-10
