"""The models and inputs of diffusers' own tests, held to one device: sizes that nobody chose for a plan."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.distributed.families.harness import Case, Family, errors_of
from tests.upstream.checkout import PACKAGE
from tests.upstream.in_step import fewest_heads

MESHES = [(1, 1, 2), (1, 2, 1)]


def errors_of_configs(parent: Path, files: Sequence[str]) -> Mapping[str, Mapping[Case, dict[str, float]]]:
    """By configuration in the files and by case, how far a model on slices is from the whole one, on this rank."""
    sys.path.insert(0, str(parent))
    return {
        name: {
            case: errors_of(case, family)
            for mesh in meshes_of(family)
            for case in (Case(name, mesh), Case(name, mesh, float32=True))
        }
        for file in files
        for name, family in families_in(file).items()
    }


def meshes_of(family: Family) -> list[tuple[int, int, int]]:
    """Those that have no more Ulysses ranks than the models have heads."""
    heads = fewest_heads(family.model(Case("")))
    return [mesh for mesh in MESHES if mesh[2] <= heads]


def families_in(file: str) -> dict[str, Family]:
    """By class, the configurations that a file of tests has."""
    module = import_module(file.removesuffix(".py").replace("/", "."))
    base = import_module(f"{PACKAGE}.models.testing_utils").BaseModelTesterConfig
    own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    return {cls.__name__: family_of(cls()) for cls in own if issubclass(cls, base) and "get_init_dict" in vars(cls)}


def family_of(config: Any) -> Family:
    def inputs() -> dict[str, Any]:
        # Framepack's numbers of frames are floats there. In float64 they would not go with its other positions.
        found = config.get_dummy_inputs()
        return {name: x.long() if name.startswith("indices_") else x for name, x in found.items()}

    return Family(lambda: config.model_class(**config.get_init_dict()), inputs)
