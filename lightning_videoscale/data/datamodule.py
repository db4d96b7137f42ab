"""Balanced batches of videos, images or latents behind a LightningDataModule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_videoscale.cost import BucketBudget, Calibration, StepTimeModel
from lightning_videoscale.data.advice import warn_of_ignored, warn_of_oversized, warn_of_refused, warn_of_shapeless
from lightning_videoscale.data.agreement import (
    align_counters,
    apply_loss_weights,
    check_accumulation,
    check_same_index,
    check_same_plan,
    contents_of,
    step_time_of,
)
from lightning_videoscale.data.auto_budget import AutoBudget, BudgetSearch
from lightning_videoscale.data.benchmark.synthetic import RepresentativeBatches
from lightning_videoscale.data.geometry import GEOMETRIES, ModelGeometry
from lightning_videoscale.data.index import ShardIndex, default_index_file
from lightning_videoscale.data.indexing import build_index, index_shards, known_shards
from lightning_videoscale.data.loader import PlannedLoader, PlannedSampler
from lightning_videoscale.data.online import BatchEncoder, check_geometry
from lightning_videoscale.data.planning import (
    Balance,
    BucketPlanner,
    LossNormalization,
    LossWeighting,
    SampleTable,
)
from lightning_videoscale.data.planning.stream import draws_per_epoch
from lightning_videoscale.data.reader import MicroBatchReader
from lightning_videoscale.data.replanning import replan
from lightning_videoscale.data.shapes import Media, ShapePolicy
from lightning_videoscale.data.shards import ShardError, expand_shards
from lightning_videoscale.topology import topology_of

Shards = str | list[str] | dict[str, float]


class VideoDataModule(pl.LightningDataModule):
    """Balanced batches from WebDataset shards, the same plan on every rank.

    A sample of a shard is one video, image or latents (``<key>.mp4``, ``<key>.jpg``, ``<key>.latents.npy`` (C, F, H,
    W)), a caption ``<key>.txt``, and any further members, which pass through. A batch is a dict: ``latents`` (B, C, F,
    H, W) float32 or ``video`` (B, 3, F, H, W) uint8, ``caption`` (list[str]), ``sample_ids`` (list[str]), ``meta``
    (`BatchMeta`) and the further members by name (``mask.npy`` is ``mask``). All samples of a batch have one shape; B
    follows from ``budget`` (AdaptiveLoad, equation 2). Every sample is in exactly one batch per epoch, every epoch is
    another permutation, and every data-parallel rank has equally many batches.

    A checkpoint keeps what of the epoch is done. A run goes on from there on any number of ranks, with any number of
    workers, and every sample is in exactly one step of the epoch all the same.

    Validation and prediction batches come in the order of the shards. Where the ranks would have unequally many, one
    sample is read again with ``meta.loss_weight`` 0.

    Args:
        shards: Tar files to train on: a path, a pattern such as ``clips/{000..099}.tar`` or ``clips/*.tar``, a list; or
            several datasets, pattern by pattern with the weight that each is drawn with.
        index: Where the table of all samples is kept. None: beside the first shard.
        balance: ``planned``: every rank's step costs the same. ``dual_constraint``: each rank draws alone, batches
            within memory and compute. ``equal_token``: each rank draws alone, batches within memory.
        budget: Memory and compute that a micro-batch may take. ``auto``: found when ``fit`` begins, see `AutoBudget`.
            Batches that nothing is trained on then hold no more tokens than the longest of them.
        val_shards: Tar files to validate on, likewise. None: no validation.
        predict_shards: Tar files to predict on, likewise.
        micro_batches: Micro-batches per optimizer step and rank; must equal the Trainer's ``accumulate_grad_batches``.
        geometry: The model's VAE and patches, by the name of its family or by their factors.
        shape_policy: Which frames and pixels of a video or an image are read, drawn anew every epoch. Latents are read
            whole.
        step_time: Predicts the cost that is balanced. None: what ``budget="auto"`` has measured, else the FLOPs of the
            transformer in the LightningModule; where none tells its size, B * S^p with the budget's p.
        loss_weighting: ``sample``: every sample of a step weighs the same in the gradient, whatever the batch sizes.
            ``token``: every token does. ``none``: every micro-batch does, as in plain DDP.
        loss_normalization: ``step``: a step's gradient is the mean over its samples (or tokens), as of one big batch;
            a sample of a step of many then counts less. ``epoch``: it is their sum over what a step has on average;
            no sample of the epoch counts less, and steps of many samples have larger gradients.
        seed: Seed of all draws.
        shard_window: Shards that samples are shuffled over at a time.
        num_workers: Processes per rank that read ahead. 0 reads in the training process.
        encode: Makes latents of videos, embeddings of captions, or anything of a user's own, on the device that trains
            and once per sequence-parallel group; see `OnlineEncoder`. None: batches stay as they were read.
    """

    def __init__(
        self,
        shards: Shards,
        index: str | Path | None = None,
        balance: Balance = "planned",
        budget: BucketBudget | AutoBudget | Literal["auto"] = "auto",
        *,
        val_shards: str | list[str] | None = None,
        predict_shards: str | list[str] | None = None,
        micro_batches: int = 1,
        geometry: str | ModelGeometry = "wan2.1",
        shape_policy: ShapePolicy | None = None,
        step_time: StepTimeModel | None = None,
        loss_weighting: LossWeighting = "sample",
        loss_normalization: LossNormalization = "step",
        seed: int = 0,
        shard_window: int = 64,
        num_workers: int = 0,
        encode: BatchEncoder | None = None,
    ) -> None:
        super().__init__()
        if isinstance(geometry, str) and geometry not in GEOMETRIES:
            raise ValueError(f"geometry={geometry!r} is none of {sorted(GEOMETRIES)}; give a ModelGeometry instead.")
        self._shards = shards
        self._index_file = index
        self._balance: Balance = balance
        self._auto = None if isinstance(budget, BucketBudget) else AutoBudget() if budget == "auto" else budget
        self._budget = budget if isinstance(budget, BucketBudget) else None
        self._other_shards = {"val_shards": val_shards, "predict_shards": predict_shards}
        self._micro_batches = micro_batches
        self._geometry = GEOMETRIES[geometry] if isinstance(geometry, str) else geometry
        check_geometry(encode, self._geometry)
        self._shape_policy = shape_policy if shape_policy is not None else ShapePolicy()
        self._step_time = step_time
        self._loss_weighting: LossWeighting = loss_weighting
        self._loss_normalization: LossNormalization = loss_normalization
        self._seed = seed
        self._shard_window = shard_window
        self._num_workers = num_workers
        self._encode = encode
        self._indices: dict[str, ShardIndex] = {}
        self._readers: dict[str, MicroBatchReader] = {}
        self._sources: list[int] = []
        self._sampler: PlannedSampler | None = None
        self._state: Mapping[str, Any] | None = None
        self._adopted: Calibration | None = None
        self._found: Calibration | None = None
        if val_shards is None and type(self).val_dataloader is VideoDataModule.val_dataloader:
            # Lightning validates unless the hook is its own: an empty list would be a warning in every run.
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]

    def prepare_data(self) -> None:
        """Indexes the shards once per node and keeps the table, for the other ranks and for the next run."""
        shards, file = self._shards_and_file()
        try:
            build_index(shards, file, workers=max(1, self._num_workers), progress=True)
        except OSError as error:
            rank_zero_warn(f"The shard index cannot be kept ({error}), so every rank reads the shards. Give `index=`.")

    def setup(self, stage: str) -> None:
        """Reads the index, and says what of the shards is left alone."""
        if self._indices:
            return
        shards, file = self._shards_and_file()
        index = index_shards(shards, known_shards(file))
        index.check()
        begin = 0
        for name, patterns in self._patterns().items():
            end = begin + len(expand_shards(patterns))
            self._indices[name] = ShardIndex(index.shards[begin:end])
            if not len(self._indices[name]):
                raise ShardError(f"No samples found in {name}.")
            self._readers[name] = MicroBatchReader(self._indices[name], self._shape_policy.fps)
            begin = end
            self._advise(self._indices[name])
        if isinstance(self._shards, dict):
            self._sources = [n for n, pattern in enumerate(self._shards) for _ in expand_shards(pattern)]
        warn_of_refused(index)
        warn_of_ignored(index)

    def train_dataloader(self) -> PlannedLoader:
        """Batches of this rank; a new plan every epoch.

        Raises:
            ValueError: If the Trainer accumulates another number of micro-batches, or a checkpoint was made with other
                shards. Each message names the fix.
        """
        index = self._index("shards")
        if self._budget is None and self._auto is not None:
            self._found = self._search(self._auto).run(self.trainer)
            self._budget, self._step_time = self._found.budget, self._found.step_time
            warn_of_oversized(self._table(index, is_training=True), self._budget)
        planner = self._planner(index, self._micro_batches, self._loss_weighting, is_training=True)
        trainer, state, on_resume, overfit, epoch = self.trainer, None, None, False, 0
        if trainer is not None:
            check_accumulation(trainer, self._micro_batches)
            overfit = trainer.overfit_batches > 0  # type: ignore[attr-defined]  # set by a connector
            epoch = trainer.current_epoch
            on_resume = partial(align_counters, trainer)
        if self._state is not None and not overfit and self._state["epoch"] >= epoch:
            check_same_index(self._state["shards"], contents_of(index))
            state = self._state
        rank = self._dp_rank_and_size()[0]
        sampler = PlannedSampler(
            planner, rank, repeat_first_epoch=overfit, epoch=epoch, state=state, on_resume=on_resume
        )
        if trainer is not None:
            apply_loss_weights(trainer)
            differs = planner.source_weights is not None or (planner.redraw and self._shape_policy.draws_shapes)
            if sampler.progress.begun is not None or differs:
                # The next epochs have another number of steps, which Lightning asks for when it makes the loader.
                trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]  # set by a connector
        self._sampler = None if overfit else sampler
        if planner.source_weights is not None:
            walked = ", ".join(f"{name} {passes:.2f} times" for name, passes in self.passes().items())
            rank_zero_info(f"Epoch {sampler.progress.epoch} begins; of each dataset was drawn before: {walked}.")
        return self._loader("shards", sampler)

    def val_dataloader(self) -> PlannedLoader:
        """Validation batches of this rank, the same ones every time. Needs ``val_shards``."""
        return self._ordered_loader("val_shards")

    def predict_dataloader(self) -> PlannedLoader:
        """Batches of this rank to predict on. Needs ``predict_shards``."""
        return self._ordered_loader("predict_shards")

    def state_dict(self) -> dict[str, Any]:
        """Returns what of the epoch is done, the same on every rank; nothing outside of training."""
        if self._sampler is None or self.trainer is None:
            return dict(self._state) if self._state is not None else {}
        count: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        state = self._sampler.state_dict(count.processed if self._sampler.is_started else self._sampler.taken)
        calibration = {} if self._adopted is None else {"calibration": self._adopted.to_dict()}
        if self._found is not None:
            calibration["found_budget"] = self._found.to_dict()
        return {**state, **calibration, "shards": contents_of(self._index("shards"))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a state: the next train_dataloader begins there, with what was adopted before."""
        self._state = state_dict
        if "found_budget" in state_dict and self._auto is not None and self._auto.matrix is None:
            self._found = Calibration.from_dict(state_dict["found_budget"])
            self._budget, self._step_time = self._found.budget, self._found.step_time
        if "calibration" in state_dict:
            self._take(Calibration.from_dict(state_dict["calibration"]))

    def adopt(self, calibration: Calibration) -> None:
        """Plans by other costs and budgets, from the first step on that no rank has begun to read.

        Collective: to be called on every rank alike, on ``on_train_start`` or between micro-batches. What was adopted
        is part of the checkpoint, and goes before the constructor's arguments when a run goes on.

        Raises:
            ValueError: On every rank, if the ranks' plans differ.
        """
        self._take(calibration)
        if self.trainer is None:
            return
        self.trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]  # set by a connector
        if self._sampler is not None:
            budget, step_time = calibration.budget, calibration.step_time
            replan(self.trainer, self._sampler, replace(self._sampler.planner, budget=budget, step_time=step_time))

    def _take(self, calibration: Calibration) -> None:
        self._adopted = calibration
        self._budget, self._step_time = calibration.budget, calibration.step_time

    @property
    def planner(self) -> BucketPlanner | None:
        """What plans the training: clips, budget and step-time model as they are now; None before it begins."""
        return None if self._sampler is None else self._sampler.planner

    def passes(self) -> dict[str, float]:
        """How often each dataset has been walked through when the current epoch began, by its pattern."""
        table = self._table(self._index("shards"), is_training=True)
        weights = list(self._shards.values()) if isinstance(self._shards, dict) else None
        names = list(self._shards) if isinstance(self._shards, dict) else ["shards"]
        epoch = 0 if self._sampler is None else self._sampler.progress.epoch
        sizes = np.bincount(table.source[table.shape_id >= 0], minlength=len(names))
        drawn = draws_per_epoch(table, weights)
        return {name: float(epoch * n / size) for name, n, size in zip(names, drawn, sizes, strict=True)}

    def training_shapes(self) -> tuple[SampleTable, RepresentativeBatches]:
        """The training samples in the shapes of the first epoch, and batches of these to measure with."""
        index = self._index("shards")
        table = self._table(index, is_training=True)
        if self._encode is not None and self.trainer is not None:
            self._encode.to(self.trainer.strategy.root_device)
        return table, RepresentativeBatches(MicroBatchReader(index, self._shape_policy.fps), table, self._encode)

    def _search(self, auto: AutoBudget) -> BudgetSearch:
        table, batches = self.training_shapes()
        return BudgetSearch(auto, table, batches, self.matrix_file, self._step_time)

    @property
    def matrix_file(self) -> Path:
        """Where ``budget="auto"`` looks for what `videoscale benchmark-shapes` has measured."""
        file = self._shards_and_file()[1]
        return file.with_name(f"{file.stem}-shapes.json")

    def _patterns(self) -> dict[str, str | list[str]]:
        train = list(self._shards) if isinstance(self._shards, dict) else self._shards
        others = {name: shards for name, shards in self._other_shards.items() if shards is not None}
        return {"shards": train, **others}

    def _shards_and_file(self) -> tuple[list[str], Path]:
        shards = [shard for patterns in self._patterns().values() for shard in expand_shards(patterns)]
        return shards, default_index_file(shards) if self._index_file is None else Path(self._index_file)

    def _index(self, argument: str) -> ShardIndex:
        if argument not in self._indices:
            raise RuntimeError(
                f"VideoDataModule has no index of its {argument}: give {argument}= and, without a Trainer, call "
                "prepare_data() and setup('fit') first."
            )
        return self._indices[argument]

    def _dp_rank_and_size(self) -> tuple[int, int]:
        if self.trainer is None:
            return 0, 1
        topology = topology_of(self.trainer)
        return topology.data_parallel_rank, topology.data_parallel_size

    def _table(self, index: ShardIndex, is_training: bool, epoch: int = 0) -> SampleTable:
        clips = index.samples.clips
        if is_training and self._sources:
            clips = replace(clips, source=np.array(self._sources, np.int32)[index.shard_numbers])
        return SampleTable.of_clips(clips, self._shape_policy, self._geometry, self._seed, index.shard_numbers, epoch)

    def _advise(self, index: ShardIndex) -> None:
        table = self._table(index, is_training=False)
        warn_of_shapeless(index, table)
        if self._budget is not None:
            warn_of_oversized(table, self._budget)

    def _planner(
        self, index: ShardIndex, micro_batches: int, loss_weighting: LossWeighting, is_training: bool
    ) -> BucketPlanner:
        table = self._table(index, is_training)
        step_time = self._step_time
        if step_time is None and self.trainer is not None:
            step_time = step_time_of(self.trainer.lightning_module)
        budget = self._budget if is_training or self._auto is None else None
        if budget is None:
            budget = _budget_of_longest(table, step_time)
        weights = tuple(self._shards.values()) if is_training and isinstance(self._shards, dict) else None
        has_pixels = bool((index.samples.clips.media != Media.LATENTS).any())
        return BucketPlanner(
            table=table,
            budget=budget,
            balance=self._balance,
            dp_size=self._dp_rank_and_size()[1],
            micro_batches=micro_batches,
            step_time=step_time,
            loss_weighting=loss_weighting,
            loss_normalization=self._loss_normalization,
            seed=self._seed,
            shuffle=is_training,
            shard_window=self._shard_window,
            source_weights=weights,
            redraw=partial(self._table, index, is_training) if is_training and has_pixels else None,
        )

    def _ordered_loader(self, argument: str) -> PlannedLoader:
        index = self._index(argument)
        planner = self._planner(index, micro_batches=1, loss_weighting="none", is_training=False)
        return self._loader(argument, PlannedSampler(planner, self._dp_rank_and_size()[0], repeat_first_epoch=True))

    def _loader(self, argument: str, sampler: PlannedSampler) -> PlannedLoader:
        on_gpu = False
        if self.trainer is not None:
            check_same_plan(self.trainer, self._index(argument).digest + sampler.plan.digest)
            device = self.trainer.strategy.root_device
            on_gpu = device.type == "cuda"
            if self._encode is not None:
                self._encode.to(device)
        return PlannedLoader(
            self._readers[argument], sampler, self._num_workers, pin_memory=on_gpu, encode=self._encode
        )


def _budget_of_longest(table: SampleTable, step_time: StepTimeModel | None) -> BucketBudget:
    """What the longest sample alone takes, which must fit in any case."""
    longest = int(table.sequence_lengths.max())
    p = step_time.power_law.p if step_time is not None else 2.0
    return BucketBudget(longest, float(longest) ** p, p)
