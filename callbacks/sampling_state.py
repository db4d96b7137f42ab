"""A network in training that computes something else for a while, and goes on as if it had not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_videoscale.timing import unwatched


@contextmanager
def between_steps(trainer: pl.Trainer) -> Iterator[None]:
    """Evaluation without gradients between two training steps; afterwards, also after an error, all is as it was.

    That is the train mode of every module, the default generators of torch (on all devices), NumPy and Python, what
    FSDP2 has gathered, and the figures of those who watch the training.
    """
    module = trainer.lightning_module
    modes = {child: child.training for child in module.modules()}
    with ExitStack() as undo:
        undo.enter_context(unwatched(trainer))
        generators = isolate_rng()
        generators.__enter__()
        undo.callback(generators.__exit__, None, None, None)  # which an exception would keep from restoring them
        undo.callback(_set_modes, modes)
        undo.callback(_free_gathered, module)
        undo.enter_context(torch.no_grad())
        module.eval()
        yield


@contextmanager
def parts_on(device: torch.device, pipeline: Any, module: nn.Module) -> Iterator[None]:
    """Brings a pipeline's other parts, such as VAE and text encoder, to the device, and back to the host afterwards.

    What the module in training contains, or is contained in, stays where it is.
    """
    guests = [part for part in _parts(pipeline) if not _is_shared(part, module)]
    with ExitStack() as undo:
        if device.type == "cuda":
            undo.callback(torch.cuda.empty_cache)  # else what was cached for other shapes stays beside the training's
        for part in guests:
            undo.callback(part.to, "cpu")
            part.to(device).eval()
        yield


@contextmanager
def in_training_precision(trainer: pl.Trainer, pipeline: Any) -> Iterator[None]:
    """Lets the networks in training, and no other part of a pipeline, compute as the Trainer's precision says."""
    with ExitStack() as undo:
        for part in _parts(pipeline):
            if _is_shared(part, trainer.lightning_module):
                _enter_around_calls(part, trainer, undo)
        yield


def seed_everything_for(seed: int) -> None:
    """Seeds the default generators, which some schedulers draw from; the same on all ranks."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _parts(pipeline: Any) -> list[nn.Module]:
    return [part for part in pipeline.components.values() if isinstance(part, nn.Module)]


def _is_shared(part: nn.Module, module: nn.Module) -> bool:
    """Whether a part has a parameter or a submodule of the module in training."""
    return not set(module.modules()).isdisjoint(part.modules())


def _enter_around_calls(network: nn.Module, trainer: pl.Trainer, undo: ExitStack) -> None:
    entered: list[AbstractContextManager[None]] = []

    def enter(*_: Any) -> None:
        entered.append(trainer.precision_plugin.forward_context())
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    undo.callback(network.register_forward_pre_hook(enter, prepend=True).remove)
    undo.callback(network.register_forward_hook(leave, always_call=True).remove)


def _set_modes(modes: dict[nn.Module, bool]) -> None:
    for module, training in modes.items():
        module.training = training


def _free_gathered(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()
