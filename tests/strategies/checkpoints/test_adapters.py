"""Runs that train adapters: checkpoints leave out the base, go on as if nothing had happened, and are exported."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from torch import Tensor, nn

from lightning_videoscale.cli.export import export
from lightning_videoscale.strategies.checkpoints.folder import CheckpointFolder
from lightning_videoscale.strategies.checkpoints.frozen import LEFT_OUT
from tests.distributed.pool import ProcessPool
from tests.distributed.strategies.resuming import read
from tests.distributed.zero import needs_deepspeed
from tests.models import gradient_error, tiny_wan
from tests.strategies.checkpoints.adapted import (
    Adapted,
    Surrounded,
    clips,
    fit,
    look,
    predict,
    stop_and_go_on,
    trainer,
)
from tests.strategies.checkpoints.checkpointing import message

Ranks = Callable[[int], ProcessPool]


def weights_in(path: Path) -> set[str]:
    return set(CheckpointFolder(path).tensors("state_dict"))


def left_out(path: Path) -> set[str]:
    return set(CheckpointFolder(path).rest["lightning_videoscale"][LEFT_OUT])


def same(a: Path, b: Path) -> bool:
    first, second = read(a), read(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# -- all backends ----------------------------------------------------------------------------------------------------

FAST = [
    ("ddp", "add_adapter", "rslora"),
    ("zero3", "two", "lora"),
]
ALL = [
    *itertools.product(("ddp", "fsdp2", "zero3"), ("add_adapter", "get_peft_model"), ("lora", "dora")),
    *itertools.product(("zero1", "zero2"), ("two",), ("dora",)),
    *itertools.product(("ddp", "fsdp2", "zero3"), ("get_peft_model",), ("head",)),
]


def marked(cases: list[tuple[str, str, str]], *marks: Any) -> list[Any]:
    return [
        pytest.param(*case, marks=[*marks, *([needs_deepspeed] if case[0].startswith("zero") else [])])
        for case in cases
    ]


@pytest.mark.parametrize(
    ("strategy", "way", "kind"), [*marked(FAST), *marked([case for case in ALL if case not in FAST], pytest.mark.full)]
)
def test_stopped_continued_and_exported(ranks: Ranks, tmp_path: Path, strategy: str, way: str, kind: str) -> None:
    expected = ranks(2).run(stop_and_go_on, strategy, way, kind, tmp_path)[0]
    assert same(tmp_path / "two.ckpt", tmp_path / "whole.ckpt")
    assert not same(tmp_path / "two.ckpt", tmp_path / "one.ckpt")
    held = weights_in(tmp_path / "two.ckpt")
    assert held and all("lora_" in name or "proj_out.modules_to_save" in name for name in held)
    assert held.isdisjoint(left_out(tmp_path / "two.ckpt"))
    assert held | left_out(tmp_path / "two.ckpt") == set(Adapted(way, kind).state_dict())

    export(tmp_path / "two.ckpt", tmp_path / "adapters")
    adapter = tmp_path / "adapters" / ("style" if way == "two" else "")
    assert torch.equal(look(peft.PeftModel.from_pretrained(tiny_wan(), adapter)), expected)
    other = peft.get_peft_model(tiny_wan(), peft.LoraConfig(target_modules=["to_k"]))
    other.load_adapter(adapter, "loaded")
    other.set_adapter("loaded")
    assert torch.equal(look(other), expected)
    assert (adapter / "pytorch_lora_weights.safetensors").exists() == (kind != "head")
    if kind != "head":
        pipeline = pipeline_of(tiny_wan())
        pipeline.load_lora_weights(adapter)
        assert torch.equal(look(pipeline.transformer), expected)
        model = tiny_wan()
        model.load_lora_adapter(adapter, weight_name="pytorch_lora_weights.safetensors")
        assert torch.equal(look(model), expected)

    tiny_wan().save_pretrained(tmp_path / "base")
    export(tmp_path / "two.ckpt", tmp_path / "merged", merge=True, base=tmp_path / "base")
    merged = look(WanTransformer3DModel.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, expected, rtol=0, atol=2e-6)
    assert not torch.allclose(look(tiny_wan()), expected, atol=1e-2), "the adapter does something"


def pipeline_of(transformer: nn.Module) -> WanPipeline:
    return WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=None, transformer=transformer)


PAIRS = [("fsdp2", "ddp"), ("ddp", "zero3"), ("zero3", "fsdp2"), ("zero1", "zero2"), ("fsdp2", "zero1")]


@pytest.mark.full
@needs_deepspeed
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_saved_by_one_strategy_continued_by_another(ranks: Ranks, tmp_path: Path, first: str, second: str) -> None:
    ranks(2).run(stop_and_go_on, first, "get_peft_model", "dora", tmp_path, second)
    got, wanted = read(tmp_path / "two.ckpt"), read(tmp_path / "whole.ckpt")
    assert gradient_error(got, wanted) <= 1e-5
    assert left_out(tmp_path / "two.ckpt") == left_out(tmp_path / "whole.ckpt")


# -- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.full)])
def test_what_changed_is_kept_frozen_or_not(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    ranks(1).run(stop_and_go_on, strategy, "add_adapter", "lora", tmp_path, module_class=Surrounded)
    assert same(tmp_path / "two.ckpt", tmp_path / "whole.ckpt")
    held = {name for name in weights_in(tmp_path / "two.ckpt") if not name.startswith("transformer.")}
    buffers = {f"statistics.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert held == {"teacher.weight", *buffers}
    gone = {name for name in left_out(tmp_path / "two.ckpt") if not name.startswith("transformer.")}
    assert gone == {"teacher.bias", "encoder.weight", "encoder.bias", "statistics.weight", "statistics.bias"}


def test_averages_of_adapters(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1).run(stop_and_go_on, "ddp", "add_adapter", "lora", tmp_path, average=True)
    assert same(tmp_path / "two.ckpt", tmp_path / "whole.ckpt")
    rest = CheckpointFolder(tmp_path / "one.ckpt").rest
    averaged = CheckpointFolder(tmp_path / "one.ckpt").tensors("state_dict")
    assert set(rest["current_model_state"]) == set(averaged)
    assert all("lora_" in name for name in averaged)
    assert not all(torch.equal(averaged[name], value) for name, value in rest["current_model_state"].items())


class HeadTrains(Adapted):
    def __init__(self) -> None:
        super().__init__()
        self.transformer.proj_out.requires_grad_(True)


class OneFrozen(Adapted):
    """No adapters; a part is frozen."""

    def __init__(self) -> None:
        super().__init__("inject")
        self.transformer = tiny_wan()
        self.transformer.proj_out.requires_grad_(False)


def save_all(folder: Path) -> None:
    fit(Adapted(), "ddp", 1, None, folder / "wanted.ckpt", save_frozen=True)
    fit(Adapted(kind="pissa"), "ddp", 1, None, folder / "pissa.ckpt")
    fit(HeadTrains(), "ddp", 1, None, folder / "head.ckpt")
    fit(OneFrozen(), "ddp", 1, None, folder / "full.ckpt")
    fit(OneFrozen(), "ddp", 1, None, folder / "asked.ckpt", save_frozen=False)


def test_all_is_saved_unless_adapters_alone_train(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1).run(save_all, tmp_path)
    for name, module in (
        ("wanted", Adapted()), ("pissa", Adapted(kind="pissa")), ("head", HeadTrains()), ("full", OneFrozen()),
    ):  # fmt: skip
        assert weights_in(tmp_path / f"{name}.ckpt") == set(module.state_dict()), name
        assert not left_out(tmp_path / f"{name}.ckpt")
    assert left_out(tmp_path / "asked.ckpt") == {"transformer.proj_out.weight", "transformer.proj_out.bias"}


# -- another base ----------------------------------------------------------------------------------------------------


def load_onto_others(folder: Path) -> list[str]:
    path = folder / "one.ckpt"
    fit(Adapted(), "ddp", 1, None, path)
    changed = Adapted()
    with torch.no_grad():
        changed.transformer.blocks[1].ffn.net[0].proj.bias[3] += 1e-6
    others = [changed, Adapted("get_peft_model"), Adapted(ffn_dim=32), Surrounded()]
    said = [message(partial(fit, module, "ddp", 2, path)) for module in others]
    return [*said, message(partial(predict, changed, path)), message(partial(predict, Adapted(), path))]


def test_another_base_is_an_error(ranks: Ranks, tmp_path: Path) -> None:
    values, names, shapes, more, outside_of_fit, right = ranks(1).run(load_onto_others, tmp_path)[0]
    assert all(text.startswith("CheckpointError") and "save_frozen=True" in text for text in (values, names, shapes))
    assert "1 of them" in values and "transformer.blocks.1.ffn.net.0.proj.bias has other values" in values
    assert "69 of them" in names and "is not there" in names
    assert "has shape [32, 48] and had [64, 48]" in shapes
    assert "teacher.weight" in more, "what the checkpoint lacks is an error, frozen or not"
    assert outside_of_fit == values and right == "no error"


def predicted(strategy: str, folder: Path) -> list[Tensor]:
    with trainer(strategy, 1) as runner:
        runner.fit(module := Adapted(), clips())
        runner.save_checkpoint(folder / "one.ckpt")
        before = torch.cat(runner.predict(module, clips()))
    return [before, predict(Adapted(seed=8), folder / "one.ckpt", strategy)]


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
def test_loaded_to_predict(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    before, after = ranks(2).run(predicted, strategy, tmp_path)[0]
    assert torch.equal(before, after)
