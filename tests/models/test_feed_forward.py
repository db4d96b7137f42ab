"""diffusers' feed-forward, fused: the same numbers; the original wherever somebody has put something else into it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.attention import FeedForward
from torch import Tensor, nn

from lightning_videoscale.injection import InjectionReport, inject_fused_kernels
from tests.models import gradient_error

WIDTH, INNER = 16, 40


def feed_forward(activation: str = "gelu-approximate", **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(FeedForward(WIDTH, inner_dim=INNER, activation_fn=activation, **settings))


def run(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    assert x.grad is not None
    return output.detach(), {"x": x.grad} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def runs_the_kernel(model: nn.Module) -> bool:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.ones(2, WIDTH))
    return "lightning_videoscale::gelu" in {event.key for event in profile.key_averages()}


def assert_same_as_before(model: nn.Module, *, fused: bool) -> InjectionReport:
    output, gradients = run(model)
    report = inject_fused_kernels(model)
    fused_output, fused_gradients = run(model)
    assert runs_the_kernel(model) is fused
    assert torch.equal(fused_output, output)
    assert gradient_error(fused_gradients, gradients) < 1e-5
    return report


@pytest.mark.parametrize("bias", [True, False])
def test_fused(bias: bool) -> None:
    report = assert_same_as_before(feed_forward(bias=bias), fused=True)
    assert [entry.path for entry in report.replaced] == ["0"] and not report.skipped


@pytest.mark.parametrize("activation", ["gelu", "geglu", "swiglu", "linear-silu"])
def test_other_activations_are_not_meant(activation: str) -> None:
    report = assert_same_as_before(feed_forward(activation), fused=False)
    assert not report.replaced and not report.skipped


def test_a_final_dropout_counts_where_it_drops() -> None:
    assert_same_as_before(feed_forward(final_dropout=True), fused=True)
    model = feed_forward(final_dropout=True, dropout=0.5)
    with pytest.warns(UserWarning, match=r"net\.1 drops 0\.5"):
        assert not inject_fused_kernels(model).replaced
    model[0].net[1].p = 0.0  # type: ignore[index, union-attr]
    with pytest.warns(UserWarning, match=r"net\.3 drops 0\.5"):
        assert not inject_fused_kernels(model).replaced


class LowRank(nn.Module):
    """An adapter around a Linear, as PEFT puts it in its place."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapt(net: Any) -> None:
    net[0].proj = LowRank(net[0].proj)


def adapt_second(net: Any) -> None:
    net[2] = LowRank(net[2])


def parametrize(net: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(net[2])


def hook_first(net: Any) -> None:
    net[0].proj.register_forward_hook(lambda module, args, output: 2 * output)


def hook_second(net: Any) -> None:
    net[2].register_forward_pre_hook(lambda module, args: (2 * args[0],))


def hook_activation(net: Any) -> None:
    net[0].register_forward_hook(lambda module, args, output: output + 1)


def replace_forward(net: Any) -> None:
    linear = net[2]
    original = linear.forward
    linear.forward = lambda x: original(x) + 1


CHANGES = {
    adapt: "net.0.proj is no Linear of its own weight, but .*LowRank",
    adapt_second: "net.2 is no Linear of its own weight, but .*LowRank",
    parametrize: "net.2 is no Linear of its own weight, but .*ParametrizedLinear",
    hook_first: "net.0.proj has hooks",
    hook_second: "net.2 has hooks",
    hook_activation: "net.0 has hooks",
    replace_forward: "net.2 has a forward that was replaced on the instance",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_skipped_with_the_reason(change: Callable[[Any], None]) -> None:
    model = feed_forward()
    change(model[0].net)
    with pytest.warns(UserWarning, match=CHANGES[change]):
        assert_same_as_before(model, fused=False)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_later_is_called(change: Callable[[Any], None]) -> None:
    original = feed_forward()
    model = copy.deepcopy(original)
    inject_fused_kernels(model)
    for each in (original, model):
        torch.manual_seed(2)
        change(each[0].net)
    output, gradients = run(original)
    fused_output, fused_gradients = run(model)
    assert not runs_the_kernel(model)
    assert torch.equal(fused_output, output)
    assert gradient_error(fused_gradients, gradients) < 1e-6


def test_dropout_drops_in_training_and_is_fused_otherwise() -> None:
    model = feed_forward(dropout=0.5)
    model.eval()
    inject_fused_kernels(model)
    assert runs_the_kernel(model)
    model.train()
    assert not runs_the_kernel(model)
    torch.manual_seed(0)
    assert (feed_forward(dropout=0.5)(torch.ones(1, WIDTH)) != model(torch.ones(1, WIDTH))).any()


def test_compiled_without_a_graph_break() -> None:
    model = feed_forward()
    output, gradients = run(model)
    inject_fused_kernels(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    fused_output, fused_gradients = run(compiled)
    torch.testing.assert_close(fused_output, output)
    assert gradient_error({n.removeprefix("_orig_mod."): g for n, g in fused_gradients.items()}, gradients) < 1e-5
