"""What `ulysses_fsdp2` shards, from where it starts, and what it refuses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
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

from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Record, RectifiedFlow, all_assembled, assembled
from tests.models import gradient_error, lifted_float_casts, tiny_wan
from tests.strategies.fsdp2.training import Everything, clips, ddp, fsdp2, message, trainer

Ranks = Callable[[int], ProcessPool]


def fit_everything(
    strategy: Callable[..., Strategy], batch_size: int, settings: dict[str, Any]
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], set[str]]:
    record, module = Record(), Everything()
    with lifted_float_casts():
        runner = trainer(strategy(**settings), plugins=[DoublePrecision()], callbacks=[record], gradient_clip_val=0.5)
        runner.fit(module, clips(torch.float64, batch_size))
    whole = {name for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)}
    return record.gradients, all_assembled(module.named_parameters()), whole


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.full), 2])
def test_every_trained_parameter_gets_the_gradient_of_one_device(ranks: Ranks, replicas: int) -> None:
    expected, parameters, _ = ranks(1).run(fit_everything, ddp, 2, {"ulysses_size": 1})[0]
    settings = {"ulysses_size": 2, "replicas": replicas}
    for gradients, trained, whole in ranks(4).run(fit_everything, fsdp2, 1, settings):
        assert whole == {"vae.weight", "vae.bias", "adapter.weight", "adapter.bias"}
        assert {"scale", "embedding.weight", "transformer.patch_embedding.bias"} < gradients[0].keys()
        for got, wanted in zip(gradients, expected, strict=True):
            assert gradient_error(got, wanted) <= 1e-10
        assert gradient_error(trained, parameters) <= 1e-10


class InPlace(RectifiedFlow):
    """Changes what the network returns, a view of what its last layer made."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        velocity = self.transformer(batch["noise"], batch["time"], batch["text"]).sample
        velocity -= batch["latents"]
        return velocity.square().mean()


def fit_in_place(strategy: Callable[..., Strategy]) -> tuple[list[dict[str, Tensor]], list[str]]:
    record = Record()
    with lifted_float_casts(), warnings.catch_warnings(record=True) as said:
        trainer(strategy(), plugins=[DoublePrecision()], callbacks=[record]).fit(InPlace(), clips(torch.float64))
    return record.gradients, [str(each.message) for each in said if "view" in str(each.message)]


def test_outputs_may_be_changed_in_place(ranks: Ranks) -> None:
    expected, _ = ranks(1).run(fit_in_place, ddp)[0]
    for gradients, said in ranks(2).run(fit_in_place, fsdp2):
        assert not said  # torch warns of outputs that are views
        assert len(gradients) == 2
        assert all(gradient_error(got, wanted) <= 1e-10 for got, wanted in zip(gradients, expected, strict=True))


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

    def test_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.training_step(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def configure(**kwargs: Any) -> tuple[float, dict[str, Tensor]]:
    module = Configured(**kwargs)
    trainer(fsdp2(ulysses_size=1, replicas=2)).fit(module, clips())
    return float(module.encoder.weight), all_assembled(module.net.named_parameters())


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
    one_module = RectifiedFlow()
    one_module.transformer.blocks[1].ffn = one_module.transformer.blocks[0].ffn
    empty = RectifiedFlow()
    empty.transformer.blocks[0].tokens = nn.Parameter(torch.empty(0, 4))
    empty.words = nn.Embedding(3, 4, sparse=True)
    mixed = RectifiedFlow()
    mixed.transformer.blocks[1].attn1.bfloat16()
    return [
        message(fsdp2(ulysses_size=1), Configured(shard=True)),
        message(fsdp2(ulysses_size=1), Configured(without_reset=True)),
        message(fsdp2(), tied),
        message(fsdp2(), one_module),
        message(fsdp2(), empty),
        message(fsdp2(), mixed),
        message(fsdp2(replicas=3), RectifiedFlow()),
        message(fsdp2(replicas=1 + dist.get_rank()), RectifiedFlow()),
    ]


def test_models_that_cannot_be_sharded_are_refused_with_the_way_out(ranks: Ranks) -> None:
    sharded, undefined, tied, one_module, empty, mixed, replicas, disagree = ranks(2).run(refused_models)[0]
    assert "['net.blocks.0']" in sharded and "configure_model" in sharded
    assert "['net.table']" in undefined and "meta" in undefined
    assert "['transformer.blocks.1.ffn.net.2.weight']" in tied and "shared" in tied
    assert "'transformer.blocks.1.ffn.net.2.weight'" in one_module and "shared" in one_module
    assert "['transformer.blocks.0.tokens', 'words.weight']" in empty and "no elements" in empty
    assert "transformer.blocks.1" in mixed and "dtypes" in mixed
    assert "replicas=3" in replicas and "2 devices" in replicas
    assert "replicas=" in disagree and "rank 0: 1, rank 1: 2" in disagree


def run_from_a_checkpoint_without_the_table(folder: str) -> str:
    runner, path = trainer(fsdp2(ulysses_size=1)), str(Path(folder) / "without.ckpt")
    runner.fit(Configured(), clips())
    runner.save_checkpoint(path)
    module = Configured(without_reset=True)
    module.strict_loading = False
    try:
        runner.test(module, clips(), ckpt_path=path)
    except ValueError as error:
        return str(error)
    return "no error"


def test_what_the_checkpoint_lacks_too_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    message = ranks(2).run(run_from_a_checkpoint_without_the_table, str(tmp_path))[0]
    assert "['net.table']" in message and "meta" in message


class SecondOrder(RectifiedFlow):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


def step_of_lbfgs() -> list[str]:
    try:
        trainer(fsdp2()).fit(SecondOrder(), clips())
    except RuntimeError as error:
        return error.__notes__
    return []


def test_an_optimizer_that_knows_no_shards_is_named_in_its_error(ranks: Ranks) -> None:
    assert any("LBFGS" in note and "ulysses_ddp" in note for note in ranks(2).run(step_of_lbfgs)[0])


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
    assert "['adapter.weight', 'adapter.bias']" in ranks(2).run(unfreezing)[0]
