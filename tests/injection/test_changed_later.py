"""What people do to a model that has its fused kernels already: nothing of it is passed over."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_videoscale.injection import inject_fused_kernels
from tests.models import gradient_error, tiny_wan
from tests.models.test_dit import MINE, a_block
from tests.models.test_wan import TOKENS, prepared, run, text_to_video

Change = Callable[[nn.Module], object]
BYPASSED = ("norm1", "norm2", "norm3", "attn1.norm_q", "attn2.norm_k", "ffn.net.0.proj", "ffn.net.1", "ffn.net.2")


def hooked_forward(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: 2 * output)


def hooked_backward(module: nn.Module) -> None:
    def double(module: nn.Module, gradients: Any) -> Any:
        return (2 * gradients[0],)

    module.register_full_backward_pre_hook(double)


def assert_as_without(change: Change, inputs: dict[str, Tensor], warning: str | None, *, before: bool) -> None:
    """Output to the bit and gradients, of a model that is changed before or after the injection."""
    plain, model = tiny_wan(), tiny_wan()
    change(plain)
    expected, gradients = run(plain, inputs)
    with contextlib.nullcontext() if warning is None else pytest.warns(UserWarning, match=warning):
        if before:
            change(model)
        inject_fused_kernels(model)
        if not before:
            change(model)
        output, fused_gradients = run(model, inputs)
    assert torch.equal(output, expected)
    assert gradient_error(fused_gradients, gradients) < 1e-5


@pytest.mark.parametrize("path", BYPASSED)
@pytest.mark.parametrize("hook", [hooked_forward, hooked_backward])
@pytest.mark.parametrize("before", [True, False])
def test_hooks_on_what_is_not_called(path: str, hook: Change, before: bool) -> None:
    *_, name = path.partition(".")[::2] if path.startswith(("attn", "ffn")) else (path,)
    with prepared(text_to_video, torch.float32) as (_, inputs):
        assert_as_without(
            lambda model: hook(model.get_submodule(f"blocks.0.{path}")),
            inputs,
            f"{name} has hooks, which would not be called",
            before=before,
        )


def replaced(path: str, by: nn.Module) -> Change:
    parent, _, name = path.rpartition(".")
    return lambda model: setattr(model.get_submodule(parent), name, copy.deepcopy(by))


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        (replaced("blocks.0.attn1.norm_q", nn.LayerNorm(48)), "norm_q is not a RMSNorm .* but torch.nn.*LayerNorm"),
        (replaced("blocks.0.attn1.norm_q", nn.Identity()), "norm_q is not a RMSNorm"),
        (replaced("blocks.1.norm2", nn.RMSNorm(48)), "norm2 .*FP32LayerNorm"),
        (replaced("blocks.1.ffn.net.1", nn.Tanh()), "net .*GELU"),
    ],
)
def test_another_module_in_its_place(change: Change, warning: str) -> None:
    with prepared(text_to_video, torch.float32) as (_, inputs):
        assert_as_without(change, inputs, warning, before=False)


def test_timesteps_that_were_grouped_reach_a_block_that_runs_as_before() -> None:
    timestep = torch.tensor([0.0, 500.0]).repeat_interleave(TOKENS // 2).expand(2, -1)
    with prepared(text_to_video, torch.float32) as (model, inputs):
        expected, _ = run(model, inputs | {"timestep": timestep})
        inject_fused_kernels(model)
        model.get_submodule("blocks.1.norm3").register_forward_hook(lambda *_: None)
        with pytest.warns(UserWarning, match="norm3 has hooks"):
            output, _ = run(model, inputs | {"timestep": timestep})
    torch.testing.assert_close(output, expected)


def test_a_block_s_output_may_be_written_into() -> None:
    """As one that is not fused may be: ControlNets and their like do so."""

    def change(model: nn.Module) -> None:
        model.get_submodule("blocks.0").register_forward_hook(lambda module, args, output: output.mul_(2))

    with prepared(text_to_video, torch.float32) as (_, inputs):
        assert_as_without(change, inputs, None, before=False)


def test_a_hook_before_compilation_is_called_in_it() -> None:
    with prepared(text_to_video, torch.float32) as (model, inputs):
        inject_fused_kernels(model)
        hooked_forward(model.get_submodule("blocks.0.norm1"))
        with pytest.warns(UserWarning, match="norm1 has hooks"):
            expected, _ = run(model, inputs)
        compile_blocks: Any = model.compile_repeated_blocks
        compile_blocks(fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(run(model, inputs)[0], expected, rtol=1e-5, atol=1e-5)


def test_hooks_on_the_norms_of_a_dit_block() -> None:
    plain, block = a_block(torch.float32), a_block(torch.float32)
    block.load_state_dict(plain.state_dict())
    inject_fused_kernels(block, extra_blocks=[MINE])
    for one in (plain, block):
        hooked_forward(one.get_submodule("norm2"))
    x, c = torch.randn(2, 5, 32), torch.randn(2, 32)
    with pytest.warns(UserWarning, match="norm2 has hooks"):
        assert torch.equal(block(x, c), plain(x, c))


def test_unknown_arguments_of_an_attention_are_refused_as_before() -> None:
    attention: Any = tiny_wan().blocks[0].attn1
    inject_fused_kernels(attention)
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        attention(torch.ones(1, 2, 48), scale=1.0)


def test_on_the_meta_device_and_without_any_warning() -> None:
    with prepared(text_to_video, torch.float32) as (model, inputs), warnings.catch_warnings():
        warnings.simplefilter("error")
        inject_fused_kernels(model)
        run(model, inputs)
        (output,) = model.to("meta")(**{name: x.to("meta") for name, x in inputs.items()}, return_dict=False)
        output.sum().backward()
    assert output.is_meta and all(p.grad is not None for p in model.parameters())
