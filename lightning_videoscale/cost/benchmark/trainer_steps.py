"""Training steps of a Trainer that is set up, after which nothing has been trained."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_videoscale.compat.lightning import before_transfer, call_callbacks
from lightning_videoscale.compat.lightning.unlogged import nothing_logged
from lightning_videoscale.cost.benchmark.grid import Cell, SyntheticBatches, TrainingBatch
from lightning_videoscale.garbage import ShortCollections
from lightning_videoscale.timing import StepTimer, StepTimes
from lightning_videoscale.topology import RunsByGraphs, topology_of


class RealSteps:
    """Forward and backward of the user's module, as its strategy and its precision run them.

    Made by `real_steps`. No optimizer's step is taken but one, before which the weights are kept and after which they
    are put back: an optimizer makes its states in its first step, and without them the peaks would be too low.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._module: pl.LightningModule = trainer.lightning_module
        self._device = trainer.strategy.root_device
        self._timer = StepTimer(trainer)
        self._stateless = _stateless(trainer)
        self._dropped_bytes = 0.0
        self._forward_peak: float | None = None
        takes_index = is_param_in_hook_signature(self._module.training_step, "batch_idx", min_args=2)
        self._index = (0,) if takes_index else ()

    @property
    def exchanges_inside(self) -> bool:
        """Whether a step that does not reduce gradients has collectives, so that no rank alone must leave it."""
        if self._trainer.world_size == 1:
            return False
        is_replicated = isinstance(self._trainer.strategy.model, DistributedDataParallel)
        return not is_replicated or topology_of(self._trainer).sequence_parallel_size > 1

    def make(self, batches: SyntheticBatches, cell: Cell) -> TrainingBatch | None:
        """Makes a batch as the training step receives it; None if it is out of memory, as an encoder may be."""
        try:
            return batches(cell)
        except RuntimeError as error:
            _raise_unless_out_of_memory(error)
            return None

    def fits(self, batch: TrainingBatch) -> bool:
        """Runs one step, without reducing gradients where the strategy can do without; False if out of memory."""
        try:
            with getattr(self._trainer.strategy, "block_backward_sync", nullcontext)():
                self.run(batch)
        except RuntimeError as error:
            _raise_unless_out_of_memory(error)
            return False
        return True

    def run(self, batch: TrainingBatch, is_first: bool = True) -> None:
        """Runs one micro-batch; collective where the strategy's step is.

        Args:
            batch: What `make` returned.
            is_first: Of its step, so that the gradients of the step before are dropped, where Lightning does that:
                between forward and backward.
        """
        trainer, strategy, module = self._trainer, self._trainer.strategy, self._module
        batch = trainer.precision_plugin.convert_input(batch)
        batch = before_transfer(module, batch)
        batch = strategy.batch_to_device(batch, dataloader_idx=0)
        call_callbacks(trainer, "on_train_batch_start", batch, 0)
        output = strategy.training_step(batch, *self._index)
        loss = output["loss"] if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise ValueError(f"training_step returned {output!r} for a synthetic batch; the benchmark needs a loss.")
        if is_first:
            before = self._allocated_bytes
            self._forward_peak = self._forward_peak or self._tensors_peak
            for optimizer in trainer.optimizers:
                module.optimizer_zero_grad(trainer.current_epoch, 0, optimizer)
            self._dropped_bytes = max(0.0, before - self._allocated_bytes)
        strategy.backward(loss, None)
        call_callbacks(trainer, "on_train_batch_end", None, batch, 0)

    def read_times(self) -> list[StepTimes]:
        """The times of the complete steps since the last call; waits for the device."""
        return self._timer.read()

    def make_optimizer_states(self) -> None:
        """Lets optimizers that have never made a step make their states; gradients must be there."""
        with torch.no_grad():
            for optimizer in self._stateless:
                parameters = [_local(p) for group in optimizer.param_groups for p in group["params"]]
                before = [p.to("cpu", copy=True) for p in parameters]
                type(optimizer).step(optimizer)  # the instance's own counts for the learning rate's schedule
                for p, value in zip(parameters, before, strict=True):
                    p.copy_(value)

    def drop_gradients(self) -> None:
        """Leaves the module as it is before the first step of an epoch."""
        for optimizer in self._trainer.optimizers:
            optimizer.zero_grad()
        self._module.zero_grad()

    def free_memory(self) -> None:
        """Clears up after a step that failed, on this rank or on another."""
        self.drop_gradients()
        model = self._trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            # A forward pass that failed leaves this as it was; ranks that differ in it wait for different collectives.
            model.require_forward_param_sync = True
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _allocated_bytes(self) -> float:
        return float(torch.cuda.memory_allocated(self._device)) if self._device.type == "cuda" else 0.0

    def start_bytes(self, later_peak: float | None) -> float | None:
        """Most that a first micro-batch takes in training before gradients of its own are there; None: nobody counts.

        Args:
            later_peak: `peak_bytes` of one with the same samples that was not the first.
        """
        if later_peak is None or self._forward_peak is None:
            return None
        if self._dropped_bytes:
            # With and without gradients of before, the start of backward differs by these alone.
            return later_peak - self._dropped_bytes
        return self._forward_peak + self.graph_bytes

    @property
    def gradient_bytes(self) -> float:
        """Of the gradients that are there."""
        gradients = (p.grad for p in self._module.parameters() if p.grad is not None)
        return float(sum(_local(gradient).nbytes for gradient in gradients))

    def reset_peak(self) -> None:
        """Lets the peak start again."""
        self._forward_peak = None
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def peak_bytes(self) -> float | None:
        """Most that was allocated since `reset_peak`; None where nothing counts it.

        What CUDA graphs keep comes on top: between two replays the allocator takes it for free, and gives it to nobody.
        """
        tensors = self._tensors_peak
        return None if tensors is None else tensors + self.graph_bytes

    @property
    def _tensors_peak(self) -> float | None:
        return float(torch.cuda.max_memory_allocated(self._device)) if self._device.type == "cuda" else None

    @property
    def graph_bytes(self) -> int:
        """Memory that CUDA graphs keep."""
        return self.graph_calls.get("bytes", 0)

    @property
    def until_graphs(self) -> int:
        """How many steps of a shape come before one runs by CUDA graphs; 0 where none does."""
        strategy = self._trainer.strategy
        return strategy.steps_until_graphs if isinstance(strategy, RunsByGraphs) else 0

    @property
    def graph_calls(self) -> dict[str, int]:
        """How the networks ran so far, see `RunsByGraphs`; empty where none runs by graphs."""
        strategy = self._trainer.strategy
        return strategy.describe_graphs() if isinstance(strategy, RunsByGraphs) else {}

    @property
    def capacity_bytes(self) -> float | None:
        """Memory that this process could use; None where there is no such limit."""
        if self._device.type != "cuda":
            return None
        free = torch.cuda.mem_get_info(self._device)[0]
        total = torch.cuda.get_device_properties(self._device).total_memory
        allowed = torch.cuda.get_per_process_memory_fraction(self._device) * total
        return min(float(torch.cuda.memory_reserved(self._device) + free), allowed)

    def close(self) -> None:
        """Takes the clock off, and leaves optimizers without states as they were found."""
        self._timer.close()
        self.free_memory()


@contextmanager
def real_steps(trainer: pl.Trainer) -> Iterator[RealSteps]:
    """Steps outside of the Trainer's loop, after which nothing of the module, its optimizers and draws has changed.

    The Trainer's callbacks see nothing of them, and what the module logs goes nowhere.

    Raises:
        ValueError: If the module optimizes manually: its steps cannot be taken without changing it.
    """
    module: pl.LightningModule = trainer.lightning_module
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__} optimizes manually: its steps cannot be measured without taking them."
        )
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    groups = [[_settings(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
    stateless = _stateless(trainer)
    buffers = [(buffer, buffer.detach().to("cpu", copy=True)) for buffer in map(_local, module.buffers())]
    modes = [(part, part.training) for part in module.modules()]
    trainer.callbacks = []  # type: ignore[attr-defined]  # nobody shall take these steps for training
    steps, collections = RealSteps(trainer), ShortCollections()
    try:
        collections.renew()
        with isolate_rng(include_cuda=trainer.strategy.root_device.type == "cuda"), nothing_logged(module):
            module.train()
            yield steps
    finally:
        collections.end()
        steps.close()
        trainer.callbacks = callbacks  # type: ignore[attr-defined]
        for part, training in modes:
            part.training = training
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for optimizer in stateless:
            optimizer.state.clear()
        for optimizer, settings in zip(trainer.optimizers, groups, strict=True):
            for group, before in zip(optimizer.param_groups, settings, strict=True):
                group.update(before)


def _stateless(trainer: pl.Trainer) -> list[Optimizer]:
    """Optimizers that have not made a step; DeepSpeed's, which are none of torch's, make their states at once."""
    optimizers: list[Any] = trainer.optimizers
    return [optimizer for optimizer in optimizers if isinstance(optimizer, Optimizer) and not optimizer.state]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer knows of a group of parameters, beside the parameters."""
    return copy.deepcopy({name: value for name, value in group.items() if name != "params"})


def _local(x: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x


def _raise_unless_out_of_memory(error: RuntimeError) -> None:
    if not isinstance(error, torch.OutOfMemoryError) and "CUBLAS_STATUS_ALLOC_FAILED" not in str(error):
        raise error
