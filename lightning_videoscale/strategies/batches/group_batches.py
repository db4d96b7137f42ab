"""One batch and one noise for all ranks of a sequence-parallel group, in every loop of the Trainer."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from typing_extensions import override

from lightning_videoscale.compat.lightning.logged_means import leave_out_of_means
from lightning_videoscale.compat.lightning.training_loop import loaders_under_way
from lightning_videoscale.ranks import gather_over_ranks
from lightning_videoscale.strategies.batches.dealt_order import deal_alike
from lightning_videoscale.strategies.batches.group_loader import GroupLoader
from lightning_videoscale.strategies.batches.sharing import BatchSharing
from lightning_videoscale.strategies.generators import seed_generators
from lightning_videoscale.strategies.parent import StrategyPart

_Batch = TypeVar("_Batch")

_HOST_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device")
_DEVICE_HOOKS = ("on_after_batch_transfer",)


class GroupBatches(StrategyPart):
    """Goes before a Lightning strategy in the bases of a class; part of `SequenceParallelMixin`."""

    _sharing: BatchSharing | None
    _seed: int
    _micro_batch: int
    _stream: int
    _loss_weight: float
    _transferred_weight: float | None
    _said_nested: bool
    _backwards: int
    _stepped: dict[int, int]

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's batch stream; equal on all ranks of a sequence-parallel group."""
        raise NotImplementedError

    def share_batch(self, batch: _Batch) -> _Batch:
        """Returns the batch of the first rank of this sequence-parallel group, on every rank of the group."""
        if self._sharing is None:
            return batch
        shared: _Batch = self._sharing.broadcast(0, lambda: batch, to_device=False).wait()
        return shared

    @override
    def process_dataloader(self, dataloader: object) -> object:
        loader = super().process_dataloader(dataloader)
        deal_alike(loader, self._seed_dealing, self.root_device)
        leave_out_of_means(self._module.trainer, self._is_filler)
        if self._sharing is None:
            return loader
        trainer, to_device = self._module.trainer, not _keeps_host_batches(self._module)

        def seed(*place: int | str) -> None:
            self._seed_reading(*place, *self._place_of(reference()))

        def epoch() -> int | None:
            return trainer.current_epoch if trainer.training else None

        group_loader = GroupLoader(
            loader,
            self._sharing,
            seed,
            to_device=to_device,
            ends_together=lambda: self._gathers_in_forward or trainer.training,
            epoch=epoch,
        )
        reference = weakref.ref(group_loader)  # it holds what seeds, and with it its workers
        return group_loader

    @property
    def _gathers_in_forward(self) -> bool:
        """Whether a forward pass waits for other ranks with other batches."""
        return False

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        self._seed_step()
        # Before hooks of the user that make another batch of it; and kept, as a closure may take its step again.
        self._transferred_weight = _loss_weight(batch)
        if self._transferred_weight is None and not self._said_nested and _holds_weights(batch):
            self._said_nested = True
            rank_zero_warn(
                "The batch is no batch of a data plan, but holds some: their meta.loss_weight is not applied. Weigh "
                "their losses by it in training_step."
            )
        batch = super().batch_to_device(batch, device, dataloader_idx)
        return self.share_batch(batch) if _changes_batches(self._module) else batch

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._seed_step()
        self._loss_weight = self._weight_of(args[0] if args else None)
        return super().training_step(*args, **kwargs)

    def _weight_of(self, batch: Any) -> float:
        candidates = _loss_weight(batch), self._transferred_weight
        return next((weight for weight in candidates if weight is not None), 1.0)

    def _is_filler(self, batch: Any) -> bool:
        """Whether the batch under way repeats samples that count elsewhere, to give ranks equally many batches."""
        return self._weight_of(batch) == 0

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._seed_step()
        return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._seed_step()
        return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._seed_step()
        return super().predict_step(*args, **kwargs)

    def _seed_step(self) -> None:
        """Starts a new random stream, so that whatever only some ranks drew before (a callback on rank 0) is undone.

        The place is the number of the training micro-batch, which a checkpoint restores, and how many streams were
        started since (validation batches, for one).
        """
        trainer = self._module.trainer
        micro_batch = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        self._stream = self._stream + 1 if micro_batch == self._micro_batch else 0
        self._micro_batch = micro_batch
        seed_generators(self._seed, str(trainer.state.stage), self.data_parallel_rank, micro_batch, self._stream)

    def _seed_reading(self, *place: int | str) -> None:
        """Seeds what is drawn while batches are read: by samplers, by datasets, by hooks before the transfer."""
        trainer = self._module.trainer
        stage, rank = str(trainer.state.stage), self.data_parallel_rank
        seed_generators(self._seed, "reading", stage, rank, trainer.current_epoch, *place)

    def _place_of(self, loader: GroupLoader | None) -> tuple[int | str, ...]:
        """Which of several loaders of a loop one is, and in which pass of an epoch, so that all draw other numbers.

        Empty for the first pass of the first one.
        """
        numbers = (number for number, each in enumerate(loaders_under_way(self._module.trainer)) if each is loader)
        number, repeats = next(numbers, 0), 0 if loader is None else loader.repeats
        return (*((number,) if number else ()), *(("repeated", repeats) if repeats else ()))

    def _seed_dealing(self) -> None:
        """Seeds an order of which each data-parallel rank takes its part: alike on all of them."""
        trainer = self._module.trainer
        seed_generators(self._seed, "dealing", str(trainer.state.stage), trainer.current_epoch)

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._backwards += 1
        return super().backward(closure_loss * self._loss_weight, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, *args, **kwargs)
        self._refuse_own_backward(optimizer)
        return result

    def _refuse_own_backward(self, optimizer: Optimizer) -> None:
        """A loss that goes backward by itself is not averaged: each rank would have trained on its slice alone.

        But where parameters are gathered in forward, whose gradients are averaged in any backward, or where somebody
        has averaged them, such as those of `torch.autograd.grad`.
        """
        before, self._stepped[id(optimizer)] = self._stepped.get(id(optimizer), 0), self._backwards
        if self._sharing is None or self._gathers_in_forward or self._module.automatic_optimization:
            return
        if self._backwards != before:
            return
        norms = gather_over_ranks(repr(_gradient_norm(optimizer)))
        if len(set(norms)) > 1:
            raise RuntimeError(
                f"{type(optimizer).__name__} has taken a step by gradients that nobody has averaged over the ranks: "
                f"their norms are {', '.join(norms)}. In manual optimization, call self.manual_backward(loss) and not "
                "loss.backward(), and average what torch.autograd.grad returns over all ranks."
            )


def _gradient_norm(optimizer: Optimizer) -> float:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return float(get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]))


def _loss_weight(batch: Any) -> float | None:
    """The weight that the data plan gives the micro-batch, None for a user's own data."""
    meta = batch.get("meta") if isinstance(batch, Mapping) else None
    weight = getattr(meta, "loss_weight", None)
    return None if weight is None else float(weight)


def _holds_weights(batch: Any) -> bool:
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return any(hasattr(part, "loss_weight") or _holds_weights(part) for part in parts)


def _keeps_host_batches(module: pl.LightningModule) -> bool:
    """Whether hooks of the user expect batches in host memory, as they were read."""
    return _overrides(module, _HOST_HOOKS)


def _changes_batches(module: pl.LightningModule) -> bool:
    """Whether hooks of the user run on batches, after which those of a group's ranks might differ."""
    return _overrides(module, (*_HOST_HOOKS, *_DEVICE_HOOKS))


def _overrides(module: pl.LightningModule, hooks: tuple[str, ...]) -> bool:
    owners = (module, getattr(module.trainer, "datamodule", None))
    return any(is_overridden(hook, owner) for hook in hooks for owner in owners)
