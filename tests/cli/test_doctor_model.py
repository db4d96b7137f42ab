"""`videoscale doctor --model`."""

from __future__ import annotations

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from diffusers import HunyuanVideoTransformer3DModel, SanaTransformer2DModel, WanTransformer3DModel
from torch import nn

from lightning_videoscale.cli import main
from lightning_videoscale.cli.doctor_model import examine_model
from tests.distributed.families.harness import Case
from tests.distributed.families.test_parity import FAMILIES
from tests.models import tiny_wan


class Module(pl.LightningModule):
    """Whose network is made when a Trainer asks for it, and is fused but for a block of a user's own."""

    def configure_model(self) -> None:
        self.transformer = tiny_wan()
        self.transformer.blocks[0].forward = lambda *args, **kwargs: args[0]


class Refusing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        raise OSError("no weights here")


def sana() -> nn.Module:
    return SanaTransformer2DModel(num_layers=1)


def any_network() -> nn.Module:
    """What a test puts in its place."""
    raise NotImplementedError


def found(target: str) -> dict[str, list[tuple[str, str]]]:
    rows: dict[str, list[tuple[str, str]]] = {}
    for finding in examine_model(target):
        rows.setdefault(finding.subject, []).append((finding.status, finding.detail))
    return rows


def test_a_class_of_diffusers() -> None:
    rows = found("diffusers:HunyuanVideoTransformer3DModel")
    assert rows["model"][0][1].startswith("HunyuanVideoTransformer3DModel, 12,821.0 M parameters")
    assert "streams video, text; held to one device by tests" in rows["split"][0][1]
    assert rows["exchange"] == [("ok", "60 x 24 heads of 128; even for ulysses_size 2, 3, 4, 6, 8, 12, 24")]
    assert rows["tokens"] == [("ok", "geometry= one of hunyuanvideo, hunyuanvideo-1.5")]
    assert [status for status, _ in rows["fused"]] == ["ok"] * len(rows["fused"])
    assert any("20 x HunyuanVideoTransformerBlock" in detail for _, detail in rows["fused"])
    with torch.device("meta"):
        assert type(HunyuanVideoTransformer3DModel(num_layers=1).transformer_blocks[0]).__name__ == (
            "HunyuanVideoTransformerBlock"
        ), "the look has left the classes as they were"


def test_a_module_of_ones_own_with_a_changed_block(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", f"{__name__}:Module", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["findings"]
    assert any(row["subject"] == "split" and "transformer (WanTransformer3DModel)" in row["detail"] for row in rows)
    kept = [row["detail"] for row in rows if row["subject"] == "fused" and row["status"] == "missing"]
    assert any("1 x WanTransformerBlock stays as it is" in detail for detail in kept)


def test_a_saved_folder(tmp_path: Path) -> None:
    tiny_wan().save_config(tmp_path)
    assert found(str(tmp_path))["split"][0][1].startswith(WanTransformer3DModel.__name__)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no model of the installed diffusers: KeyError"):
        examine_model(str(tmp_path))


def test_what_cannot_be_split_is_said() -> None:
    rows = found(f"{__name__}:sana")
    assert rows["split"][0][0] == "missing" and "SanaTransformer2DModel cannot be split: " in rows["split"][0][1]
    rows = found("torch.nn:Identity")
    assert [rows[subject][0][0] for subject in ("split", "costs", "tokens", "fused")] == ["missing"] * 4


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("wan", "neither package.module:name nor a folder"),
        ("diffusers:Wan9", "cannot be imported"),
        ("diffusers:WanTransformer3DModle", "Did you mean WanTransformer3DModel"),
        ("no_such_package:Wan", "cannot be imported"),
        (f"{__name__}:Refusing", "OSError: no weights here"),
        ("builtins:dict", "returns dict, which is no module"),
    ],
)
def test_what_is_no_model_is_named(target: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", target]) == 1
    assert message in capsys.readouterr().err


def test_a_pipeline_in_place_of_its_transformer(tmp_path: Path) -> None:
    tiny_wan().save_pretrained(tmp_path / "transformer")
    with pytest.raises(ValueError, match=r"no config\.json.*\['transformer'\]"):
        examine_model(str(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_looked_at(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.any_network", lambda: FAMILIES[family].model(Case(family)))
    rows = found(f"{__name__}:any_network")
    assert rows["split"][0][0] == "ok" and "fused" in rows
    assert rows["exchange"][0][0] == "ok" or family == "own_model"
