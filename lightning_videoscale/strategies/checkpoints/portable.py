"""How the strategies save and load: one format for all of them, in which everything has its parameter's name.

A checkpoint is a folder, or objects behind a URL (see `folder`). What it holds depends neither on the strategy nor on
the number of ranks, so that any strategy continues what any other has saved. `PortableCheckpoints` serves parameters
that are whole or ``DTensor``; `zero` does the same for ZeRO's.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_videoscale.attention import AttentionChoices
from lightning_videoscale.compat.lightning import is_asynchronous, timeout_of
from lightning_videoscale.parallel import SequenceMesh
from lightning_videoscale.parallel.schedules.choices import ScheduleChoices
from lightning_videoscale.ranks import gather_over_ranks, of_first_rank
from lightning_videoscale.strategies.checkpoints import frozen
from lightning_videoscale.strategies.checkpoints.adapters import only_adapters_train
from lightning_videoscale.strategies.checkpoints.background import BackgroundSaves
from lightning_videoscale.strategies.checkpoints.errors import CheckpointError
from lightning_videoscale.strategies.checkpoints.exceptions import leave_out_after_exceptions
from lightning_videoscale.strategies.checkpoints.fingerprints import Fingerprint
from lightning_videoscale.strategies.checkpoints.first_rank import on_first
from lightning_videoscale.strategies.checkpoints.folder import (
    CheckpointFolder,
    begin,
    open_checkpoint,
    pack,
    shards_of_lightning,
    write_checkpoint,
)
from lightning_videoscale.strategies.checkpoints.networks import describe_networks
from lightning_videoscale.strategies.checkpoints.optimizer_names import ParameterNames, from_names, to_names
from lightning_videoscale.strategies.checkpoints.places import place_of, remove
from lightning_videoscale.strategies.checkpoints.saved_tensors import SavedTensors
from lightning_videoscale.strategies.generators import generator_states, set_generator_states
from lightning_videoscale.strategies.parent import StrategyPart
from lightning_videoscale.strategies.settings import SequenceParallelSettings
from lightning_videoscale.trained_weights import AVERAGES
from lightning_videoscale.undo import Undo
from lightning_videoscale.user_paths import is_url

_OURS = "lightning_videoscale"

_HYPERPARAMETERS = tuple(owner.CHECKPOINT_HYPER_PARAMS_KEY for owner in (pl.LightningModule, pl.LightningDataModule))


class PortableCheckpoints(StrategyPart):
    """Goes before a Lightning strategy in the bases of a class; part of `SequenceParallelMixin`."""

    _seed: int
    _micro_batch: int
    _stream: int
    _settings: SequenceParallelSettings
    _built: WeakKeyDictionary[pl.LightningModule, dict[str, Fingerprint]] | None
    """Fingerprints of what is frozen, of LightningModules whose checkpoints leave it out.

    Made where it is needed: a strategy with ``start_method="spawn"`` is pickled before, and this cannot be.
    """
    _left_out: Mapping[str, Fingerprint]
    """Of the checkpoint that is being saved."""
    _saves: BackgroundSaves | None
    """What writes checkpoints while training goes on, if they are asynchronous."""
    _saves_after_exceptions: Undo
    """Lets callbacks save after exceptions again."""
    _failed: bool
    attention_choices: AttentionChoices
    schedule_choices: ScheduleChoices

    @property
    def mesh(self) -> SequenceMesh:
        """The mesh of ranks."""
        raise NotImplementedError

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # transforms can add parameters, and the precision can widen them

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    # -- saving --------------------------------------------------------------------------------------------------

    def _prepare_saving(self, trainer: pl.Trainer) -> None:
        """Finds out before hours of training what would fail at the first checkpoint; collective."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if self.world_size > 1:
            self._saves_after_exceptions()
            self._saves_after_exceptions = leave_out_after_exceptions(trainer)
        in_background = is_asynchronous(self.checkpoint_io, type(self).__name__)
        # Where the checkpoint of a job that a scheduler ends belongs.
        folders: dict[str, Any] = {"default_root_dir of the Trainer": trainer.default_root_dir}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
            if isinstance(callback, Checkpoint):
                folders[f"dirpath of {type(callback).__name__}"] = getattr(callback, "dirpath", None) or ""
            if in_background and getattr(callback, "save_last", None) == "link":
                raise CheckpointError(
                    "save_last='link' points at a checkpoint before it is whole, as AsyncCheckpointIO() writes it "
                    "later: take save_last=True."
                )
        for name, folder in folders.items():
            if is_url(folder):
                self._try_to_write(name, str(folder))
        if in_background and self._saves is None:
            self._saves = BackgroundSaves(self.root_device, timeout_of(self) or default_pg_timeout)

    def _try_to_write(self, name: str, folder: str) -> None:
        try:
            place = place_of(f"{folder.rstrip('/')}/videoscale-write-test", self.broadcast(secrets.token_hex(8)))
            begin(place)
            on_first(place.discard, "remove what it wrote")
        except CheckpointError as error:
            raise CheckpointError(f"No checkpoints can be kept in {folder}, {name}: {error}") from error

    def _finish_saving(self) -> None:
        """Waits for the checkpoint under way; later ones are written before their save returns. Collective."""
        self._saves_after_exceptions()  # all ranks are here
        saves, self._saves = self._saves, None
        if saves is not None:
            saves.close(self._failed)

    def _note_frozen(self) -> None:
        """To be called when the model is set up, before anything changes what its code has built; collective."""
        module = self._module
        save_frozen = self._settings.save_frozen
        if save_frozen is None:
            save_frozen = not only_adapters_train(module)
        if self._built is None:
            self._built = WeakKeyDictionary()
        if module in self._built or module.trainer.state.fn != TrainerFn.FITTING:
            return
        quantized = frozen.quantized_parameters(module)
        left_out = quantized if save_frozen else frozen.frozen_parameters(module)
        self._built[module] = frozen.fingerprints(left_out, self.root_device)
        if self._built[module]:
            rank_zero_info(
                f"Checkpoints leave out {len(self._built[module])} frozen parameters as long as they stay as they are: "
                "they continue with a model that is built from the same weights. "
                + ("" if save_frozen else f"save_frozen=True would keep {'the others' if quantized else 'them'}.")
                + (f" {len(quantized)} are quantized, which no checkpoint can hold." if quantized else "")
            )

    def _leave_out(self) -> Mapping[str, Fingerprint]:
        """What the checkpoint that is being saved leaves out; collective."""
        module = self._module
        start = {} if self._built is None else self._built.get(module, {})
        self._left_out = frozen.unchanged(start, module, self.root_device) if start else {}
        return self._left_out

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint holds of the model; collective."""
        left_out = self._leave_out()
        return {name: value for name, value in self._module.state_dict().items() if name not in left_out}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns an optimizer's state by parameter name, ``param_groups`` too."""
        # Lightning's base class, as its strategies in between have formats of their own.
        state: dict[str, Any] = Strategy.optimizer_state(self, optimizer)
        return to_names(state, self._names().of(optimizer)) if state else {"state": {}, "param_groups": []}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint, or begins to; collective over all ranks. See `write_checkpoint`, `BackgroundSaves`."""
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} writes checkpoints itself and takes no storage_options=.")
        path, token = self.broadcast((str(filepath), secrets.token_hex(8)))
        place = place_of(path, token)
        if self._left_out:
            checkpoint = frozen.without(checkpoint, self._left_out, self._module)
        rest = dict(checkpoint)
        tensors: dict[str, Any] = {}
        tensors["state_dict"], rest["state_dict"] = _split(self._to_write(checkpoint["state_dict"]))
        if AVERAGES in checkpoint:
            tensors[AVERAGES] = rest.pop(AVERAGES)
        if "optimizer_states" in checkpoint:
            rest["optimizer_states"] = []
            for index, optimizer in enumerate(checkpoint["optimizer_states"]):
                states = {name: _split(values) for name, values in optimizer["state"].items()}
                tensors[f"optimizer_{index}"] = {name: found for name, (found, _) in states.items()}
                others = {name: left for name, (_, left) in states.items()}
                rest["optimizer_states"].append(optimizer | {"state": others})
        rest[_OURS] = {
            "randomness": self._randomness(),
            "attention": self.attention_choices.state_dict(),
            "schedules": self.schedule_choices.state_dict(),
            frozen.LEFT_OUT: {name: fingerprint.to_dict() for name, fingerprint in self._left_out.items()},
            **describe_networks(self._module),
        }
        rest = _whole(_without_modules(rest))
        packed = pack(rest, place) if self.is_global_zero else b""
        # After an exception nobody would wait for what is written in the background.
        if self._saves is not None and self._module.trainer.state.status == TrainerStatus.RUNNING:
            self._saves.save(path, place, tensors, packed)
        else:
            write_checkpoint(place, tensors, packed)

    def _to_write(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Leaves all that is no parameter to rank 0: buffers, such as BatchNorm's statistics, may differ elsewhere.

        Collective. What rank 0 lacks is another rank's share of ZeRO's, whatever hooks have made of its name.
        """
        with_first = set(of_first_rank(list(state)))
        equal = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        return {
            name: value
            for name, value in state.items()
            if self.is_global_zero or name in equal or name not in with_first or isinstance(value, DTensor)
        }

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            (remove if self._saves is None else self._saves.remove)(str(filepath))

    # -- loading -------------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Opens a checkpoint, or reads the single file of a strategy of Lightning's.

        Tensors of the folder are read later, each rank what it needs.

        Args:
            checkpoint_path: The folder, file or URL; rank 0's on all ranks.
            weights_only: False lets the checkpoint bring arbitrary objects, which can run code; load only what you
                trust. Left out, it can not.

        Raises:
            CheckpointError: If it is no checkpoint that can be loaded.
        """
        folder = open_checkpoint(str(self.broadcast(checkpoint_path)), trusted=weights_only is False)
        if not isinstance(folder, CheckpointFolder):
            return folder
        if "state_dict" not in folder.rest:
            raise shards_of_lightning(folder.path)
        checkpoint = dict(folder.rest)
        checkpoint["state_dict"] = folder.tensors("state_dict")
        checkpoint["state_dict"].update(folder.rest["state_dict"])
        if folder.has_averages:
            checkpoint[AVERAGES] = folder.averages()
        for index, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
            for name in folder.sections(f"optimizer_{index}"):
                state = folder.tensors(f"optimizer_{index}", name)
                state.update(optimizer["state"].get(name, {}))
                optimizer["state"][name] = state
        left_out = checkpoint.get(_OURS, {}).get(frozen.LEFT_OUT)
        if left_out:
            frozen.put_back(checkpoint, left_out, self._module, self.root_device)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        saved = SavedTensors.of(checkpoint["state_dict"])
        shards = {name: held for name, held in self._module.state_dict().items() if isinstance(held, DTensor)}
        values = {name: saved.read(name, shards.get(name)) for name in saved}
        self._module.load_state_dict(values, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the optimizers' states and continues the random streams."""
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"The checkpoint has the states of {len(states)} optimizers, and configure_optimizers returns "
                f"{len(self.optimizers)}."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            self._load_optimizer(optimizer, state)
        ours = checkpoint.get(_OURS, {})
        self._restore_randomness(ours.get("randomness"))
        if "attention" in ours:
            self.attention_choices.load_state_dict(ours["attention"])
        if "schedules" in ours:
            self.schedule_choices.load_state_dict(ours["schedules"])

    def _load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(from_names(state, optimizer, self._names()))

    # -- what else is in it --------------------------------------------------------------------------------------

    def _names(self) -> ParameterNames:
        return ParameterNames(self._module)

    def _randomness(self) -> dict[str, Any]:
        """Where the random streams are, and the generators of every data-parallel rank."""
        # Over the job: a checkpoint may be saved when the Trainer's run, and with it the mesh, is closed.
        everyone = gather_over_ranks(generator_states(self.root_device))
        states = [everyone[rank] for rank in self.mesh.dp.ranks]
        return {
            "seed": self._seed,
            "micro_batch": self._micro_batch,
            "stream": self._stream,
            "generators": states,
        }

    def _restore_randomness(self, saved: dict[str, Any] | None) -> None:
        if saved is None:  # a checkpoint of Lightning's
            return
        self._seed, self._micro_batch, self._stream = saved["seed"], saved["micro_batch"], saved["stream"]
        if len(saved["generators"]) == self.mesh.dp.size:
            set_generator_states(saved["generators"][self.mesh.dp.rank], self.root_device)
        else:
            rank_zero_info(
                f"The checkpoint was saved with {len(saved['generators'])} data-parallel ranks and there are "
                f"{self.mesh.dp.size} now: the states of the random generators are not restored. Training steps seed "
                "them anew, from the checkpoint's seed."
            )


def _split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides a dict into its tensors and the rest."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in values.items() if name not in tensors}


def _without_modules(rest: dict[str, Any]) -> dict[str, Any]:
    """Leaves modules out of hyperparameters: code that nothing loads unasked, and hooks that no file can hold."""
    for key in _HYPERPARAMETERS:
        values = rest.get(key)
        if isinstance(values, dict) and (found := [name for name, x in values.items() if isinstance(x, nn.Module)]):
            rank_zero_warn(
                f"The checkpoint leaves the modules {found} out of its hyperparameters; the weights of those in the "
                f"LightningModule are in its state_dict. Say so by save_hyperparameters(ignore={found})."
            )
            rest = rest | {key: {name: x for name, x in values.items() if name not in found}}
    return rest


def _whole(value: Any) -> Any:
    """Assembles the sharded tensors among what callbacks and hooks keep; collective over their ranks."""
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _whole(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_whole(item) for item in value)
    return value
