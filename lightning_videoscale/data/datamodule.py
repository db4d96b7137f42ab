"""Buckets of video latents behind a LightningDataModule."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_warn

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data.index import ShardIndex, default_index_file
from lightning_videoscale.data.indexing import build_index, index_shards, known_shards
from lightning_videoscale.data.loader import PlannedLoader, PlannedSampler
from lightning_videoscale.data.plan import BucketPlanner, LossWeighting, sequence_length
from lightning_videoscale.data.reader import MicroBatchReader
from lightning_videoscale.data.shards import ShardError, expand_shards
from lightning_videoscale.topology import topology_of


class VideoDataModule(pl.LightningDataModule):
    """Buckets of video latents from WebDataset shards.

    A sample of a shard is ``<key>.latents.npy`` (float16 or float32, (C, F, H, W)), ``<key>.txt`` (the caption, UTF-8;
    or ``<key>.text_embeds.npy``), and any further ``.npy``, ``.json`` or ``.txt`` members, which pass through. A batch
    is a dict: ``latents`` (B, C, F, H, W) float32, ``caption`` (list[str]), ``sample_ids`` (list[str]), ``meta``
    (`BatchMeta`) and the further members by name (``mask.npy`` is ``mask``). All samples of a batch have one latent
    shape; B follows from ``budget`` (AdaptiveLoad, equation 2). Every sample is in exactly one batch per epoch, every
    epoch is another permutation, and every data-parallel rank has equally many batches.

    Validation batches come in the order of the shards. Where the ranks would have unequally many of them, one sample is
    read again with ``meta.loss_weight`` 0.

    Args:
        shards: Tar files to train on: a path, a pattern such as ``clips/{000..099}.tar`` or ``clips/*.tar``, or a list.
        budget: Memory and compute that a micro-batch may take.
        val_shards: Tar files to validate on, likewise. None: no validation.
        index: Where the table of all samples is kept (JSON). None: beside the first shard.
        micro_batches: Micro-batches per optimizer step and rank; must equal the Trainer's ``accumulate_grad_batches``.
        patch_size: Latent frames, rows and columns that the model makes into one token.
        loss_weighting: ``sample``: every sample of a step weighs the same in the gradient, whatever the batch sizes.
            ``none``: every micro-batch weighs the same, as in plain DDP.
        seed: Seed of the permutations.
        num_workers: Processes per rank that read ahead. 0 reads in the training process.
    """

    def __init__(
        self,
        shards: str | list[str],
        budget: BucketBudget,
        *,
        val_shards: str | list[str] | None = None,
        index: str | Path | None = None,
        micro_batches: int = 1,
        patch_size: tuple[int, int, int] = (1, 2, 2),
        loss_weighting: LossWeighting = "sample",
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self._shards = shards
        self._val_shards = val_shards
        self._budget = budget
        self._index_file = index
        self._micro_batches = micro_batches
        self._patch_size = patch_size
        self._loss_weighting = loss_weighting
        self._seed = seed
        self._num_workers = num_workers
        self._train_index: ShardIndex | None = None
        self._val_index: ShardIndex | None = None
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
        """Reads the index, and says what of the shards is left alone or exceeds the memory budget."""
        if self._train_index is not None:
            return
        shards, file = self._shards_and_file()
        index = index_shards(shards, known_shards(file))
        index.check()
        count = len(expand_shards(self._shards))
        self._train_index = ShardIndex(index.shards[:count])
        self._val_index = ShardIndex(index.shards[count:]) if self._val_shards is not None else None
        if not len(self._train_index) or (self._val_index is not None and not len(self._val_index)):
            raise ShardError(f"No samples found in {'val_shards' if len(self._train_index) else 'shards'}.")
        self._warn_of_refused(index)
        self._warn_of_ignored(index)
        self._warn_of_oversized(index)

    def train_dataloader(self) -> PlannedLoader:
        """Batches of this rank; a new plan every epoch.

        Raises:
            ValueError: If the Trainer accumulates another number of micro-batches, or nothing would apply the plan's
                loss weights. Each message names the fix.
        """
        index = _ready(self._train_index, "shards")
        planner = self._planner(index, self._micro_batches, self._loss_weighting, shuffle=True)
        overfit = False
        if self.trainer is not None:
            self._check_accumulation(self.trainer)
            self._check_loss_weights(self.trainer, planner)
            overfit = self.trainer.overfit_batches > 0  # type: ignore[attr-defined]  # set by a connector
        return self._loader(index, planner, repeat_first_epoch=overfit)

    def val_dataloader(self) -> PlannedLoader:
        """Validation batches of this rank, the same ones every time. Needs ``val_shards``."""
        index = _ready(self._val_index, "val_shards")
        planner = self._planner(index, micro_batches=1, loss_weighting="none", shuffle=False)
        return self._loader(index, planner, repeat_first_epoch=True)

    def _shards_and_file(self) -> tuple[list[str], Path]:
        shards = expand_shards(self._shards)
        if self._val_shards is not None:
            shards += expand_shards(self._val_shards)
        return shards, default_index_file(shards) if self._index_file is None else Path(self._index_file)

    def _dp_rank_and_size(self) -> tuple[int, int]:
        if self.trainer is None:
            return 0, 1
        topology = topology_of(self.trainer)
        return topology.data_parallel_rank, topology.data_parallel_size

    def _planner(
        self, index: ShardIndex, micro_batches: int, loss_weighting: LossWeighting, shuffle: bool
    ) -> BucketPlanner:
        return BucketPlanner(
            shapes=[sample.shape[1:] for sample in index.samples],
            budget=self._budget,
            patch_size=self._patch_size,
            dp_size=self._dp_rank_and_size()[1],
            micro_batches=micro_batches,
            loss_weighting=loss_weighting,
            seed=self._seed,
            shuffle=shuffle,
        )

    def _loader(self, index: ShardIndex, planner: BucketPlanner, repeat_first_epoch: bool) -> PlannedLoader:
        sampler = PlannedSampler(planner, self._dp_rank_and_size()[0], repeat_first_epoch)
        on_gpu = False
        if self.trainer is not None:
            _check_same_plan(self.trainer, index.digest + sampler.plan.digest())
            on_gpu = self.trainer.strategy.root_device.type == "cuda"
        return PlannedLoader(MicroBatchReader(index), sampler, self._num_workers, pin_memory=on_gpu)

    def _check_accumulation(self, trainer: pl.Trainer) -> None:
        if not trainer.lightning_module.automatic_optimization:
            return
        if trainer.accumulate_grad_batches != self._micro_batches:
            raise ValueError(
                f"VideoDataModule(micro_batches={self._micro_batches}) plans optimizer steps of {self._micro_batches} "
                f"micro-batches and the Trainer makes them of {trainer.accumulate_grad_batches}: set "
                f"Trainer(accumulate_grad_batches={self._micro_batches}), or micro_batches to the Trainer's number."
            )
        if any(type(callback) is GradientAccumulationScheduler for callback in _callbacks(trainer)):
            raise ValueError("GradientAccumulationScheduler changes the micro-batches per step, and the plan does not.")

    def _check_loss_weights(self, trainer: pl.Trainer, planner: BucketPlanner) -> None:
        applied = topology_of(trainer).applies_loss_weight or any(
            getattr(callback, "applies_loss_weight", False) for callback in _callbacks(trainer)
        )
        if not applied and planner.needs_loss_weights():
            raise ValueError(
                f"The batches of this plan differ in weight and {type(trainer.strategy).__name__} does not apply "
                "meta.loss_weight: add Trainer(callbacks=[vs.callbacks.LossWeighting()])"
                + (', or VideoDataModule(loss_weighting="none").' if self._loss_weighting == "sample" else ".")
            )

    def _warn_of_refused(self, index: ShardIndex) -> None:
        if index.refused:
            shown = "; ".join(f"{shard}: {member!r}: {reason}" for shard, (member, reason) in index.refused[:3])
            rank_zero_warn(
                f"{len(index.refused)} members of the shards are left out ({shown}{'; …' * (len(index.refused) > 3)}). "
                "`videoscale index` lists all of them."
            )

    def _warn_of_ignored(self, index: ShardIndex) -> None:
        if ignored := sorted({extension for shard in index.shards for extension in shard.ignored}):
            rank_zero_warn(
                f"The shards hold members that are left alone: {ignored}. Read are the one video, image or latents "
                "that a sample is about, and beside it npy, safetensors, json, txt, and images that have a name."
            )

    def _warn_of_oversized(self, index: ShardIndex) -> None:
        counts = Counter(sample.shape[1:] for sample in index.samples)
        lengths = {shape: sequence_length(shape, self._patch_size) for shape in counts}
        if oversized := [shape for shape, length in lengths.items() if self._budget.exceeds_memory(length)]:
            listed = ", ".join(f"{shape}: {lengths[shape]} tokens, {counts[shape]} samples" for shape in oversized)
            rank_zero_warn(
                f"One sample alone exceeds the memory budget m_mem={self._budget.m_mem} tokens in {len(oversized)} "
                f"buckets ({listed}); they train with batch size 1. Raise m_mem if they fit, or leave such clips out."
            )


def _ready(index: ShardIndex | None, argument: str) -> ShardIndex:
    if index is None:
        raise RuntimeError(
            f"VideoDataModule has no index of its {argument}: give {argument}= and, without a Trainer, call "
            "prepare_data() and setup('fit') first."
        )
    return index


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks


def _check_same_plan(trainer: pl.Trainer, digest: str) -> None:
    same = trainer.strategy.broadcast(digest) == digest
    if not trainer.strategy.reduce_boolean_decision(same, all=True):
        raise ValueError(
            f"The ranks do not see the same shards: rank {trainer.global_rank} planned {digest[:12]}, which "
            f"{'equals' if same else 'differs from'} rank 0's plan. Compare the shards on all nodes."
        )
