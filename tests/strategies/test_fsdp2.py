"""`ulysses_fsdp2` as a Trainer uses it: what is sharded, in which precision, what is refused, loops and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, Record, RectifiedFlow, assembled
from tests.models import gradient_error, lifted_float_casts, tiny_wan

Ranks = Callable[[int], ProcessPool]


def trainer(strategy: Strategy | str, **kwargs: Any) -> pl.Trainer:
    defaults = {
        "max_steps": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "devices": dist.get_world_size() if dist.is_initialized() else 1,
    }
    return pl.Trainer(strategy=strategy, accelerator="cpu", **(defaults | kwargs))


def clips(dtype: torch.dtype = torch.float32, batch_size: int = 1) -> DataLoader[Any]:
    return DataLoader(Clips((2, 4, 4), dtype, length=16), batch_size=batch_size)


def ddp(**kwargs: Any) -> SequenceParallelDDPStrategy:
    return SequenceParallelDDPStrategy(**kwargs)


def fsdp2(**kwargs: Any) -> SequenceParallelFSDP2Strategy:
    return SequenceParallelFSDP2Strategy(**kwargs)


def message(strategy: SequenceParallelFSDP2Strategy, module: pl.LightningModule, **kwargs: Any) -> str:
    try:
        trainer(strategy, **kwargs).fit(module, clips())
    except ValueError as error:
        return str(error)
    return "no error"


# -- precision -----------------------------------------------------------------------------------------------------


def fit_in(strategy: Callable[..., Strategy], precision: str) -> tuple[list[float], list[dict[str, Tensor]]]:
    record = Record()
    torch.manual_seed(3)
    # One step: AdamW turns the rounding of near-zero gradients into whole steps of the weights.
    runner = trainer(strategy(ulysses_size=1), precision=precision, callbacks=[record], max_steps=1)
    runner.fit(RectifiedFlow(), clips())
    return record.losses, record.gradients


def test_mixed_precision_is_that_of_ddp(ranks: Ranks) -> None:
    expected = ranks(2).run(fit_in, ddp, "bf16-mixed")
    for (losses, [gradients]), (expected_losses, [expected_gradients]) in zip(
        ranks(2).run(fit_in, fsdp2, "bf16-mixed"), expected, strict=True
    ):
        assert losses == expected_losses, "rounded before it travels or after: the same bits enter every product"
        assert gradient_error(gradients, expected_gradients) <= 1e-2
        different = {name for name, x in expected_gradients.items() if not torch.equal(gradients[name], x)}
        # The blocks' gradients with respect to the text are added up in another order, in bfloat16 either way.
        assert all(name.startswith("transformer.condition_embedder.text_embedder.") for name in different)


def test_bf16_true_and_32_true(ranks: Ranks) -> None:
    for precision, tolerance in (("bf16-true", 1e-2), ("32-true", 1e-6)):
        losses, gradients = ranks(2).run(fit_in, fsdp2, precision)[0]
        expected_losses, expected_gradients = ranks(2).run(fit_in, ddp, precision)[0]
        assert losses == expected_losses
        assert (
            gradient_error(
                {name: x.float() for name, x in gradients[0].items()},
                {name: x.float() for name, x in expected_gradients[0].items()},
            )
            <= tolerance
        )


class DtypesInForward(RectifiedFlow):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, torch.dtype] = {}
        for block in self.transformer.blocks:
            block.register_forward_hook(self.note)

    def note(self, block: nn.Module, *_: Any) -> None:
        assert not any(isinstance(p, DTensor) for p in block.parameters())
        self.seen |= {name: p.dtype for name, p in block.named_parameters()}


def gathered_dtypes() -> tuple[dict[str, torch.dtype], set[torch.dtype]]:
    module = DtypesInForward()
    trainer(fsdp2(), precision="bf16-mixed", max_steps=1).fit(module, clips())
    return module.seen, {p.dtype for p in module.parameters()}


def test_matrices_travel_in_bfloat16_and_what_is_added_in_float32_in_float32(ranks: Ranks) -> None:
    seen, stored = ranks(2).run(gathered_dtypes)[0]
    assert stored == {torch.float32}
    full = {name for name, dtype in seen.items() if dtype is torch.float32}
    assert full == {
        "scale_shift_table",
        "norm2.weight",
        "norm2.bias",
        *(f"attn{i}.norm_{x}.weight" for i in (1, 2) for x in "qk"),
    }
    assert {seen[name] for name in seen.keys() - full} == {torch.bfloat16}


def test_the_names_are_registered() -> None:
    for name, ring_size in (("ulysses_fsdp2", 1), ("usp_fsdp2", 2)):
        selected = pl.Trainer(strategy=name, accelerator="cpu").strategy
        assert isinstance(selected, SequenceParallelFSDP2Strategy)
        assert selected._settings.ring_size == ring_size


def refused_precisions() -> list[str]:
    return [
        message(fsdp2(), RectifiedFlow(), plugins=[pl.plugins.HalfPrecision("16-true")]),
        message(fsdp2(), RectifiedFlow(), plugins=[pl.plugins.MixedPrecision("16-mixed", "cpu")]),
    ]


def test_other_precisions_are_refused(ranks: Ranks) -> None:
    true, mixed = ranks(2).run(refused_precisions)[0]
    assert "does not support precision='16-true': choose one of 32-true, bf16-mixed, bf16-true, 64-true" in true
    assert "precision='16-mixed'" in mixed
    assert "bf16-mixed needs no loss scaling" in mixed


# -- what is sharded -----------------------------------------------------------------------------------------------


class Everything(RectifiedFlow):
    """A bare parameter, a child that is no network, a frozen network, and a network frozen in part."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.scale = nn.Parameter(torch.rand(1) + 1)
            self.embedding = nn.Embedding(3, 16)  # fewer rows than ranks
            self.vae = nn.Linear(4, 4).requires_grad_(False)
            self.adapter = nn.Linear(16, 16).requires_grad_(False)
        for name, parameter in self.transformer.named_parameters():
            parameter.requires_grad_("attn" in name or name == "patch_embedding.bias")

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        text = batch["text"] + self.embedding.weight.mean(0) + self.adapter(self.embedding(torch.tensor(1)))
        return self.loss(batch | {"text": text, "latents": self.vae(batch["latents"])})

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = (self(batch) * self.scale).sum()  # a parameter of its own after its own forward
        self.log("loss", loss)
        return loss


def fit_everything(
    strategy: Callable[..., Strategy], batch_size: int, settings: dict[str, Any]
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], set[str]]:
    record, module = Record(), Everything()
    with lifted_float_casts():
        runner = trainer(strategy(**settings), plugins=[DoublePrecision()], callbacks=[record], gradient_clip_val=0.5)
        runner.fit(module, clips(torch.float64, batch_size))
    whole = {name for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)}
    return record.gradients, {name: assembled(p) for name, p in module.named_parameters()}, whole


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_trained_parameter_gets_the_gradient_of_one_device(ranks: Ranks, replicas: int) -> None:
    expected, parameters, _ = ranks(1).run(fit_everything, ddp, 2, {"ulysses_size": 1})[0]
    settings = {"ulysses_size": 2, "replicas": replicas}
    for gradients, trained, whole in ranks(4).run(fit_everything, fsdp2, 1, settings):
        assert whole == {"vae.weight", "vae.bias", "adapter.weight", "adapter.bias"}
        assert {"scale", "embedding.weight", "transformer.patch_embedding.bias"} < gradients[0].keys()
        for got, wanted in zip(gradients, expected, strict=True):
            assert gradient_error(got, wanted) <= 1e-10
        assert gradient_error(trained, parameters) <= 1e-10


class Teacher(RectifiedFlow):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = tiny_wan().requires_grad_(False)
        self.critic = tiny_wan()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = (batch["noise"], batch["time"], batch["text"])
        return super().loss(batch) + (self.critic(*inputs).sample - self.teacher(*inputs).sample).square().mean()


def sharded_blocks(shard_frozen: list[str] | None) -> tuple[list[str], bool]:
    module = Teacher()
    trainer(fsdp2(modules=["transformer"], shard_frozen=shard_frozen)).fit(module, clips())
    same = torch.allclose(module.teacher(**_inputs()).sample, tiny_wan()(**_inputs()).sample, atol=1e-5)
    return [path for path, child in module.named_modules() if isinstance(child, FSDPModule)], same


def _inputs() -> dict[str, Tensor]:
    batch = next(iter(clips()))
    return {"hidden_states": batch["noise"], "timestep": batch["time"], "encoder_hidden_states": batch["text"]}


def test_networks_that_train_are_sharded_by_block_and_frozen_ones_when_asked(ranks: Ranks) -> None:
    def units(network: str) -> list[str]:
        return [network, f"{network}.blocks.0", f"{network}.blocks.1"]

    paths, same = ranks(2).run(sharded_blocks, None)[0]
    assert paths == units("transformer") + units("critic")
    assert same
    paths, same = ranks(2).run(sharded_blocks, ["teacher"])[0]
    assert paths == units("transformer") + units("teacher") + units("critic")
    assert same


def fit_unseeded() -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    module = RectifiedFlow()
    module.vae = nn.Linear(3, 3).requires_grad_(False)
    nn.init.normal_(module.transformer.proj_out.weight)
    initial = module.transformer.proj_out.weight.detach().clone()
    runner = trainer(fsdp2(replicas=2), limit_train_batches=0)
    runner.fit(module, clips())
    return [initial, assembled(module.transformer.proj_out.weight), module.vae.weight.detach()]


def test_all_ranks_start_from_rank_zeros_model(ranks: Ranks) -> None:
    results = ranks(4).run(fit_unseeded)
    for _, weight, frozen in results:
        assert torch.equal(weight, results[0][0])
        assert torch.equal(frozen, results[0][2])


# -- configure_model and the meta device ---------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.last(x)


class Configured(pl.LightningModule):
    """Builds its networks late, one of them without memory."""

    def __init__(self, shard: bool = False, without_reset: bool = False) -> None:
        super().__init__()
        self.shard, self.without_reset = shard, without_reset
        self.net: Net | None = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        self.encoder = nn.Linear(1, 1).requires_grad_(False)
        nn.init.constant_(self.encoder.weight, 7.0)
        with torch.device("meta"):
            self.net = Net()
            if self.without_reset:
                self.net.first.register_parameter("table", nn.Parameter(torch.empty(3)))
                self.net.table = nn.Parameter(torch.empty(3))
        if self.shard:
            fully_shard(self.net.blocks[0])

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net(batch["time"][:, None]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def configure(**kwargs: Any) -> tuple[float, dict[str, Tensor]]:
    module = Configured(**kwargs)
    trainer(fsdp2(ulysses_size=1, replicas=2)).fit(module, clips())
    return float(module.encoder.weight), {name: assembled(p) for name, p in module.net.named_parameters()}


def test_a_model_built_on_the_meta_device_is_initialized_and_the_rest_left_alone(ranks: Ranks) -> None:
    results = ranks(4).run(configure)
    for encoder, parameters in results:
        assert encoder == 7.0
        for name, parameter in parameters.items():
            assert torch.equal(parameter, results[0][1][name]), "replicas are equal"
            assert 0 < float(parameter.abs().max()) < 3


def refused_models() -> list[str]:
    tied = RectifiedFlow()
    blocks = tied.transformer.blocks
    blocks[1].ffn.net[2].weight = blocks[0].ffn.net[2].weight
    mixed = RectifiedFlow()
    mixed.transformer.blocks[1].attn1.bfloat16()
    return [
        message(fsdp2(ulysses_size=1), Configured(shard=True)),
        message(fsdp2(ulysses_size=1), Configured(without_reset=True)),
        message(fsdp2(), tied),
        message(fsdp2(), mixed),
        message(fsdp2(replicas=3), RectifiedFlow()),
        message(fsdp2(replicas=1 + dist.get_rank()), RectifiedFlow()),
    ]


def test_models_that_cannot_be_sharded_are_refused_with_the_way_out(ranks: Ranks) -> None:
    sharded, undefined, tied, mixed, replicas, disagree = ranks(2).run(refused_models)[0]
    assert "to ['net.blocks.0']: leave it out of configure_model" in sharded
    assert "['net.table'] were built on the meta device" in undefined
    assert "['transformer.blocks.1.ffn.net.2.weight'] are shared" in tied
    assert "transformer.blocks.1 are stored in several dtypes" in mixed
    assert "replicas=3 does not divide the 2 devices" in replicas
    assert "different values of replicas= for the strategy: rank 0: 1, rank 1: 2" in disagree


class Unfreeze(pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.adapter.requires_grad_(True)


def unfreezing() -> str:
    try:
        trainer(fsdp2(), callbacks=[Unfreeze()]).fit(Everything(), clips())
    except ValueError as error:
        return str(error)
    return "no error"


def test_what_was_frozen_and_kept_whole_cannot_train_later(ranks: Ranks) -> None:
    assert "['adapter.weight', 'adapter.bias'] were frozen" in ranks(2).run(unfreezing)[0]


# -- loops and checkpoints -----------------------------------------------------------------------------------------


def run_all_loops(strategy: Callable[..., Strategy], settings: dict[str, Any]) -> list[float]:
    """Sanity check, training, validation inside and outside of fit, test, prediction, and training on."""
    module, loader = RectifiedFlow(), clips(torch.float64)
    values: list[float] = []
    with lifted_float_casts():
        runner = trainer(strategy(**settings), plugins=[DoublePrecision()], limit_val_batches=2, val_check_interval=1)
        runner.fit(module, loader, clips(torch.float64))
        values.append(float(runner.callback_metrics["val_loss"]))
        values.append(runner.validate(module, loader, verbose=False)[0]["val_loss"])
        values.append(runner.test(module, loader, verbose=False)[0]["test_loss"])
        predicted = runner.predict(module, loader)
        values += [float(value) for value in predicted]
        runner.fit_loop.epoch_loop.max_steps = 4
        runner.fit(module, loader)
        values.append(float(runner.callback_metrics["loss"]))
    return values


def test_all_loops_one_after_the_other(ranks: Ranks) -> None:
    expected = ranks(1).run(run_all_loops, ddp, {})[0]
    assert len(expected) > 10
    for values in ranks(4).run(run_all_loops, fsdp2, {"activation_checkpointing": True}):
        assert values == pytest.approx(expected, rel=1e-10)


def train_and_resume(folder: str, meta: bool) -> list[dict[str, Tensor]]:
    def run(steps: int, ckpt_path: str | None = None, meta: bool = False) -> tuple[pl.Trainer, dict[str, Tensor]]:
        with torch.device("meta") if meta else nullcontext():
            module = Everything()
        if meta:  # its buffers are not part of a checkpoint
            module.transformer.rope = tiny_wan().rope
        runner = trainer(fsdp2(), max_steps=steps, precision="bf16-mixed")
        one_clip = DataLoader(Clips((2, 4, 4), torch.float32, length=1))  # whatever the order, every step sees the same
        runner.fit(module, one_clip, ckpt_path=ckpt_path)
        return runner, {name: assembled(p) for name, p in module.named_parameters()}

    _, straight = run(4)
    stopped, _ = run(2)
    path = str(Path(folder) / "stopped.ckpt")
    stopped.save_checkpoint(path)
    _, resumed = run(4, path, meta)
    return [straight, resumed]


@pytest.mark.parametrize("meta", [False, True])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(ranks: Ranks, tmp_path: Path, meta: bool) -> None:
    for straight, resumed in ranks(2).run(train_and_resume, str(tmp_path), meta):
        for name, parameter in straight.items():
            assert torch.equal(resumed[name], parameter), name
