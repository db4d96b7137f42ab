"""Lightning's strategies, checkpoints, hooks and signals, read in 2.6.6; `training_loop` has its loop.

Classes stand between a strategy of Lightning's and ours, where Lightning calls a private method that we change.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_videoscale.compat.names import Package

LIGHTNING = Package("lightning", "2.6.6")

FETCH_ACTION = "[_TrainingEpochLoop].train_dataloader_next"
"""What the training loop tells the profiler before it asks the loader for a batch; no hook comes so early."""

WRAPPED_SAMPLERS = ("_batch_sampler", "_sampler")
"""The attributes in which Lightning's wrappers keep a user's sampler."""


# -- strategies --------------------------------------------------------------------------------------------------------


class LaunchedStrategy(ParallelStrategy):
    """With a public method that looks at the launcher before Lightning does; the parent makes it in a private one."""

    def check_launcher(self) -> None:
        """Called when the Trainer has made the launcher of the processes."""

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self.check_launcher()


def is_interactive() -> bool:
    """Whether Lightning takes this process for a notebook or a prompt, where it refuses scripts' launchers."""
    return bool(LIGHTNING.get("lightning.pytorch.trainer.connectors.accelerator_connector", "_IS_INTERACTIVE"))


def leave_precision_to(check: Callable[[Any, str], bool]) -> None:
    """Lets a function check the precision of a Trainer before Lightning does; for the whole process.

    Lightning compares the precision with what *its* strategies support, for objects of their subclasses too, and a
    strategy has no say in it.

    Args:
        check: Called with a Trainer's strategy and the precision, such as ``"64-true"``. True leaves nothing to
            Lightning, as for a strategy that is chosen by name. It may raise.
    """
    connector = LIGHTNING.get("lightning.pytorch.trainer.connectors.accelerator_connector", "_AcceleratorConnector")
    parents = LIGHTNING.get(connector, "_validate_precision_choice")

    def validate(self: Any) -> None:
        given = LIGHTNING.get(self, "_strategy_flag")
        by_name = check(self.strategy, LIGHTNING.get(self, "_precision_flag"))
        try:
            self._strategy_flag = type(given).__name__ if by_name else given
            parents(self)
        finally:
            self._strategy_flag = given

    LIGHTNING.put(connector, "_validate_precision_choice", validate)


class WrappingDDPStrategy(DDPStrategy):
    """Lightning's, with a public method that wraps the model; the parent calls a private one."""

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        """Returns the wrapped model.

        The parent of 2.6.6 makes it on a stream of its own, for who captures whole steps. Gradients are accumulated on
        that stream then, and each of them waits for the other stream (Lightning-AI/pytorch-lightning#21567).
        """
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **ddp_arguments(self))

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return self.wrap(model)


class SettledDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning's, with public methods in the place of two private ones that the parent calls."""

    @override
    def _auto_select_batch_size(self) -> int:
        # The parent builds a dataloader to ask for its batch size, which loaders with sizes that vary cannot tell.
        return 1

    def initialize_inference(self, model: nn.Module) -> None:
        """Makes DeepSpeed's engine for loops that do not train; starts with removing all hooks of the model."""
        super()._initialize_deepspeed_inference(model)

    @override
    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        self.initialize_inference(model)


def ddp_arguments(strategy: DDPStrategy) -> dict[str, Any]:
    """Returns the keyword arguments that a strategy hands to ``DistributedDataParallel``."""
    arguments: dict[str, Any] = LIGHTNING.get(strategy, "_ddp_kwargs")
    return arguments


def comm_state_of(strategy: DDPStrategy) -> object | None:
    """Returns what a strategy hands to DDP's communication hook beside the buckets."""
    state: object | None = LIGHTNING.get(strategy, "_ddp_comm_state")
    return state


def timeout_of(strategy: Any) -> timedelta | None:
    """Returns how long a strategy lets a collective wait; its constructor takes it and nothing returns it."""
    timeout: timedelta | None = LIGHTNING.get(strategy, "_timeout")
    return timeout


def set_up_processes(strategy: Any) -> None:
    """Starts the process group of a ``ModelParallelStrategy``, whose ``setup_environment`` would make a mesh too."""
    LIGHTNING.get(strategy, "_setup_distributed")()


def set_up_deepspeed_processes(strategy: DeepSpeedStrategy) -> None:
    """Starts DeepSpeed's process group, which the parent's ``setup_distributed`` does on GPUs only."""
    LIGHTNING.get(strategy, "_init_deepspeed_distributed")()


def set_device_mesh(owner: Any, mesh: DeviceMesh) -> None:
    """Sets what ``device_mesh`` of a LightningModule or a ``ModelParallelStrategy`` returns, which is read-only."""
    LIGHTNING.put(owner, "_device_mesh", mesh)


def layer_sync_of(strategy: ParallelStrategy) -> LayerSync | None:
    """Returns what ``Trainer(sync_batchnorm=True)`` has a strategy do, which not all of Lightning's look at."""
    layer_sync: LayerSync | None = LIGHTNING.get(strategy, "_layer_sync")
    return layer_sync


def optimizers_to_device(optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Moves the states of optimizers, as the parent's ``setup`` does, of which we use parts."""
    LIGHTNING.get("lightning.fabric.utilities.optimizer", "_optimizers_to_device")(optimizers, device)


def launched_processes(launcher: Any) -> Sequence[subprocess.Popen[bytes]]:
    """Returns the processes that rank 0 of a node started, as only its launcher knows; none under another."""
    by_script = LIGHTNING.get("lightning.pytorch.strategies.launchers.subprocess_script", "_SubprocessScriptLauncher")
    processes: Sequence[subprocess.Popen[bytes]] = launcher.procs if isinstance(launcher, by_script) else ()
    return processes


def has_fitted_elsewhere(launcher: Any) -> bool:
    """Whether a launcher's processes have fitted, which end with each run, as from notebooks; only it notes that."""
    per_run = LIGHTNING.get("lightning.pytorch.strategies.launchers.multiprocessing", "_MultiProcessingLauncher")
    return isinstance(launcher, per_run) and bool(LIGHTNING.get(launcher, "_already_fit"))


def end_observation(launcher: Any) -> bool:
    """Ends Lightning's thread that kills rank 0, in mid-sentence, once a process that rank 0 started has failed.

    The thread looks at the launcher's list every five seconds and ends where that is empty.

    Returns:
        Whether there were such processes. `launched_processes` still knows them.
    """
    processes = list(launched_processes(launcher))
    if processes:
        launcher.procs.clear()  # this list is the thread's, too
        launcher.procs = processes
    return bool(processes)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def is_asynchronous(plugin: Any, strategy: str) -> bool:
    """Whether a strategy that writes checkpoints itself was given Lightning's `AsyncCheckpointIO`.

    Args:
        plugin: The strategy's ``checkpoint_io``.
        strategy: Its name, for messages.

    Raises:
        ValueError: If it was given another plugin, which would never be asked.
    """
    inner, is_async = plugin, isinstance(plugin, AsyncCheckpointIO)
    while is_async and isinstance(inner, AsyncCheckpointIO):
        inner = inner.checkpoint_io
    if type(inner) is not TorchCheckpointIO:
        raise ValueError(
            f"{strategy} writes checkpoints itself and would not ask the plugin {type(inner).__name__}: leave it out. "
            "AsyncCheckpointIO() is taken, and means that training goes on while they are written."
        )
    return is_async


def find_last_checkpoints_by_url() -> None:
    """Lets ``ckpt_path="last"`` find checkpoints behind URLs; for the process.

    ModelCheckpoint looks for them on the local disk, without their scheme, and trains from scratch. No hook comes
    before.
    """
    parents = LIGHTNING.get(ModelCheckpoint, "_find_last_checkpoints")
    if getattr(parents, "by_url", False):
        return

    def find(self: ModelCheckpoint, trainer: pl.Trainer) -> set[str]:
        folder = LIGHTNING.get(self, "_ModelCheckpoint__resolve_ckpt_dir")(trainer)
        files, _ = url_to_fs(str(folder))
        # It had none of a folder that follows from the Trainer's, which `setup` will set.
        LIGHTNING.put(self, "_fs", files)
        found: set[str] = parents(self, trainer)
        return found if isinstance(files, LocalFileSystem) else {files.unstrip_protocol(path) for path in found}

    find.by_url = True  # type: ignore[attr-defined]  # not twice
    LIGHTNING.put(ModelCheckpoint, "_find_last_checkpoints", find)


# -- batches and hooks -------------------------------------------------------------------------------------------------


def before_transfer(module: pl.LightningModule, batch: Any) -> Any:
    """Returns a batch after the user's ``on_before_batch_transfer``, of the DataModule where it has one."""
    return LIGHTNING.get(module, "_on_before_batch_transfer")(batch, dataloader_idx=0)


def transferred(module: pl.LightningModule, batch: Any, device: torch.device) -> Any:
    """Returns a batch on the device, after the user's hooks on its way there and ``on_after_batch_transfer``."""
    return LIGHTNING.get(module, "_apply_batch_transfer_handler")(batch, device=device)


def call_callbacks(trainer: pl.Trainer, hook: str, *arguments: Any) -> None:
    """Calls a hook of all callbacks of a Trainer; in public only its loops do."""
    LIGHTNING.get("lightning.pytorch.trainer.call", "_call_callback_hooks")(trainer, hook, *arguments)


def first_place(trainer: pl.Trainer) -> int:
    """Returns where in ``trainer.callbacks`` one belongs that comes before all others.

    A search for a learning rate puts a list of its own there, and later asks the first of it what it has found.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    search = LIGHTNING.get("lightning.pytorch.tuner.lr_finder", "_LRCallback")
    return int(bool(callbacks) and isinstance(callbacks[0], search))


def rewinds_weights(callback: ModelPruning) -> bool:
    """Whether a callback that prunes also sets weights back to their first values, as it does by default."""
    return bool(LIGHTNING.get(callback, "_use_lottery_ticket_hypothesis"))


def users_batch_sampler(sampler: Any) -> Any:
    """Returns the batch sampler in Lightning's recorder of indices, or the sampler itself."""
    return LIGHTNING.get(sampler, "_batch_sampler") if _is_recorder(sampler) else sampler


def recorded_indices(loader: Any) -> Iterator[Any]:
    """Advances Lightning's record of which samples a batch holds, which writers of predictions ask for."""
    recorder = getattr(loader, "batch_sampler", None)
    return iter(recorder) if recorder is not None and _is_recorder(recorder) else iter(())


def _is_recorder(sampler: Any) -> bool:
    return isinstance(sampler, LIGHTNING.get("lightning.pytorch.overrides.distributed", "_IndexBatchSamplerWrapper"))


# -- signals -----------------------------------------------------------------------------------------------------------


def replace_signal_handlers(
    trainer: pl.Trainer, on_sigterm: Callable[[], None], on_requeue: Callable[[], None]
) -> Callable[[], None]:
    """Gives a Trainer other handlers, which it registers when a run begins; a user's own for SIGTERM stays beside.

    Lightning's begin collectives wherever a rank is then: a broadcast on SIGTERM, a checkpoint on SLURM's signal.

    Args:
        trainer: Before its handlers are registered.
        on_sigterm: Called on SIGTERM.
        on_requeue: Called on the signal that ``SLURMEnvironment(requeue_signal=)`` names.

    Returns:
        What Lightning does on the latter: saves a checkpoint on all ranks and has SLURM queue the job again.
    """
    connector = LIGHTNING.get(trainer, "_signal_connector")
    save_and_requeue = LIGHTNING.get(type(connector), "_slurm_sigusr_handler_fn")
    LIGHTNING.put(connector, "_sigterm_notifier_fn", lambda *_: on_sigterm())
    LIGHTNING.put(connector, "_slurm_sigusr_handler_fn", lambda *_: on_requeue())
    return lambda: save_and_requeue(connector, signal.SIGUSR1, None)


def note_sigterm(trainer: pl.Trainer) -> None:
    """Makes ``trainer.received_sigterm`` true."""
    LIGHTNING.put(LIGHTNING.get(trainer, "_signal_connector"), "received_sigterm", True)


def scheduler_checkpoint(trainer: pl.Trainer) -> str:
    """Returns where the next checkpoint of a job that a scheduler ends belongs, for ``ckpt_path="hpc"``."""
    path: str = LIGHTNING.get(trainer, "_checkpoint_connector").hpc_save_path(trainer.default_root_dir)
    return path
