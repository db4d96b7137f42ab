"""`EMA` on one device and under Lightning's own strategies; over ranks: tests/distributed/callbacks/test_ema.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.callbacks import EMA
from lightning_videoscale.trained_weights import AVERAGES


class Line(pl.LightningModule):
    """Trains the slope of a line, and its frozen offset from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)
        nn.init.constant_(self.line.weight, 1.0)
        nn.init.constant_(self.line.bias, 1.0)
        self.line.bias.requires_grad_(False)
        self.validated_with: list[float] = []
        self.tested_with: list[float] = []
        self.path: Path | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.line.bias.requires_grad_(self.global_step >= 2)
        return self.line(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated_with.append(self.line.weight.item())
        if self.path is not None:
            self.trainer.save_checkpoint(self.path)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.tested_with.append(self.line.weight.item())

    predict_step = test_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


DATA = DataLoader(torch.linspace(0.5, 1, 4)[:, None], batch_size=1)


def trainer(*callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    defaults = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "limit_val_batches": 1, "limit_test_batches": 1}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(callbacks=list(callbacks), enable_model_summary=False, **(defaults | quiet | kwargs))


def fitted(*callbacks: pl.Callback, **kwargs: Any) -> Line:
    module, start = Line(), kwargs.pop("start", None)
    trainer(*callbacks, **kwargs).fit(module, DATA, DATA, ckpt_path=start)
    return module


@pytest.mark.parametrize("settings", [{}, {"every": 2}, {"every": 2, "first": 1}])
def test_it_validates_with_what_lightnings_own_callback_does(settings: dict[str, int]) -> None:
    every, first = settings.get("every", 1), settings.get("first", 0)
    theirs = EMAWeightAveraging(decay=0.5, update_every_n_steps=every, update_starting_at_step=first)
    reference = fitted(theirs).validated_with
    assert fitted(EMA(0.5, every, first)).validated_with == pytest.approx(reference, abs=1e-6)
    assert len(set(reference)) > 1


def test_training_is_as_without(tmp_path: Path) -> None:
    plain, averaged = fitted(), fitted(EMA(0.5))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), averaged.parameters(), strict=True))
    assert averaged.validated_with != plain.validated_with


def test_a_single_file_resumes_to_the_bit(tmp_path: Path) -> None:
    end, half, resumed = (tmp_path / name for name in ("end.ckpt", "half.ckpt", "resumed.ckpt"))
    for epochs, start, path in ((2, None, end), (1, None, half), (2, half, resumed)):
        runner = trainer(EMA(0.5), max_epochs=epochs)
        runner.fit(Line(), DATA, DATA, ckpt_path=start)
        runner.save_checkpoint(path)
    one, other = (torch.load(path, weights_only=True)[AVERAGES] for path in (end, resumed))
    assert one.keys() == {"line.weight", "line.bias"} == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


class SavesInThirdStep(pl.Callback):
    """A callback of the user's, which stands before EMA."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def test_who_saves_before_the_average_is_updated_has_the_update(tmp_path: Path) -> None:
    saves, watched = SavesInThirdStep(tmp_path / "three.ckpt"), dict[int, float]()

    class Average(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
            with ema.average_weights():
                watched[trainer.global_step] = module.line.weight.item()

    ema = EMA(0.5)
    fitted(saves, ema, Average())
    saved = torch.load(saves.path, weights_only=True)[AVERAGES]
    assert saved["line.weight"].item() == watched[3] != watched[2]


def test_a_checkpoint_saved_within_validation_has_what_is_trained(tmp_path: Path) -> None:
    module = Line()
    module.path = tmp_path / "within.ckpt"
    trainer(EMA(0.5), max_epochs=1, num_sanity_val_steps=0).fit(module, DATA, DATA)
    saved = torch.load(module.path, weights_only=True)
    assert torch.equal(saved["state_dict"]["line.weight"], module.line.weight)
    assert saved[AVERAGES]["line.weight"].item() == module.validated_with[-1]
    assert module.validated_with[-1] != module.line.weight.item()


def test_tests_and_predictions_have_the_average_after_fit_and_from_a_checkpoint(tmp_path: Path) -> None:
    ema, module = EMA(0.5), Line()
    runner = trainer(ema)
    runner.fit(module, DATA, DATA)
    trained, average = module.line.weight.item(), module.validated_with[-1]
    assert trained != average
    runner.save_checkpoint(tmp_path / "end.ckpt")
    runner.test(module, DATA, verbose=False)
    runner.predict(module, DATA)
    assert set(module.tested_with) == {average}
    assert module.line.weight.item() == trained
    with ema.average_weights():
        with ema.average_weights():
            runner.validate(module, DATA, verbose=False)
        assert module.line.weight.item() == module.validated_with[-1] == average
    assert module.line.weight.item() == trained
    fresh = Line()
    trainer(EMA(0.5)).test(fresh, DATA, ckpt_path=tmp_path / "end.ckpt", verbose=False)
    assert fresh.tested_with == [average]


def test_what_was_tested_from_a_checkpoint_predicts_too(tmp_path: Path) -> None:
    module, runner = Line(), trainer(EMA(0.5), max_epochs=1)
    runner.fit(module, DATA, DATA)
    runner.save_checkpoint(tmp_path / "first.ckpt")
    average = module.validated_with[-1]
    runner.fit_loop.max_epochs = 2
    runner.fit(module, DATA, DATA)
    runner.test(module, DATA, ckpt_path=tmp_path / "first.ckpt", verbose=False)
    runner.predict(module, DATA)
    assert set(module.tested_with) == {average} and module.validated_with[-1] != average


def test_what_only_a_later_fit_trains_is_averaged_from_its_weights_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slope(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.line(batch).square().mean()

    def unset(x: Tensor, **kwargs: Any) -> Tensor:
        return torch.full_like(x, 1e6, **kwargs)

    monkeypatch.setattr(torch, "empty_like", unset)
    module, ema = Slope(), EMA(0.5)
    trainer(ema).fit(module, DATA)
    module.line.bias.requires_grad_(True)
    biases = [1.0]

    class Biases(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
            biases.append(0.5 * biases[-1] + 0.5 * module.line.bias.item())

    trainer(ema, Biases()).fit(module, DATA)
    with ema.average_weights():
        assert module.line.bias.item() == pytest.approx(biases[-1])


def test_what_a_later_fit_freezes_is_validated_and_saved_with_its_weights(tmp_path: Path) -> None:
    class Both(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.line(batch).square().mean()

    module, ema = Both(), EMA(0.5)
    module.line.bias.requires_grad_(True)
    trainer(ema).fit(module, DATA)
    module.line.bias.requires_grad_(False)
    second = trainer(ema)
    second.fit(module, DATA)
    second.save_checkpoint(tmp_path / "second.ckpt")
    saved = torch.load(tmp_path / "second.ckpt", weights_only=False)
    exported = saved["state_dict"] | saved[AVERAGES]
    with ema.average_weights():
        assert not torch.equal(module.line.weight, saved["state_dict"]["line.weight"])
        assert all(torch.equal(value, exported[name]) for name, value in module.state_dict().items())


def test_averages_of_bfloat16_are_float32(tmp_path: Path) -> None:
    ema = EMA(0.999)
    module = fitted(ema, precision="bf16-true")
    (average,) = (value for name, value in ema._average.items() if name == "line.weight")
    assert average.dtype is torch.float32 and module.line.weight.dtype is torch.bfloat16
    assert average != average.bfloat16()


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1\.5"):
        EMA(1.5)
    with pytest.raises(ValueError, match="every_n_steps=0"):
        EMA(0.5, every_n_steps=0)
    with pytest.raises(ValueError, match="ulysses_fsdp2"):
        trainer(EMA(), strategy=ModelParallelStrategy()).fit(Line(), DATA)
    theirs = trainer(EMAWeightAveraging(), max_epochs=1)
    theirs.fit(Line(), DATA, DATA)
    theirs.save_checkpoint(tmp_path / "theirs.ckpt")
    with pytest.raises(ValueError, match="current_model_state"):
        fitted(EMA(), start=tmp_path / "theirs.ckpt")
    with pytest.warns(UserWarning, match="save_weights_only"):
        fitted(EMA(), ModelCheckpoint(tmp_path, save_weights_only=True), enable_checkpointing=True, max_epochs=1)


class TwoSteps(Line):
    """Two optimizers take a step in each batch, and both count."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.line(batch).square().mean())
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.01) for _ in range(2)]


@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_steps_of_two_optimizers_leave_none_out(every: int) -> None:
    module, updated = TwoSteps(), list[int]()

    class Watched(EMA):
        def _move_towards(self, shares: Any) -> None:
            updated.append(module.global_step)
            super()._move_towards(shares)

    trainer(Watched(0.5, every_n_steps=every), max_epochs=3).fit(module, DATA, DATA)
    steps = 24  # of 12 batches
    assert len(updated) + 1 == len({(step - 1) // every for step in range(2, steps + 1, 2)})
