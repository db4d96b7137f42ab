"""The table of families: every file has its line, and what a file says is found."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from lightning_videoscale import models
from lightning_videoscale.cost import TRANSFORMERS, TransformerFlops
from lightning_videoscale.cost.geometry import GEOMETRIES, ModelGeometry
from lightning_videoscale.families import FAMILIES, known, said
from tests.models import tiny_wan

BY_CLASS = ("SPLIT_PLANS", "REFUSALS", "FUSED_BLOCKS", "FLOPS")


def test_every_file_has_its_line() -> None:
    folder = Path(str(models.__file__)).parent
    files = {file.stem for file in folder.glob("*.py")} | {file.parent.name for file in folder.glob("*/__init__.py")}
    files -= {"__init__", "hidden_exchange"}  # what families share
    assert files == {file.split(".")[0] for file in FAMILIES.values()}
    for file in FAMILIES.values():
        assert any(said(file, kind) for kind in (*BY_CLASS, "GEOMETRIES", "TRANSFORMERS")), file


@pytest.mark.parametrize("line", FAMILIES)
def test_the_classes_of_a_file_are_those_of_its_lines(line: str) -> None:
    parent, _, last = line.rpartition(".")
    if line.startswith("diffusers."):
        assert hasattr(import_module(parent), last) if last[0].isupper() else import_module(line)
    for kind in BY_CLASS:
        for path in said(FAMILIES[line], kind):
            home, _, name = path.rpartition(".")
            file = FAMILIES.get(path, FAMILIES.get(home))
            assert file == FAMILIES[line]
            if home.startswith("diffusers."):
                cls = getattr(import_module(home), name)
                assert known(kind, cls) is known(kind, type(name, (cls,), {})) is said(file, kind)[path]
                assert known(kind, cls, {path: "mine"}) == "mine"
    for block in said(FAMILIES[line], "FUSED_BLOCKS").items():
        assert block[0] == block[1].class_path


def test_sizes_are_found_by_name() -> None:
    assert GEOMETRIES["hunyuanvideo"] == ModelGeometry(text_tokens=256)
    assert {"wan2.1", "wan2.2", "wan2.2-ti2v-5b", "cogvideox", "ltx-video"} < set(GEOMETRIES)
    assert TRANSFORMERS["cogvideox-5b"].layers == 42
    published = {"wan2.1-14b", "wan2.2-ti2v-5b", "wan2.1-vace-14b", "skyreels-v2-1.3b", "hunyuanvideo", "ltx-video"}
    assert published < set(TRANSFORMERS)
    assert "wan9" not in GEOMETRIES and "wan9" not in TRANSFORMERS


def test_a_family_reads_its_configuration() -> None:
    model = tiny_wan()
    assert known("FLOPS", type(model))(model.config) == TransformerFlops(layers=2, width=48, ffn_width=64)
    assert TransformerFlops.of_module(model) == TransformerFlops.from_config(model.config)


def test_a_class_of_no_family() -> None:
    assert known("FUSED_BLOCKS", ModelGeometry) is None
