"""Samples videos with the network in training, on all ranks together."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

from lightning_videoscale.callbacks.best_effort import BestEffort
from lightning_videoscale.callbacks.ema import EMA
from lightning_videoscale.callbacks.run_folder import named_folder, run_folder
from lightning_videoscale.callbacks.sample_files import (
    check_writers,
    frames_of,
    read_picture,
    read_video,
    strip_of,
    write_picture,
    write_video,
)
from lightning_videoscale.callbacks.sampling_state import (
    between_steps,
    in_training_precision,
    parts_on,
    seed_everything_for,
)
from lightning_videoscale.timing import check_interval
from lightning_videoscale.topology import topology_of, waits_in_every_micro_batch

OnError = Literal["raise", "warn"]

_DECIDE_THE_CALLS = ("num_inference_steps", "timesteps", "sigmas", "guidance_scale", "guidance_scale_2")
"""Arguments of pipelines that decide how often the network is called, which must be equal on all ranks."""

_OF_PIPELINES = "set_progress_bar_config"
_NO_FUNCTION = "SampleVideos takes a function from the LightningModule to a diffusers pipeline around its network; {}."


@dataclass(frozen=True)
class _Prompt:
    index: int
    arguments: dict[str, Any]
    seed: int

    @property
    def caption(self) -> str:
        return str(self.arguments.get("prompt", f"prompt {self.index}"))


class SampleVideos(pl.Callback):
    """Samples videos through a diffusers pipeline around the network in training, every few steps or epochs.

    ::

        def pipeline(module):
            return WanPipeline.from_pretrained("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", transformer=module.transformer)


        samples = SampleVideos(pipeline, ["a cat on a beach"], every_n_steps=500, height=480, width=832)

    All ranks sample: those of a sequence-parallel group together on one prompt, its sequence split, and the groups on
    different prompts. Every group samples equally often, since sharded networks are gathered by all ranks at once; what
    is left over repeats a prompt, and is dropped. Each prompt has its seed, so that pictures of different steps can be
    compared. With `EMA` among the callbacks, the averages sample.

    Each video becomes ``step-00000500-prompt-00.mp4`` and, as a strip of frames, ``….png``. TensorBoard gets the
    strips, and the videos where moviepy (below 2) is installed; Weights & Biases gets the videos.

    Training goes on as if nothing had been sampled: train modes, random generators, gradients and the figures of other
    callbacks are as before. Other parts of the pipeline, such as VAE and text encoder, wait in host memory.

    An error while sampling ends the run by default. It nearly always shows in the first sampling, which comes before
    the first step, and later ones compute the same shapes. Where ranks sample together it must end the run: a rank that
    went on alone would leave its peers waiting. That a video cannot be written or logged is only said once.
    """

    def __init__(
        self,
        pipeline: Callable[[Any], Any],
        prompts: Sequence[str | Mapping[str, Any]],
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        at_start: bool = True,
        seed: int = 0,
        fps: float = 16.0,
        folder: str | Path | None = None,
        on_error: OnError = "raise",
        **arguments: Any,
    ) -> None:
        """Creates the callback.

        Args:
            pipeline: Called once, with the LightningModule, on all ranks; returns the pipeline. What it loads should
                stay on the CPU.
            prompts: A text each, or keyword arguments of the pipeline's call, such as ``prompt_embeds`` and
                ``negative_prompt_embeds``, with which the pipeline needs no text encoder. ``seed`` among them is the
                prompt's.
            every_n_steps: Optimizer steps from sampling to sampling; where a batch has several, each counts, and the
                sampling comes after the batch.
            every_n_epochs: Epochs from sampling to sampling.
            at_start: Also sample before the first step of a run.
            seed: Of the first prompt; the others count up.
            fps: Frames per second of the files.
            folder: Where the files lie, seen by all ranks; None: ``samples`` in the folder of the run, see
                `run_folder`.
            on_error: ``"raise"`` what the pipeline raises, or ``"warn"`` and go on training. The latter is for
                processes that sample each for itself: one device, or DDP without sequence parallelism.
            **arguments: Of the pipeline's call, for all prompts: ``height``, ``num_frames``, ``num_inference_steps``, …

        Raises:
            TypeError: If ``pipeline`` is one, and no function that makes it.
            ValueError: If there is no list of prompts, no interval, or an interval below 1; if a prompt decides how
                often the network is called, or has other keys than the others; or if ``folder`` is a URL.
        """
        if (every_n_steps is None) == (every_n_epochs is None):
            raise ValueError("Give every_n_steps or every_n_epochs, one of both.")
        if every_n_epochs is not None and every_n_epochs < 1:
            raise ValueError(f"every_n_epochs must be at least 1, or None; got {every_n_epochs}.")
        if on_error not in get_args(OnError):
            raise ValueError(f"on_error={on_error!r} is none of {get_args(OnError)}.")
        if hasattr(pipeline, _OF_PIPELINES):
            raise TypeError(_NO_FUNCTION.format(f"it is a {type(pipeline).__name__}"))
        self.prompts = list(_read_prompts(prompts, seed))
        self.every_n_steps, self.every_n_epochs = check_interval(every_n_steps), every_n_epochs
        self.at_start, self.fps, self.on_error = at_start, fps, on_error
        self.folder = named_folder(folder)
        self.arguments = arguments
        self._make_pipeline = pipeline
        self._pipeline: Any = None
        self._sampled_step = 0
        self._best_effort = BestEffort("SampleVideos")

    # -- the Trainer's hooks -------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Looks for what will be needed.

        Raises:
            ModuleNotFoundError: If PyAV or Pillow is not installed.
            ValueError: If ``on_error="warn"`` and ranks sample together.
        """
        if stage != "fit":
            return
        check_writers()
        self._pipeline = None
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        if any(isinstance(callback, WeightAveraging) for callback in callbacks):
            self._best_effort.say_once(
                "SampleVideos samples with the weights in training: of averages it knows those of callbacks.EMA only."
            )
        together = topology_of(trainer).sequence_parallel_size > 1 or waits_in_every_micro_batch(trainer)
        if self.on_error == "warn" and trainer.world_size > 1 and together:
            raise ValueError(
                'on_error="warn" lets a rank go on when its sampling fails, and its peers, which sample with it, would '
                'wait for it: use on_error="raise" where sequences are split or parameters sharded.'
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Samples before the first step."""
        self._sampled_step = trainer.global_step
        if self.at_start:
            self.sample(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Samples after every ``every_n_steps``-th optimizer step."""
        if self.every_n_steps is not None and self._passed(self.every_n_steps, trainer.global_step):
            self._sampled_step = trainer.global_step
            self.sample(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Samples after every ``every_n_epochs``-th epoch."""
        if self.every_n_epochs is not None and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self.sample(trainer)

    def _passed(self, every: int, step: int) -> bool:
        """Whether one of every n steps is among those since the last sampling: a batch may have several."""
        return step // every > self._sampled_step // every

    # -- sampling ------------------------------------------------------------------------------------------------------

    def sample(self, trainer: pl.Trainer) -> None:
        """Samples all prompts, between two training steps; collective over all ranks."""
        folder = self.folder or run_folder(trainer) / "samples"
        if self.on_error == "warn":
            self._best_effort.attempt("sample", self._sample_share, trainer, folder)
        else:
            try:
                self._sample_share(trainer, folder)
            except Exception as error:
                error.add_note(f"SampleVideos was sampling: rank {trainer.global_rank}, step {trainer.global_step}.")
                raise
        # Ranks that are done early wait here, not in the next step, where it would count as a straggler's.
        trainer.strategy.barrier("SampleVideos")
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                self._best_effort.attempt(f"log to {type(logger).__name__}", self._log, logger, folder, trainer)

    def _sample_share(self, trainer: pl.Trainer, folder: Path) -> None:
        topology, device = topology_of(trainer), trainer.strategy.root_device
        is_first = trainer.global_rank == topology.data_parallel_rank * topology.sequence_parallel_size
        module = trainer.lightning_module
        if is_first:
            own = self.prompts[topology.data_parallel_rank :: topology.data_parallel_size]
            self._best_effort.attempt("remove older videos", _remove, folder, trainer.global_step, own)
        with ExitStack() as stack:
            stack.enter_context(between_steps(trainer))
            if self._pipeline is None:
                made = self._make_pipeline(module)
                if not hasattr(made, _OF_PIPELINES):
                    raise TypeError(_NO_FUNCTION.format(f"it returned {made!r}"))
                self._pipeline = made
                self._pipeline.set_progress_bar_config(disable=True)
            for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
                if isinstance(callback, EMA):
                    callback.update(trainer)  # which may come after this callback in the list
                    stack.enter_context(callback.average_weights())
            stack.enter_context(parts_on(device, self._pipeline, module))
            stack.enter_context(in_training_precision(trainer, self._pipeline))
            for begin in range(0, len(self.prompts), topology.data_parallel_size):
                index = begin + topology.data_parallel_rank
                prompt = self.prompts[index % len(self.prompts)]
                seed_everything_for(prompt.seed)
                generator = torch.Generator().manual_seed(prompt.seed)  # on the CPU: the same numbers on any device
                arguments = {name: _on(value, device) for name, value in (self.arguments | prompt.arguments).items()}
                frames = frames_of(self._pipeline(**arguments, generator=generator))
                if is_first and index < len(self.prompts):
                    self._best_effort.attempt("write a video", self._write, folder, trainer.global_step, prompt, frames)

    def _write(self, folder: Path, step: int, prompt: _Prompt, frames: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        video, part = (_file(folder, step, prompt, suffix) for suffix in ("mp4", "part.mp4"))
        write_picture(video.with_suffix(".png"), strip_of(frames))
        try:
            write_video(part, frames, self.fps)
            part.replace(video)  # whole, and behind the picture: where there is a video, there are both
        finally:
            part.unlink(missing_ok=True)

    def _log(self, logger: Logger, folder: Path, trainer: pl.Trainer) -> None:
        step = trainer.global_step
        for prompt in self.prompts:
            video, tag = _file(folder, step, prompt, "mp4"), f"samples/{prompt.index:02}"
            if not video.exists():  # it could not be sampled or written, which was said
                continue
            if isinstance(logger, TensorBoardLogger):
                board: Any = logger.experiment
                board.add_image(tag, read_picture(video.with_suffix(".png")), step, dataformats="HWC")
                if _tensorboard_takes_videos():
                    clip = torch.from_numpy(read_video(video)).permute(0, 3, 1, 2)[None]
                    board.add_video(f"{tag}/video", clip, step, fps=self.fps)
            elif isinstance(logger, WandbLogger):
                logger.log_video(tag, [str(video)], step, caption=[prompt.caption], format=["mp4"])


def _read_prompts(prompts: Sequence[str | Mapping[str, Any]], seed: int) -> Iterator[_Prompt]:
    if isinstance(prompts, str | Mapping) or not prompts:
        raise ValueError(f"prompts={prompts!r} must be a list of at least one prompt.")
    keys: set[str] | None = None
    for index, prompt in enumerate(prompts):
        arguments = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
        own_seed = int(arguments.pop("seed", seed + index))
        decides = sorted(arguments.keys() & set(_DECIDE_THE_CALLS))
        if decides:
            raise ValueError(
                f"Prompt {index} brings {decides}, which decide how often the network is called. All ranks must call "
                "it equally often: give them once, for all prompts, as keyword arguments of SampleVideos."
            )
        if keys is not None and arguments.keys() != keys:
            raise ValueError(f"Prompt {index} has {sorted(arguments)}, and the first one {sorted(keys)}.")
        keys = set(arguments)
        yield _Prompt(index, arguments, own_seed)


def _file(folder: Path, step: int, prompt: _Prompt, suffix: str) -> Path:
    return folder / f"step-{step:08}-prompt-{prompt.index:02}.{suffix}"


def _remove(folder: Path, step: int, prompts: Sequence[_Prompt]) -> None:
    """Removes what an earlier run sampled at the same step, which would be shown as new where this sampling fails."""
    for prompt in prompts:
        for suffix in ("mp4", "png"):
            _file(folder, step, prompt, suffix).unlink(missing_ok=True)


def _tensorboard_takes_videos() -> bool:
    """Whether torch's ``add_video`` has what it writes videos with; else it prints a line and writes nothing."""
    return bool(importlib.util.find_spec("moviepy") and importlib.util.find_spec("moviepy.editor"))


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
