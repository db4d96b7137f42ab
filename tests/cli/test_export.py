"""`videoscale export`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import peft
import pytest
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.cli import main
from lightning_videoscale.cli.adapter_files import write_adapters
from lightning_videoscale.parallel import SplitPlan
from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from lightning_videoscale.strategies.checkpoints.folder import CheckpointError, read_weights
from tests.distributed.pool import ProcessPool
from tests.models import tiny_wan
from tests.strategies.checkpoints.adapted import Adapted, Look, fit, look

Ranks = Callable[[int], ProcessPool]


# -- export --------------------------------------------------------------------------------------------------------


class Video(pl.LightningModule):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.transformer = tiny_wan(**config)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.transformer(batch, torch.full((len(batch),), 500.0), torch.ones(len(batch), 5, 16)).sample.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train_video(folder: Path) -> Tensor:
    module = Video()
    strategy = SequenceParallelDDPStrategy(activation_checkpointing=True)
    runner = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=dist.get_world_size(), max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    runner.fit(module, DataLoader(torch.ones(2, 4, 2, 4, 4), batch_size=1))
    runner.save_checkpoint(folder / "video.ckpt")
    return look(module.transformer)


def test_export_for_from_pretrained(ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = ranks(1).run(train_video, tmp_path)[0]
    assert main(["export", str(tmp_path / "video.ckpt"), str(tmp_path / "wan")]) == 0
    assert "transformer ->" in capsys.readouterr().out
    model = WanTransformer3DModel.from_pretrained(tmp_path / "wan")
    assert torch.equal(look(model), expected)
    assert not torch.equal(look(tiny_wan()), expected)
    assert main(["export", str(tmp_path / "video.ckpt"), str(tmp_path / "vae"), "--module", "vae"]) == 1
    assert "['transformer']" in capsys.readouterr().err.replace("\n", " ")
    assert main(["export", str(tmp_path / "video.ckpt"), str(tmp_path / "averaged"), "--ema"]) == 1
    assert "EMA" in capsys.readouterr().err
    fresh = tiny_wan()
    fresh.load_state_dict(read_weights(tmp_path / "video.ckpt", "transformer"))
    assert torch.equal(look(fresh), expected)
    with pytest.raises(CheckpointError, match=r"'vae'.*\['transformer'\]"):
        read_weights(tmp_path / "video.ckpt", "vae")


def test_export_to_places_that_are_taken(ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = ranks(1).run(train_video, tmp_path)[0]
    (tmp_path / "file").write_text("mine")
    for place in ("file", "file/wan"):
        assert main(["export", str(tmp_path / "video.ckpt"), str(tmp_path / place)]) == 1
        assert "file" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"
    tiny_wan().save_pretrained(tmp_path / "wan", max_shard_size="50KB")
    assert main(["export", str(tmp_path / "video.ckpt"), str(tmp_path / "wan")]) == 0
    assert torch.equal(look(WanTransformer3DModel.from_pretrained(tmp_path / "wan")), expected)


# -- adapters --------------------------------------------------------------------------------------------------------


class Own(pl.LightningModule):
    """A network of the user's, which no library knows."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.net = peft.get_peft_model(self.net, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch[:, :3, 0, 0, 0]).square().mean()

    configure_optimizers = Adapted.configure_optimizers


@pytest.mark.parametrize("place", ["..", "{tmp_path}"])
def test_adapters_stay_in_their_folder(tmp_path: Path, place: str) -> None:
    names = ["style", f"{place.format(tmp_path=tmp_path)}/other"]
    described = {
        "configs": {name: {"peft_type": "LORA"} for name in names},
        "files": {name: {"lora_A.weight": "x"} for name in names},
    }
    with pytest.raises(CheckpointError, match="/other"):
        write_adapters(described, lambda _: torch.ones(1), tmp_path / "adapters")
    assert not (tmp_path / "other").exists()


def train_adapted(folder: Path) -> dict[str, Tensor]:
    seen = Look()
    fit(Adapted(), "ddp", 1, None, folder / "alone.ckpt", [seen])
    fit(Adapted(), "ddp", 1, None, folder / "all.ckpt", save_frozen=True)
    fit(Adapted("inject"), "ddp", 1, None, folder / "undescribed.ckpt")
    residual = Look()
    fit(Adapted("get_peft_model", "pissa"), "ddp", 1, None, folder / "pissa.ckpt", [residual])
    scaled = Adapted("two")
    scaled.transformer.set_adapters(["style", "first"], [1.0, 0.5])
    fit(scaled, "ddp", 1, None, folder / "scaled.ckpt")
    own = Own()
    fit(own, "ddp", 1, None, folder / "own.ckpt", modules=["net"], plan=SplitPlan({}, {}, {}, nothing_to_split))
    return {"alone": seen.seen, "pissa": residual.seen, "own": own.net(torch.ones(3)).detach()}


def nothing_to_split(model: nn.Module, context: Any) -> Callable[[], None]:
    return lambda: None


def content(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header, whose order in the file is any."""
    with safe_open(file, "pt") as opened:
        return {key: opened.get_tensor(key) for key in opened.keys()}, opened.metadata()  # noqa: SIM118


def test_adapters(ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = ranks(1).run(train_adapted, tmp_path)[0]

    def run(name: str, *options: str) -> tuple[int, str]:
        status = main(["export", str(tmp_path / f"{name}.ckpt"), str(tmp_path / f"{name}{len(options)}"), *options])
        printed = capsys.readouterr()
        return status, " ".join((printed.out + printed.err).split())

    def base_at(name: str, **config: Any) -> tuple[str, str]:
        tiny_wan(**config).save_pretrained(tmp_path / name)
        return "--base", str(tmp_path / name)

    base, other = base_at("base"), base_at("other", ffn_dim=32)

    # Files of adapters come from either checkpoint, and are the same; merged weights need the base.
    assert run("alone") == (0, said := run("all")[1].replace("all0", "alone0"))
    assert "'style'" not in said and "adapter style" in said and "peft" in said and "diffusers" in said
    for name in ("adapter_model.safetensors", "pytorch_lora_weights.safetensors"):
        (tensors, header), (others, theirs) = (content(tmp_path / folder / name) for folder in ("alone0", "all0"))
        assert header == theirs and tensors.keys() == others.keys()
        assert all(torch.equal(value, others[key]) for key, value in tensors.items())
    configs = [(tmp_path / folder / "adapter_config.json").read_text() for folder in ("alone0", "all0")]
    assert configs[0] == configs[1]
    assert run("alone", "--merge", *base)[0] == run("all", "--merge")[0] == 0
    for folder in ("alone3", "all1"):
        merged = look(WanTransformer3DModel.from_pretrained(tmp_path / folder))
        torch.testing.assert_close(merged, expected["alone"], rtol=0, atol=2e-6)
    for status, said in (run("alone", "--merge"), run("alone", "--merge", *other), run("all", "--merge", *base)):
        assert status == 1 and "--base" in said + "--base" * ("shape [32, 48]" in said) and len(said) < 600

    # An initial value that was taken out of the base, and a scale, are in no file.
    for name, word in (("pissa", "--merge"), ("scaled", "set_adapters")):
        status, said = run(name)
        assert status == 1 and word in said and len(said) < 400
    assert run("pissa", "--merge")[0] == 0
    merged = look(WanTransformer3DModel.from_pretrained(tmp_path / "pissa1"))
    torch.testing.assert_close(merged, expected["pissa"], rtol=0, atol=1e-5)

    # Any network's adapter is written; only diffusers' can be built again.
    assert run("own")[0] == 0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    assert torch.equal(peft.PeftModel.from_pretrained(net, tmp_path / "own0")(torch.ones(3)), expected["own"])
    status, said = run("own", "--merge")
    assert status == 1 and "merge_and_unload" in said

    for options in ((), ("--merge",)):
        status, said = run("undescribed", *options)
        assert status == 1 and len(said) < 600 and ("leave out --merge" if options else "read_weights") in said
