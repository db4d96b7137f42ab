"""`SampleVideos` on one device; over ranks: tests/distributed/callbacks/test_sampling.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_videoscale.callbacks import EMA, LoadBalanceMonitor, SampleVideos
from lightning_videoscale.callbacks.sample_files import read_picture, read_video, strip_of, write_video
from lightning_videoscale.trained_weights import AVERAGES
from tests.callbacks.toy import MemoryLogger, Meta, Slope, batches_of, trainer_with
from tests.distributed.callbacks.sampling import CALL, Drawing, Pipelines, save_parts, train


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_parts(tmp_path_factory.mktemp("parts"))


def test_files_and_pictures_on_tensorboard(parts: Path, tmp_path: Path) -> None:
    samples = SampleVideos(Pipelines(parts), ["1 2", "3"], every_n_epochs=1, fps=5, **CALL)
    train("auto", 1, samples, logger=TensorBoardLogger(tmp_path, version="run"))
    folder = tmp_path / "lightning_logs" / "run" / "samples"
    names = [f"step-0000000{step}-prompt-0{prompt}" for step in (0, 2) for prompt in (0, 1)]
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        f"{n}.{end}" for n in names for end in ("mp4", "png")
    )
    video, strip = read_video(folder / f"{names[0]}.mp4"), read_picture(folder / f"{names[0]}.png")
    assert video.shape == (5, 32, 32, 3)
    assert strip.shape == (32, 5 * 32, 3)
    assert np.abs(strip_of(video).astype(float) - strip).mean() < 8
    board = EventAccumulator(str(folder.parent))
    board.Reload()
    assert [event.step for event in board.Images("samples/01")] == [0, 2]


@pytest.mark.skipif(not find_spec("wandb"), reason="`pip install wandb`: too many packages for the extra `dev`")
def test_videos_in_wandb(parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=str(tmp_path), offline=True)
    train("auto", 1, SampleVideos(Pipelines(parts), ["1", "3"], every_n_epochs=1, **CALL), logger=logger)
    folder = tmp_path / "lightning_logs" / logger.experiment.id / "samples"
    kept = Path(logger.experiment.dir) / "media" / "videos" / "samples"
    logger.experiment.finish()
    sampled = {file.read_bytes() for file in folder.glob("*.mp4")}
    assert len(sampled) == 4 and {file.read_bytes() for file in kept.glob("*.mp4")} == sampled


class Looks:
    """Called after each step of a sampling: notes one parameter."""

    def __init__(self, module: Drawing) -> None:
        self.module = module
        self.seen: list[torch.Tensor] = []
        self.modes: list[bool] = []

    def __call__(self, pipeline: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(self.module.transformer.proj_out.weight.detach().clone())
        self.modes.append(self.module.transformer.training)
        return kwargs


@pytest.mark.parametrize("first", [True, False], ids=["before EMA", "behind EMA"])
def test_averages_sample(parts: Path, tmp_path: Path, first: bool) -> None:
    module, ema = Drawing(), EMA(0.5)
    look = Looks(module)
    call = CALL | {"callback_on_step_end": look}
    samples = SampleVideos(Pipelines(parts), ["1"], every_n_steps=2, at_start=False, folder=tmp_path, **call)
    train("auto", 1, *([samples, ema] if first else [ema, samples]), module=module)
    with ema.average_weights():
        average = module.transformer.proj_out.weight.detach().clone()
    assert not torch.equal(average, module.transformer.proj_out.weight)
    assert len(look.seen) == 2
    assert all(torch.equal(seen, average) for seen in look.seen)
    assert not any(look.modes)


@pytest.mark.parametrize("first", [True, False], ids=["before EMA", "behind EMA"])
def test_averages_of_a_checkpoint_sample_before_the_first_step(parts: Path, tmp_path: Path, first: bool) -> None:
    _, trainer = train("auto", 1, EMA(0.5))
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=False)
    module, ema = Drawing(), EMA(0.5)
    look = Looks(module)
    call = CALL | {"callback_on_step_end": look, "num_inference_steps": 1}
    samples = SampleVideos(Pipelines(parts), ["1"], every_n_steps=9, folder=tmp_path, **call)
    order = [samples, ema] if first else [ema, samples]
    train("auto", 1, *order, module=module, ckpt_path=tmp_path / "half.ckpt", max_epochs=2)
    (seen,) = look.seen
    assert torch.equal(seen, saved[AVERAGES]["transformer.proj_out.weight"])
    assert not torch.equal(seen, saved["state_dict"]["transformer.proj_out.weight"])


def test_prompt_embeddings_need_no_text_encoder(parts: Path, tmp_path: Path) -> None:
    def pipeline(module: Drawing) -> Any:
        made = Pipelines(parts)(module)
        made.text_encoder = made.tokenizer = None
        return made

    embeddings = {"prompt_embeds": torch.ones(1, 6, 16), "negative_prompt_embeds": torch.zeros(1, 6, 16), "seed": 5}
    both = [embeddings, embeddings | {"seed": 6}]
    train("auto", 1, SampleVideos(pipeline, both, every_n_steps=9, folder=tmp_path, **CALL))
    one, other = (read_picture(tmp_path / f"step-00000000-prompt-0{i}.png") for i in (0, 1))
    assert (one != other).any()


def test_what_is_no_function_that_makes_a_pipeline_is_named(parts: Path, tmp_path: Path) -> None:
    made = Pipelines(parts)(Drawing())
    with pytest.raises(TypeError, match=r"takes a function .*; it is a WanPipeline"):
        SampleVideos(made, ["1"], every_n_steps=9)
    with pytest.raises(TypeError, match=r"takes a function .*; it returned None"):
        train("auto", 1, SampleVideos(lambda module: None, ["1"], every_n_steps=9, folder=tmp_path, **CALL))


class Moved(torch.Tensor):
    """Notes where it was brought to."""

    places: ClassVar[list[Any]] = []

    def to(self, place: Any) -> torch.Tensor:  # type: ignore[override]
        self.places.append(place)
        return torch.zeros(self.shape)


def test_tensors_for_all_prompts_come_to_the_device_as_those_of_one_do(parts: Path, tmp_path: Path) -> None:
    shared = CALL | {"negative_prompt_embeds": torch.zeros(1, 6, 16).as_subclass(Moved)}
    prompts = [{"prompt_embeds": torch.ones(1, 6, 16)}]
    train("auto", 1, SampleVideos(Pipelines(parts), prompts, every_n_steps=9, folder=tmp_path, **shared))
    assert Moved.places == [torch.device("cpu")]


def fails(pipeline: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    torch.rand(1)
    raise MemoryError("no room for a video")


def test_a_failure_ends_the_run_with_its_cause_or_is_said(parts: Path, tmp_path: Path) -> None:
    def sampling(on_error: Any) -> Callback:
        call = CALL | {"callback_on_step_end": fails}
        return SampleVideos(Pipelines(parts), ["1"], every_n_steps=1, folder=tmp_path, on_error=on_error, **call)

    module = Drawing()
    with pytest.raises(MemoryError, match="no room") as caught:
        train("auto", 1, sampling("raise"), module=module)
    assert "rank 0, step 0" in "".join(caught.value.__notes__)
    assert module.transformer.training
    assert not module.transformer.condition_embedder.training
    without, _ = train("auto", 1)
    with pytest.warns(UserWarning, match="no room for a video"):
        state, _ = train("auto", 1, sampling("warn"))
    assert (state.losses, state.modes) == (without.losses, without.modes)


def test_a_video_that_cannot_be_written_is_not_logged_and_the_others_are(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_of_the_first(path: Path, frames: np.ndarray, fps: float) -> None:
        write_video(path, frames, fps)
        if "prompt-00" in path.name:
            path.write_bytes(path.read_bytes()[:100])
            raise OSError("disk full")

    monkeypatch.setattr("lightning_videoscale.callbacks.sample_videos.write_video", half_of_the_first)
    for suffix in ("mp4", "png"):  # of an earlier run into the same folder
        (tmp_path / f"step-00000000-prompt-00.{suffix}").write_bytes(b"old")
    samples = SampleVideos(Pipelines(parts), ["1", "3"], every_n_steps=9, folder=tmp_path, **CALL)
    with pytest.warns(UserWarning, match="could not write a video.*disk full"):
        train("auto", 1, samples, logger=TensorBoardLogger(tmp_path, version="run"), limit_train_batches=1)
    assert [file.name for file in tmp_path.glob("*.mp4")] == ["step-00000000-prompt-01.mp4"]
    board = EventAccumulator(str(tmp_path / "lightning_logs" / "run")).Reload()
    assert board.Tags()["images"] == ["samples/01"]


def test_a_failure_shows_no_videos_of_an_earlier_run(parts: Path, tmp_path: Path) -> None:
    (tmp_path / "step-00000000-prompt-00.mp4").write_bytes(b"old")
    call = CALL | {"callback_on_step_end": fails}
    samples = SampleVideos(Pipelines(parts), ["1"], every_n_steps=9, folder=tmp_path, on_error="warn", **call)
    with pytest.warns(UserWarning, match="no room for a video"):
        train("auto", 1, samples, limit_train_batches=1)
    assert not list(tmp_path.glob("*.mp4"))


def test_the_network_computes_in_the_trainers_precision_and_the_vae_in_its_own(parts: Path, tmp_path: Path) -> None:
    dtypes: dict[str, set[torch.dtype]] = {"network": set(), "vae": set()}

    def note(name: str) -> Callable[..., None]:
        return lambda _, args, output: dtypes[name].add(output.dtype)

    def pipeline(module: Drawing) -> Any:
        made = Pipelines(parts)(module)
        made.vae.decoder.conv_out.register_forward_hook(note("vae"))
        module.transformer.blocks[0].attn1.to_q.register_forward_hook(note("network"))
        return made

    samples = SampleVideos(pipeline, ["1"], every_n_steps=9, folder=tmp_path, **CALL)
    train("auto", 1, samples, precision="bf16-mixed", limit_train_batches=2)
    assert dtypes == {"network": {torch.bfloat16}, "vae": {torch.float32}}


def test_sampling_is_no_time_of_training(parts: Path, tmp_path: Path) -> None:
    def sleeps(pipeline: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.15)
        return kwargs

    monitor, logger = LoadBalanceMonitor(every_n_steps=2), MemoryLogger()
    call = CALL | {"callback_on_step_end": sleeps}
    samples = SampleVideos(lambda _: Pipelines(parts)(Drawing()), ["1"], every_n_steps=1, folder=tmp_path, **call)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, callbacks=[monitor, samples], logger=logger,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Slope(), batches_of([Meta(1, 100)] * 4))
    tokens, seconds = monitor.summary()["tokens"], 4 * 2 * 0.15
    assert tokens == 400
    assert tokens / monitor.summary()["tokens_per_second"] < seconds / 4
    steps = [sum(value for name, value in row.items() if name.startswith("time/")) for _, row in logger.balance()]
    assert len(steps) == 2
    assert max(steps) < 0.15


class Critic(Slope):
    """One optimizer's step in the first batch, and two in each of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for _ in range(2 if batch_idx else 1):
            self.manual_backward((self.slope * batch["x"]).mean())
            optimizer.step()


class Noted(SampleVideos):
    """Notes the step instead of sampling."""

    def __init__(self, every_n_steps: int) -> None:
        super().__init__(lambda _: None, ["1"], every_n_steps=every_n_steps, at_start=False)
        self.steps: list[int] = []

    def sample(self, trainer: pl.Trainer) -> None:
        self.steps.append(trainer.global_step)


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 3, 5, 7, 9, 11]), (2, [3, 5, 7, 9, 11]), (4, [5, 9]), (7, [7])])
def test_steps_that_a_batch_jumps_over_are_sampled_after_it(every: int, steps: list[int]) -> None:
    noted = Noted(every)
    trainer_with(noted).fit(Critic(), batches_of([Meta(1, 10)] * 6))
    assert noted.steps == steps


def test_a_resumed_run_samples_at_the_steps_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    data, whole, rest = batches_of([Meta(1, 10)] * 4), Noted(5), Noted(5)
    first = trainer_with()
    first.fit(Critic(), data)
    first.save_checkpoint(tmp_path / "run.ckpt")
    trainer_with(rest, max_epochs=2).fit(Critic(), data, ckpt_path=tmp_path / "run.ckpt")
    trainer_with(whole, max_epochs=2).fit(Critic(), data)
    assert (whole.steps, rest.steps) == ([5, 10], [10])


def test_what_is_refused(parts: Path, tmp_path: Path) -> None:
    make = Pipelines(parts)
    for prompts in ([], "a cat", {"prompt": "a cat"}):
        with pytest.raises(ValueError, match="list of at least one prompt"):
            SampleVideos(make, prompts, every_n_steps=1)
    with pytest.raises(ValueError, match="every_n_steps or every_n_epochs"):
        SampleVideos(make, ["1"])
    with pytest.raises(ValueError, match="got 0"):
        SampleVideos(make, ["1"], every_n_epochs=0)
    with pytest.raises(ValueError, match=r"Prompt 1 brings \['num_inference_steps'\]"):
        SampleVideos(make, ["1", {"prompt": "2", "num_inference_steps": 3}], every_n_steps=1)
    with pytest.raises(ValueError, match=r"Prompt 1 has \['prompt_embeds'\]"):
        SampleVideos(make, ["1", {"prompt_embeds": torch.ones(1)}], every_n_steps=1)
    with pytest.raises(ValueError, match="'ignore'"):
        SampleVideos(make, ["1"], every_n_steps=1, on_error="ignore")  # type: ignore[arg-type]
