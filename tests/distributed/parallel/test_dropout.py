"""Dropout over a split sequence: every token its own mask, every rank the same generators after every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_videoscale.parallel import SequenceMesh, parallelize
from lightning_videoscale.parallel.region_randomness import RegionRandomness
from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from tests.distributed.families.harness import Case, lifted_casts, run
from tests.distributed.families.test_parity import FAMILIES
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, RectifiedFlow

Ranks = Callable[[int], ProcessPool]
NINE_TOKENS = (3, 2, 6)  # uneven over 2 and 4 ranks


class Generators(Callback):
    """Keeps the next number of every global generator after every step."""

    def __init__(self) -> None:
        self.next: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        drawn = [torch.rand(()).item(), np.random.rand(), random.random()]
        if module.device.type == "cuda":
            state = torch.cuda.get_rng_state()
            drawn.append(torch.rand((), device="cuda").item())
            torch.cuda.set_rng_state(state)
        self.next.append(drawn)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


class Dropping(RectifiedFlow):
    """A Wan that drops half of what its attention and feed-forward layers compute, and notes where."""

    def __init__(self) -> None:
        super().__init__(own_noise=True, num_layers=2)
        self.masks: list[Tensor] = []
        for block in self.transformer.blocks:
            for layer in (block.attn1.to_out[1], block.ffn.net[1]):
                assert isinstance(layer, nn.Dropout)
                layer.p = 0.5
                layer.register_forward_hook(self.note)

    def note(self, _: nn.Module, __: Any, out: Tensor) -> None:
        if torch.is_grad_enabled():  # not when the network is looked at before its first call
            self.masks.append((out.detach() == 0).cpu())

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(batch)
        return loss * (1 + 0.01 * torch.rand((), device=loss.device))  # noise that is drawn after the model ran


def train(ulysses: int, ring: int, checkpointing: bool, accelerator: str = "cpu") -> tuple[Any, Any, Any]:
    """Two steps; what the generators would draw next, the masks of this rank, the weights."""
    torch.manual_seed(0)
    module, generators = Dropping(), Generators()
    pl.Trainer(
        strategy=SequenceParallelDDPStrategy(ulysses, ring, activation_checkpointing=checkpointing),
        accelerator=accelerator,
        devices=dist.get_world_size(),
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[generators],
    ).fit(module, DataLoader(Clips(NINE_TOKENS, torch.float32), batch_size=1))
    return generators.next, module.masks, {name: x.cpu() for name, x in module.state_dict().items()}


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), pytest.param(4, 1, marks=pytest.mark.full), (2, 2)])
def test_masks_differ_between_ranks_and_generators_do_not(ranks: Ranks, ulysses: int, ring: int) -> None:
    results = ranks(ulysses * ring).run(train, ulysses, ring, False)
    check(results)


def check(results: list[tuple[Any, Any, Any]]) -> None:
    states, masks, _ = zip(*results, strict=True)
    assert len(states[0]) == 2
    assert states[0][0] != states[0][1]
    assert all(state == states[0] for state in states)
    assert sum(mask[0].shape[1] for mask in masks) == 9
    for layer in range(len(masks[0])):
        of_ranks = [mask[layer] for mask in masks]
        shortest = min(mask.shape[1] for mask in of_ranks)
        rows = torch.cat([mask[:, :shortest].flatten(1) for mask in of_ranks])
        # Independent masks agree in half of their elements, equal ones in all.
        agreement = (rows[:, None] == rows[None]).float().mean(-1)
        assert agreement[~torch.eye(len(rows), dtype=torch.bool)].max() < 0.75
        assert 0.3 < torch.cat([mask.flatten() for mask in of_ranks]).float().mean() < 0.7


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_recomputation_draws_the_same_masks(ranks: Ranks, size: int) -> None:
    plain = ranks(size).run(train, size, 1, False)
    again = ranks(size).run(train, size, 1, True)
    for (states, masks, weights), (states_again, masks_again, weights_again) in zip(plain, again, strict=True):
        assert states_again == states
        assert len(masks_again) == 2 * len(masks) == 16  # two steps of two blocks with two layers, forward and backward
        for step in range(2):
            forward = masks_again[8 * step : 8 * step + 4]
            last_block_first = masks_again[8 * step + 4 : 8 * step + 8]
            backward = last_block_first[2:] + last_block_first[:2]
            assert all(map(torch.equal, forward, backward))
            assert all(map(torch.equal, forward, masks[4 * step : 4 * step + 4]))
        assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


class DropsBehind(nn.Module):
    """As LoRA with dropout: what a layer computes is dropped in part."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return F.dropout(self.layer(*args, **kwargs), 0.5)


def split_and_dropping(family: str, mesh: SequenceMesh, use_reentrant: bool | None) -> tuple[nn.Module, dict[str, Any]]:
    """A model that drops behind the first block's feed-forward, and whose blocks are checkpointed."""
    model: Any = FAMILIES[family].model(Case(family))
    first = (model.blocks if hasattr(model, "blocks") else model.visual_transformer_blocks)[0]
    name = "ffn" if hasattr(first, "ffn") else "feed_forward"
    setattr(first, name, DropsBehind(getattr(first, name)))
    if use_reentrant is not None:
        model.enable_gradient_checkpointing(
            gradient_checkpointing_func=partial(checkpoint, use_reentrant=use_reentrant)
        )
    parallelize(model, mesh)
    return model, FAMILIES[family].inputs(Case(family), 0)


def of_two_passes(family: str) -> list[list[Tensor]]:
    """Gradients of two passes before one backward: without checkpoints, with them, and with reentrant ones."""
    found = []
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh, lifted_casts():
        for use_reentrant in (None, False, True):
            model, inputs = split_and_dropping(family, mesh, use_reentrant)
            torch.manual_seed(6)
            run(model, inputs)  # which is looked at, and counted in its own state
            torch.manual_seed(7)
            of_pass = [
                run(model, inputs | {"hidden_states": inputs["hidden_states"].clone().requires_grad_()})[1]
                for _ in range(2)
            ]
            (of_pass[0] + 2 * of_pass[1]).backward()
            found.append([p.grad for p in model.parameters() if p.grad is not None])
    return found


@pytest.mark.parametrize("family", ["skyreels_v2", pytest.param("kandinsky", marks=pytest.mark.full)])
def test_each_of_two_passes_is_recomputed_with_its_own_masks(ranks: Ranks, family: str) -> None:
    for plain, *checkpointed in ranks(2).run(of_two_passes, family):
        for gradients in checkpointed:
            worst = max(float((a - b).norm() / b.norm()) for a, b in zip(gradients, plain, strict=True) if b.any())
            assert worst < 1e-10


def around_the_network(family: str) -> list[str]:
    said = []
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh, lifted_casts():
        for use_reentrant in (False, True):
            model, inputs = split_and_dropping(family, mesh, None)
            run(model, inputs)

            def called(x: Tensor, model: nn.Module = model, inputs: dict[str, Any] = inputs) -> Tensor:
                return run(model, inputs | {"hidden_states": x})[1]

            x = inputs["hidden_states"].clone().requires_grad_()
            try:
                checkpoint(called, x, use_reentrant=use_reentrant).backward()
            except RuntimeError as error:
                said.append(str(error))
    return said


def test_a_checkpoint_around_a_network_that_drops_is_an_error(ranks: Ranks) -> None:
    for said in ranks(2).run(around_the_network, "wan"):
        assert len(said) == 2 and all("Checkpoint its blocks instead" in each for each in said)


def test_streams_of_a_region() -> None:
    def passes(rank: int, count: int) -> list[float]:
        torch.manual_seed(7)
        randomness, drawn = RegionRandomness(rank), []
        for _ in range(count):
            before = torch.get_rng_state()
            randomness.enter(torch.device("cpu"))
            randomness.enter(torch.device("cpu"))  # a second split input
            drawn.append(torch.rand(()).item())
            randomness.leave()
            assert torch.equal(torch.get_rng_state(), before)
        return drawn

    streams = {rank: passes(rank, 3) for rank in range(3)}
    assert len({number for stream in streams.values() for number in stream}) == 9
    assert passes(1, 2) == streams[1][:2]  # a resumed run draws the same
