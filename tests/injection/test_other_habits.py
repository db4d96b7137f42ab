"""Fused models beside what else users do to a model: it computes what it did, or a part stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_videoscale.injection import inject_fused_kernels
from tests.distributed.families.harness import Case, run
from tests.distributed.families.test_parity import FAMILIES
from tests.models import gradient_error, tiny_wan
from tests.models.test_fused_families import run as outputs_and_gradients

SIZES: dict[str, Any] = {"frames": 2, "side": 3, "text": 5, "batch": 1}


def model_and_inputs(family: str, **settings: Any) -> tuple[nn.Module, Mapping[str, Any]]:
    case = Case(family, settings=SIZES | settings, float32=True)
    return FAMILIES[family].model(case), FAMILIES[family].inputs(case, 0)


def assert_same(family: str, eager: nn.Module, fused: nn.Module, inputs: Mapping[str, Any], within: float) -> None:
    (expected, of_eager), (found, of_fused) = (outputs_and_gradients(each, inputs) for each in (eager, fused))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=within, atol=within)
    assert of_fused.keys() == of_eager.keys(), family
    assert gradient_error(of_fused, of_eager) < within


@pytest.mark.parametrize("recompute_norms", [False, True])
@pytest.mark.parametrize("family", ["wan", "flux"])
def test_what_a_hook_writes_into_is_what_gradients_are_of(family: str, recompute_norms: bool) -> None:
    eager, inputs = model_and_inputs(family)
    fused = copy.deepcopy(eager)
    inject_fused_kernels(fused, recompute_norms=recompute_norms)
    for network in (eager, fused):
        blocks: Any = network.blocks if family == "wan" else network.transformer_blocks  # type: ignore[attr-defined]
        part = blocks[0].ffn if family == "wan" else blocks[0].ff
        part.register_forward_pre_hook(lambda _, args: (args[0].mul_(1.5), *args[1:]))
    assert_same(family, eager, fused, inputs, 1e-4)


def test_a_dropout_that_trains_alone_drops() -> None:
    network, inputs = model_and_inputs("wan")
    inject_fused_kernels(network.eval())
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
            module.train()
    with torch.no_grad():
        first, second = (run(network, inputs)[0][0] for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("family", ["ltx", "ltx2", "wan", "hunyuan_video"])
def test_hooks_see_the_arguments_that_they_saw(family: str) -> None:
    eager, inputs = model_and_inputs(family)
    fused = copy.deepcopy(eager)
    inject_fused_kernels(fused)
    seen: list[dict[str, tuple[int, list[str]]]] = []
    for network in (eager, fused):
        of_network: dict[str, tuple[int, list[str]]] = {}
        for path, module in network.named_modules():
            if path.endswith(("attn1", "attn2", "attn", ".ff", ".ffn")):

                def note(_: nn.Module, args: Any, kwargs: Any, path: str = path, to: Any = of_network) -> None:
                    to[path] = len(args), sorted(kwargs.keys() - {"detach_bias"})

                module.register_forward_pre_hook(note, with_kwargs=True)
        run(network, inputs)
        seen.append(of_network)
    assert seen[0] == seen[1] != {}


@pytest.mark.parametrize(
    ("family", "place", "name"),
    [
        ("flux", "transformer_flux", "apply_rotary_emb"),
        ("flux2", "transformer_flux2", "apply_rotary_emb"),
        ("wan", "transformer_wan", "_get_qkv_projections"),
        ("ltx2", "transformer_ltx2", "LTX2VideoTransformerBlock.get_mod_params"),
    ],
)
def test_a_helper_that_was_patched_before_is_called(
    family: str, place: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner: Any = import_module(f"diffusers.models.transformers.{place}")
    *inside, name = name.split(".")
    for part in inside:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), 0

    def patched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, staticmethod(patched) if inside else patched)
    eager, inputs = model_and_inputs(family)
    fused = copy.deepcopy(eager)
    inject_fused_kernels(fused)
    run(eager, inputs)
    of_eager, calls = calls, 0
    run(fused, inputs)
    assert calls == of_eager > 0


@pytest.mark.parametrize("family", ["flux", "flux2", "ltx", "wan", "z_image", "mochi"])
def test_parameters_of_one_half_under_autocast_of_the_other(family: str) -> None:
    eager, inputs = model_and_inputs(family)
    eager = eager.half()
    inputs = {name: x.half() if isinstance(x, Tensor) and x.dtype is torch.float32 else x for name, x in inputs.items()}
    fused = copy.deepcopy(eager)
    inject_fused_kernels(fused)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            expected, _ = run(eager, inputs)
        except RuntimeError as error:
            pytest.skip(f"diffusers' own code cannot: {error}")
        found, _ = run(fused, inputs)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x.float(), y.float(), rtol=0.1, atol=0.1 * float(y.float().std()))


def test_float64_under_autocast_stays_float64() -> None:
    eager, inputs = model_and_inputs("wan")
    eager = eager.double()
    inputs = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in inputs.items()}
    fused = copy.deepcopy(eager)
    inject_fused_kernels(fused)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same("wan", eager, fused, inputs, 1e-2)


def test_timesteps_of_tokens_have_gradients() -> None:
    eager = tiny_wan()
    fused = copy.deepcopy(eager)
    inject_fused_kernels(fused)
    found = []
    for network in (eager, fused):
        timesteps = torch.tensor([[0.0] * 3 + [500.0] * 3], requires_grad=True)
        network(torch.ones(1, 4, 1, 4, 6), timesteps, torch.ones(1, 5, 16)).sample.square().mean().backward()
        assert timesteps.grad is not None
        found.append(timesteps.grad)
    torch.testing.assert_close(found[1], found[0])
