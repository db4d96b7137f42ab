"""`videoscale doctor --model`: what would be split, exchanged and fused of a model, and what not, and why.

The model is built on the meta device, so that its weights take no memory; nothing of it runs.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_videoscale.cli.finding import Finding
from lightning_videoscale.compat.diffusers import CLASS_NAME
from lightning_videoscale.cost import TransformerFlops
from lightning_videoscale.families import said_of
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.injection.report import OF_WHAT
from lightning_videoscale.parallel import SplitPlan
from lightning_videoscale.parallel.layout.heads import attention_sizes
from lightning_videoscale.parallel.plan import find_planned_modules, matching_modules, refusals

_OWN = "docs/your-model.md"


def examine_model(target: str) -> list[Finding]:
    """Looks at a model without running it.

    Args:
        target: ``"package.module:make"``, a class or a function that is called without arguments and returns a module;
            or a folder with the ``config.json`` of a transformer of diffusers.

    Raises:
        ValueError: If that is neither, or building it fails.
    """
    model = _build(target)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    named = Finding("model", "ok", f"{type(model).__name__}, {parameters / 1e6:,.1f} M parameters, on the meta device")
    return [named, *_split(model), *_work(model), *_fused(model)]


def _build(target: str) -> nn.Module:
    make = _saved(Path(target)) if Path(target).is_dir() else _named(target)
    try:
        with torch.device("meta"):
            model = make()
            if callable(configure := getattr(model, "configure_model", None)):
                configure()
    except Exception as error:  # of the user's code, of any kind
        raise ValueError(
            f"{target} cannot be built on the meta device: {type(error).__name__}: {error}. Give a function that only "
            "makes the modules, and loads no weights."
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{target} returns {type(model).__name__}, which is no module.")
    return model


def _named(target: str) -> Any:
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(f"{target!r} is neither package.module:name nor a folder with a config.json of diffusers.")
    sys.path.insert(0, os.getcwd())  # as `python script.py` does
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{target} cannot be imported: {error}. It is looked for in {os.getcwd()} and among what is installed."
        ) from error
    try:
        return getattr(found, name)
    except AttributeError as error:
        raise ValueError(f"{target} cannot be imported: {error}.{_near(name, dir(found))}") from error
    except ImportError as error:  # of names that are imported when they are first asked for
        raise ValueError(f"{target} cannot be imported: {error}.") from error


def _near(name: str, names: list[str]) -> str:
    close = get_close_matches(name, names, n=3)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _saved(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
        hint = f" Its folders {inside} have one: name one of them." if inside else ""
        raise ValueError(f"{folder} has no config.json of a transformer of diffusers.{hint}")
    try:
        import diffusers

        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        cls = getattr(diffusers, config[CLASS_NAME])
    except (ImportError, OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder} holds no model of the installed diffusers: {error!r}.") from error
    return lambda: cls.from_config(config)


def _split(model: nn.Module) -> Iterator[Finding]:
    planned = find_planned_modules(model)
    for name, reason in refusals(model).items():
        yield Finding(
            "split", "missing", f"{name} cannot be split: {reason}", "train it data-parallel (ulysses_size=1)"
        )
    if not planned and not refusals(model):
        yield Finding("split", "missing", "no network here has a split plan", f"write a SplitPlan, see {_OWN}")
    for path, plan in planned.items():
        network = model.get_submodule(path)
        held = "held to one device by tests" if plan.exact else "compared with one device at its first call"
        streams = f"streams {', '.join(_streams(plan))}; " if _streams(plan) else ""
        yield Finding("split", "ok", f"{_place(path, network)}: {streams}{held}")
        yield _exchange(network, plan)
        if whole := [place for pattern in plan.whole for place in matching_modules(network, pattern)]:
            yield Finding("whole", "slow", f"{len(whole)} modules compute all tokens on every rank, such as {whole[0]}")


def _exchange(network: nn.Module, plan: SplitPlan) -> Finding:
    sizes = Counter(attention_sizes(network, plan))
    if not sizes:
        return Finding("exchange", "missing", "the heads cannot be told", "name ulysses_size and ring_size yourself")
    heads = min(size.heads for size in sizes)
    even = [str(ranks) for ranks in range(2, heads + 1) if all(size.heads % ranks == 0 for size in sizes)]
    listed = ", ".join(f"{n} x {size.heads} heads of {size.head_dim}" for size, n in sizes.items())
    return Finding("exchange", "ok", f"{listed}; even for ulysses_size {', '.join(even) or '1 alone'}")


def _work(model: nn.Module) -> Iterator[Finding]:
    try:
        flops = TransformerFlops.of_module(model)
        yield Finding("costs", "ok", f"{flops.layers} layers, {flops.width} wide: known where nothing is measured")
    except ValueError as error:
        yield Finding(
            "costs", "missing", f"B * S^2 where nothing is measured: {error}", "run videoscale benchmark-shapes"
        )
    networks = (type(model.get_submodule(path)) for path in find_planned_modules(model))
    if geometries := said_of(networks, "GEOMETRIES"):
        yield Finding("tokens", "ok", f"geometry= one of {', '.join(geometries)}")
    else:
        yield Finding("tokens", "missing", "no VAE and patches are known", "give VideoDataModule a ModelGeometry")


def _fused(model: nn.Module) -> Iterator[Finding]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is skipped is listed here
        report = inject_fused_kernels(model, "reference")
    if report.fused_share is not None:
        yield Finding("fused", "ok" if report.fused_share else "missing", f"about {report.fused_share:.0%} {OF_WHAT}")
    for (name, what), count in Counter((each.class_name, each.what) for each in report.replaced).items():
        yield Finding("fused", "ok", f"{count} x {name}: {what}")
    for (name, reason), count in Counter((each.class_name, each.reason) for each in report.skipped).items():
        yield Finding("fused", "missing", f"{count} x {name} stays as it is: {reason}")
    if not report.replaced and not report.skipped:
        yield Finding("fused", "missing", "no block of a known kind", "write a FusedBlock, see docs/kernels.md")
    report.undo()


def _streams(plan: SplitPlan) -> list[str]:
    if not isinstance(plan.attention, Mapping):
        return []
    return list(dict.fromkeys(name for each in plan.attention.values() for name in (*each.queries, *each.key_streams)))


def _place(path: str, network: nn.Module) -> str:
    return f"{path} ({type(network).__name__})" if path else type(network).__name__
