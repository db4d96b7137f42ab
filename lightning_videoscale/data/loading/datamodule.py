"""Balanced batches of videos, images or latents behind a LightningDataModule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_videoscale.compat.lightning.training_loop import asks_for_training_loader, forget_training_loader
from lightning_videoscale.compat.patching import patch
from lightning_videoscale.cost import Calibration, StepTimeModel
from lightning_videoscale.cost.geometry import GEOMETRIES, ModelGeometry
from lightning_videoscale.data.encoding.online_encoder import BatchEncoder, check_encoder
from lightning_videoscale.data.loading import data_warnings
from lightning_videoscale.data.loading.consistency import (
    check_same_draws,
    check_same_index,
    check_same_plan,
    contents_of,
    digest_of,
    drawn_by,
)
from lightning_videoscale.data.loading.indexed_shards import IndexedShards, Shards
from lightning_videoscale.data.loading.loader import PlannedLoader, PlannedSampler
from lightning_videoscale.data.loading.run_budget import BudgetArgument, RunBudget
from lightning_videoscale.data.loading.synthetic_batches import RepresentativeBatches
from lightning_videoscale.data.loading.trainer import (
    TrainerPosition,
    apply_loss_weights,
    micro_batches_of,
    rank_and_size,
    reload_every_epoch,
    replan,
    resumed,
    running,
)
from lightning_videoscale.data.loading.window_follower import follow
from lightning_videoscale.data.loading.without_trainer import SamplerWithoutTrainer
from lightning_videoscale.data.loading.worker_ledger import WorkerLedger
from lightning_videoscale.data.planning import Balance, BucketPlanner, LossNormalization, LossUnit, SampleTable
from lightning_videoscale.data.planning.plan import check_settings
from lightning_videoscale.data.planning.shapes import Media, ShapePolicy
from lightning_videoscale.data.planning.stream import dataset_sizes, draws_before
from lightning_videoscale.data.planning.windows import EpochWindows
from lightning_videoscale.data.shards.index import ShardIndex
from lightning_videoscale.data.shards.patterns import Patterns


class VideoDataModule(pl.LightningDataModule):
    """Balanced batches from WebDataset shards, the same plan on every rank.

    A sample of a shard is one video, image or latents (``<key>.mp4``, ``<key>.jpg``, ``<key>.latents.npy`` (C, F, H,
    W)), a caption ``<key>.txt``, and any further members, which pass through. A batch is a dict: ``latents`` (B, C, F,
    H, W) float32 or ``video`` (B, 3, F, H, W) uint8, ``caption`` (list[str]), ``sample_ids`` (list[str]), ``meta``
    (`BatchMeta`) and the further members by name (``mask.npy`` is ``mask``). All samples of a batch have one shape; B
    follows from ``budget`` (AdaptiveLoad, equation 2). Every sample is in exactly one batch per epoch, every epoch is
    another permutation, and every data-parallel rank has equally many batches.

    A checkpoint keeps what of the epoch is done. A run goes on from there on any number of ranks, with any number of
    workers, and every sample is in exactly one step of the epoch all the same; so does a Trainer that fits again.

    Validation and prediction batches are the same every time, but do not keep the shards' order: each has one shape. If
    ranks would have unequally many, one batch is read again with ``meta.loss_weight`` 0.

    Args:
        shards: Tar files to train on: a path, a pattern such as ``clips/{000..099}.tar`` or ``clips/*.tar``, a list; or
            several datasets, pattern by pattern with the weight that each is drawn with. A folder of videos and images
            is packed into shards first, see `packed_folder`.
        index: Where the table of all samples is kept. None: beside the first shard.
        balance: ``planned``: every rank's step costs the same. ``dual_constraint``: each rank draws alone, batches
            within memory and compute. ``equal_token``: each rank draws alone, batches within memory.
        budget: Memory and compute that a micro-batch may take. ``auto``: found when ``fit`` begins, see `AutoBudget`.
            Batches that nothing is trained on then hold no more tokens than the longest of them.
        val_shards: Tar files to validate on, likewise. None: no validation.
        predict_shards: Tar files to predict on, likewise.
        micro_batches: Micro-batches per optimizer step and rank. None: the Trainer's ``accumulate_grad_batches``, or 1
            without a Trainer. A number must equal the Trainer's.
        geometry: The model's VAE and patches, by the name of its family or by their factors.
        shape_policy: Which frames and pixels of a video or an image are read, drawn anew every epoch. Latents are read
            whole.
        step_time: Predicts the cost that is balanced. None: what ``budget="auto"`` has measured, else the FLOPs of the
            transformer in the LightningModule; where none tells its size, the cost that the budget predicts.
        loss_weighting: ``sample``: every sample of a step weighs the same in the gradient, whatever the batch sizes.
            ``token``: every token does. ``none``: every micro-batch does, as in plain DDP.
        loss_normalization: ``step``: a step's gradient is the mean over its samples (or tokens), as of one big batch;
            a sample of a step of many then counts less. ``epoch``: it is their sum over what a step has on average;
            no sample of the epoch counts less, and steps of many samples have larger gradients.
        seed: Seed of all draws.
        shard_window: Shards that samples are shuffled over at a time.
        min_diversity: Different shapes in a step over how many random draws would have, in [0, 1], however unequal the
            ranks' costs become; see `BucketPlanner`. None: equal costs go first.
        window: Clips that are planned at a time, in memory that grows with them instead of the epoch; the next are
            planned in the background while these train. How many batches an epoch has is then an estimate, which every
            window corrects. None: an epoch is planned as a whole.
        num_workers: Processes per rank that read ahead, and share the samples of each batch of videos or images. 0
            reads in the training process.
        encode: Makes latents of videos, embeddings of captions, or anything of a user's own, on the device that trains
            and once per sequence-parallel group; see `OnlineEncoder`. None: batches stay as they were read.
        caption_key: Field of ``<key>.json`` that holds the caption; it goes before ``<key>.txt``. None: ``.txt``, or
            where that is missing or empty, the field ``caption``, ``text``, ``prompt`` or ``description``.
        captions: Table of captions of the folders, as of `videoscale pack --captions`. None: ``metadata.csv`` and the
            like in each folder, or the text beside each file.
    """

    def __init__(
        self,
        shards: Shards,
        index: str | Path | None = None,
        balance: Balance = "planned",
        budget: BudgetArgument = "auto",
        *,
        val_shards: Patterns | None = None,
        predict_shards: Patterns | None = None,
        micro_batches: int | None = None,
        geometry: str | ModelGeometry = "wan2.1",
        shape_policy: ShapePolicy | None = None,
        step_time: StepTimeModel | None = None,
        loss_weighting: LossUnit = "sample",
        loss_normalization: LossNormalization = "step",
        seed: int = 0,
        shard_window: int = 64,
        min_diversity: float | None = None,
        window: int | None = None,
        num_workers: int = 0,
        encode: BatchEncoder | nn.Module | None = None,
        caption_key: str | None = None,
        captions: str | Path | None = None,
    ) -> None:
        super().__init__()
        if isinstance(geometry, str) and geometry not in GEOMETRIES:
            raise ValueError(f"geometry={geometry!r} is none of {sorted(GEOMETRIES)}; give a ModelGeometry instead.")
        check_settings(balance=balance, micro_batches=micro_batches, shard_window=shard_window,
                       min_diversity=min_diversity, window=window, loss_weighting=loss_weighting,
                       loss_normalization=loss_normalization, seed=seed)  # fmt: skip
        others = {"val_shards": val_shards, "predict_shards": predict_shards}
        self._shards = IndexedShards(shards, others, index, caption_key, captions)
        self._budget = RunBudget(budget, step_time)
        self._micro_batches = micro_batches
        self._geometry = GEOMETRIES[geometry] if isinstance(geometry, str) else geometry
        check_encoder(encode, self._geometry)
        self._shape_policy = shape_policy if shape_policy is not None else ShapePolicy()
        self._loss_weighting: LossUnit = loss_weighting
        self._settings: dict[str, Any] = {
            "balance": balance, "loss_normalization": loss_normalization, "seed": int(seed),
            "shard_window": int(shard_window), "min_diversity": min_diversity,
        }  # fmt: skip
        self._window = None if window is None else int(window)
        self._windows: EpochWindows | None = None  # of the shards to train on, where they are planned in windows
        self._num_workers = num_workers
        self._encode = encode
        self._sampler: PlannedSampler | None = None
        self._position: TrainerPosition | None = None  # in the sampler's epoch
        self._contents: dict[str, str] = {}  # of the shards that the sampler plans
        self._state: Mapping[str, Any] | None = None
        self._restored_by: pl.Trainer | None = None  # whose fit has brought the state; None: nobody's, or it has begun
        self._validates = val_shards is not None or type(self).val_dataloader is not VideoDataModule.val_dataloader
        self._leave_validation_out()

    def _leave_validation_out(self) -> None:
        """Lightning validates unless the hook is its own: an empty list would be a warning in every run."""
        if not self._validates:
            patch(self, "val_dataloader", super().val_dataloader)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In another process the hook would be found by its name, and be this class's."""
        vars(self).update(state)
        self._leave_validation_out()

    def prepare_data(self) -> None:
        """Packs folders, indexes the shards once per node and keeps the table, for the other ranks and the next run."""
        self._shards.build(workers=max(1, self._num_workers))

    def setup(self, stage: str) -> None:
        """Reads the index as it is now, and says what of the shards is left alone."""
        if stage == "fit" and (self._sampler is not None or self._restored_by not in (None, self.trainer)):
            if not (same := self._position is not None and self._position.trainer is self.trainer):
                self._budget.begin_anew()  # another Trainer begins at the beginning
            self._state = VideoDataModule.state_dict(self) if same else None  # of a subclass it may be within others
            self._sampler, self._position, self._restored_by = None, None, None
        if not self._shards.read(self._shape_policy.fps, self.trainer):
            return
        if self._window is not None:
            shuffle = self._settings["seed"], self._settings["shard_window"]
            self._windows = self._shards.windows(self._window, self._shape_policy, self._geometry, *shuffle)
        for argument in self._shards.arguments:
            table = self._table(argument)
            windows = self._windows if argument == "shards" else None
            data_warnings.warn_of_shapeless(self._shards.index(argument), table, windows)
            if self._budget.training is not None:
                data_warnings.warn_of_oversized(table, self._budget.training)

    def train_dataloader(self) -> PlannedLoader:
        """Batches of this rank; a new plan every epoch. Whoever only asks how many there are changes nothing.

        Raises:
            ValueError: If the Trainer accumulates another number of micro-batches, or a checkpoint was made with other
                shards. Each message names the fix.
        """
        contents = contents_of(self._shards.index("shards"))
        trainer = self.trainer
        micro_batches_of(trainer, self._micro_batches)  # an error before a minute is spent on measuring
        data_warnings.warn_of_geometry(self._geometry, trainer)
        overfit = trainer is not None and trainer.overfit_batches > 0  # type: ignore[attr-defined]  # set by a connector
        make = partial(self._planner, "shards", is_training=True)
        if (found := self._budget.find(trainer, make, self.training_shapes, self.matrix_file)) is not None:
            data_warnings.warn_of_oversized(self._table("shards"), found)
        planner, progress, position = make(), None, None
        if trainer is not None and trainer.training and not overfit:  # else somebody only looks at what would come
            if self._sampler is not None:
                self._state = VideoDataModule.state_dict(self)  # this run has gone on from there
            if self._state:
                if not self._state.get("is_over"):
                    check_same_index(self._state["shards"], contents)
                    check_same_draws(self._state.get("drawn_by", {}), drawn_by(self._settings, self._shards.weights))
                progress = resumed(trainer, planner, self._state)
            position = TrainerPosition(trainer, self._state["total"] if self._state else None)
        kind = SamplerWithoutTrainer if trainer is None else PlannedSampler
        sampler: PlannedSampler
        begin = None if position is None else lambda _: self._begin(sampler, position, contents)
        rank, epoch = rank_and_size(trainer)[0], 0 if trainer is None else trainer.current_epoch
        sampler = kind(planner, rank, repeat_first_epoch=overfit, progress=progress, epoch=epoch, on_begin=begin)
        if trainer is not None:
            apply_loss_weights(trainer)
            draws_shapes = planner.redraw is not None and self._shape_policy.draws_shapes
            if progress is not None or self._shards.weights is not None or draws_shapes or self._windows is not None:
                reload_every_epoch(trainer)  # the next ones have another number of steps
        is_under_way = self._position is not None and self._position.has_begun
        if trainer is None or (trainer.training and not is_under_way and asks_for_training_loader(trainer)):
            self._track(None if overfit else sampler, position, contents)
        return self._loader("shards", sampler)

    def _begin(self, sampler: PlannedSampler, position: TrainerPosition, contents: dict[str, str]) -> None:
        """Only here is it known that the Trainer reads a sampler: others may have asked for loaders meanwhile."""
        if position.trainer.training and sampler is not self._sampler:
            self._track(sampler, position, contents)
        position.begin(sampler.progress)

    def _track(
        self, sampler: PlannedSampler | None, position: TrainerPosition | None, contents: dict[str, str]
    ) -> None:
        """Keeps the state of a sampler from now on."""
        self._sampler, self._position, self._contents = sampler, position, contents
        if sampler is not None and position is not None:
            follow(position.trainer, sampler)
            position.join(sampler.progress)
            if self._loss_weighting == "sample":
                data_warnings.say_uneven(sampler.plan)
        if self._shards.weights is not None:
            data_warnings.say_passes(0 if sampler is None else sampler.progress.epoch, self.passes())

    def val_dataloader(self) -> PlannedLoader:
        """Validation batches of this rank, the same ones every time. Needs ``val_shards``."""
        return self._ordered_loader("val_shards")

    def predict_dataloader(self) -> PlannedLoader:
        """Batches of this rank to predict on. Needs ``predict_shards``."""
        return self._ordered_loader("predict_shards")

    def state_dict(self) -> dict[str, Any]:
        """Returns what of the epoch is done, the same on every rank; nothing outside of training."""
        if self._sampler is None or self._position is None:
            is_fit = self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
            return dict(self._state or ({"has_begun": False} if is_fit else {}))  # an empty one would not be loaded
        trained = self._position.now(self._sampler)
        state = self._sampler.state_dict(trained.micro_batches, trained.is_over, trained.has_ended, trained.repeats)
        order = {"shards": self._contents, "drawn_by": drawn_by(self._settings, self._shards.weights)}
        return {**state, **self._budget.state_dict(), **order, "total": trained.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a state: the next train_dataloader begins there, with what was adopted before."""
        if self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING:  # validating is no place to train from
            self._state = state_dict if state_dict.get("has_begun", True) else None
            if self._position is not None:
                forget_training_loader(self._position.trainer)  # the optimizers may have asked how long it is
            self._sampler, self._position, self._restored_by = None, None, running(self.trainer)
            self._budget.load_state_dict(state_dict)

    def on_exception(self, exception: BaseException) -> None:
        """Says where a member of batches comes from that a step looks for in vain."""
        data_warnings.explain_missing(exception, [self._shards.index(each) for each in self._shards.arguments])

    def adopt(self, calibration: Calibration) -> None:
        """Plans by other costs and budgets, from the first step on that no rank has begun to read.

        Collective: to be called on every rank alike, on ``on_train_start`` or between micro-batches. What was adopted
        is part of the checkpoint, and goes before the constructor's arguments when a run goes on.

        Raises:
            ValueError: On every rank, if the ranks' plans differ.
        """
        self._budget.adopt(calibration, for_one_run=running(self.trainer) is not None)
        if self.trainer is not None:
            reload_every_epoch(self.trainer)
        if self.trainer is not None and self._sampler is not None:
            budget, step_time = calibration.budget, calibration.step_time
            replan(self.trainer, self._sampler, replace(self._sampler.planner, budget=budget, step_time=step_time))

    @property
    def index(self) -> ShardIndex:
        """All samples to train on, and what of their shards is refused.

        Raises:
            RuntimeError: Before `setup`.
        """
        return self._shards.index("shards")

    @property
    def ledger(self) -> WorkerLedger:
        """What the processes that read for this rank's training have done; raises as `index` does."""
        return self._shards.reader("shards").ledger

    @property
    def num_workers(self) -> int:
        """Processes per rank that read ahead."""
        return self._num_workers

    @property
    def planner(self) -> BucketPlanner | None:
        """What plans the training: clips, budget and step-time model as they are now; None before it begins."""
        return None if self._sampler is None else self._sampler.planner

    def passes(self) -> dict[str, float]:
        """How often each dataset has been walked through when the current epoch began, by its pattern."""
        weights = self._shards.weights
        names = list(weights) if weights is not None else ["shards"]
        epoch = 0 if self._sampler is None else self._sampler.progress.epoch
        sizes = dataset_sizes(self._table("shards"), len(names)) if self._windows is None else self._windows.sizes
        drawn = draws_before(sizes, None if weights is None else list(weights.values()), epoch)
        return dict(zip(names, (drawn / sizes).tolist(), strict=True))

    def training_shapes(self) -> tuple[SampleTable, RepresentativeBatches]:
        """The training samples in the shapes of the first epoch, and batches to measure with.

        Of windows, these are the samples of the first and the longest clip of all.
        """
        table = self._table("shards")
        if self._encode is not None and self.trainer is not None:
            self._encode.to(self.trainer.strategy.root_device)
        return table, RepresentativeBatches(self._shards.reader("shards"), table, self._encode)

    def clip_lengths(self) -> dict[int, int]:
        """Returns how many clips there are to train on, by tokens; nothing before `setup`.

        Of windows, these are the clips of the first and the longest of all.
        """
        return self._table("shards").samples_by_length() if "shards" in self._shards.arguments else {}

    def tokens_per_device(self) -> float | None:
        """How many tokens a device holds in training, by budget or matrix; ValueError if that cannot be used."""
        return self._budget.tokens_per_device(self.matrix_file)

    @property
    def matrix_file(self) -> Path:
        """Where ``budget="auto"`` looks for what `videoscale benchmark-shapes` has measured."""
        file = self._shards.file
        return file.with_name(f"{file.stem}-shapes.json")

    def _table(self, argument: str, epoch: int = 0) -> SampleTable:
        if argument == "shards" and self._windows is not None:
            return self._windows.sample
        clips, shards = self._shards.clips(argument), self._shards.index(argument).shard_numbers
        return SampleTable.of_clips(clips, self._shape_policy, self._geometry, self._settings["seed"], shards, epoch)

    def _planner(self, argument: str, is_training: bool) -> BucketPlanner:
        table, windows = self._table(argument), self._windows if is_training else None
        budget, step_time = self._budget.of(table, self.trainer, is_training)
        draws = is_training and windows is None  # else the windows do
        has_pixels = draws and bool((self._shards.clips(argument).media != Media.LATENTS).any())
        return BucketPlanner(
            table=table,
            budget=budget,
            dp_size=rank_and_size(self.trainer)[1],
            micro_batches=micro_batches_of(self.trainer, self._micro_batches) if is_training else 1,
            step_time=step_time,
            loss_weighting=self._loss_weighting if is_training else "none",
            shuffle=is_training,
            source_weights=tuple(self._shards.weights.values()) if draws and self._shards.weights else None,
            redraw=partial(self._table, argument) if has_pixels else None,
            windows=windows,
            **self._settings,
        )

    def _ordered_loader(self, argument: str) -> PlannedLoader:
        planner = self._planner(argument, is_training=False)
        return self._loader(argument, PlannedSampler(planner, rank_and_size(self.trainer)[0], repeat_first_epoch=True))

    def _loader(self, argument: str, sampler: PlannedSampler) -> PlannedLoader:
        on_gpu = False
        if self.trainer is not None:
            check_same_plan(self.trainer, digest_of(contents_of(self._shards.index(argument))) + sampler.plan.digest)
            on_gpu = (device := self.trainer.strategy.root_device).type == "cuda"
            if self._encode is not None:
                self._encode.to(device)
        return PlannedLoader(self._shards.reader(argument), sampler, self._num_workers, on_gpu, encode=self._encode)
