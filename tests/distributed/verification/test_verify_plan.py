"""What a plan forgot is an error on the first call, on all ranks, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_videoscale.parallel import SequenceMesh, parallelize, verify_plan
from tests.distributed.pool import ProcessPool
from tests.distributed.verification.networks import Applied, Attention, Counter, SharedMean, first_call, network, plan

Ranks = Callable[[int], ProcessPool]


class CrossAttention(nn.Module):
    """Attends to as many tokens of a text as a rank of two has of nine."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.attention = nn.Parameter(torch.randn(1, 5, 8)), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        text = self.text.expand(x.shape[0], -1, -1)
        return x + self.attention(x, text, text)[0]


class CachedTable(nn.Module):
    """Keeps a table of channels and, as an attribute, whether it has been made; drops by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0), persistent=False)
        self.table: Tensor
        self.made, self.generator = 0, torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        if not self.made:
            self.table, self.made = torch.ones(8), 8
        return x * self.table[: self.made] * (torch.rand(1, generator=self.generator) + 0.5)


class Frames(nn.Module):
    """Looks at four rows of two in each token, which for nine tokens over two ranks is as long as a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.unflatten(-1, (2, 4)), (0, 1))  # five long
        return x + self.convolution(padded.flatten(0, 1)).view(padded.shape)[..., :4].flatten(-2)


def over_channels_first(x: Tensor, module: nn.Module) -> Tensor:
    return x + module(x.transpose(1, 2)).transpose(1, 2)


def over_each_token(x: Tensor, module: nn.Module) -> Tensor:
    return module(x.flatten(0, 1)[:, None])[:, 0].view_as(x)


def recurrent(x: Tensor, module: nn.Module) -> Tensor:
    return x + module(x)[0]


def padded_convolution(x: Tensor, module: nn.Module) -> Tensor:
    return x + module(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


SEEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attention": (
        lambda: Applied(lambda x, m: x + m(x, x, x)[0], nn.MultiheadAttention(8, 2, batch_first=True)),
        r"layers.0.module (MultiheadAttention) calls multi_head_attention_forward",
    ),
    "bare attention": (
        lambda: Applied(lambda x: x + F.scaled_dot_product_attention(x, x, x)),
        "layers.0 (Applied) calls scaled_dot_product_attention",
    ),
    "convolution": (lambda: Applied(over_channels_first, nn.Conv1d(8, 8, 3, padding=1)), "(Conv1d) calls conv1d"),
    "group norm": (lambda: Applied(over_channels_first, nn.GroupNorm(2, 8)), "(GroupNorm) calls group_norm"),
    "instance norm": (lambda: Applied(over_channels_first, nn.InstanceNorm1d(8)), "calls instance_norm"),
    "batch norm": (lambda: Applied(over_channels_first, nn.BatchNorm1d(8)), "(BatchNorm1d) calls batch_norm"),
    "norm over tokens": (lambda: Applied(lambda x: F.layer_norm(x, x.shape[1:])), "(Applied) calls layer_norm"),
    "recurrence": (lambda: Applied(recurrent, nn.LSTM(8, 8, batch_first=True)), "(LSTM) calls lstm"),
}
COMPARED: dict[str, Callable[[], nn.Module]] = {
    "mean": lambda: Applied(lambda x: x - x.mean(1, keepdim=True)),
    "cumsum": lambda: Applied(lambda x: x + x.cumsum(1)),
    "roll": lambda: Applied(lambda x: x + x.roll(1, 1)),
    "softmax": lambda: Applied(lambda x: x * x.softmax(1)),
    "positions": lambda: Applied(lambda x: x + torch.linspace(0, 1, x.shape[1])[:, None]),
    "positions by index": lambda: Applied(lambda x: x + 0.1 * torch.arange(x.shape[1])[:, None]),
    "causal": lambda: Attention(causal=True),
    "padded convolution": lambda: Applied(padded_convolution, nn.Conv1d(8, 8, 3)),
    "tokens counted": lambda: Counter("tokens"),
}
ALLOWED: dict[str, Callable[[], nn.Module]] = {
    "nothing else": nn.Identity,
    "pointwise convolution": lambda: Applied(over_channels_first, nn.Conv1d(8, 8, 1)),
    "layer norm": lambda: nn.LayerNorm(8),
    "rms norm": lambda: nn.RMSNorm(8),
    "dropout": lambda: nn.Dropout(0.5),
    "cross-attention": CrossAttention,
    "calls counted": lambda: Counter("calls"),
    "a table and a generator of its own": CachedTable,
    "as long as a slice by chance": Frames,
    "convolution over channels": lambda: Applied(over_each_token, nn.Conv1d(1, 1, 3, padding=1)),
}


def first_calls(kind: str) -> dict[str, str]:
    seen = {name: layer for name, (layer, _) in SEEN.items()}
    layers = {"seen": seen, "compared": COMPARED, "allowed": ALLOWED}[kind]
    x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1))
    return {name: first_call(network(layer), plan(), x) for name, layer in layers.items()}


def test_what_mixes_tokens_by_what_it_is_is_refused_by_name(ranks: Ranks) -> None:
    for messages in ranks(2).run(first_calls, "seen"):
        for name, (_, call) in SEEN.items():
            assert "Network mixes tokens" in messages[name], name
            assert call in messages[name]


def test_what_mixes_tokens_by_how_it_is_used_is_found_by_comparison(ranks: Ranks) -> None:
    for messages in ranks(2).run(first_calls, "compared"):
        for name in COMPARED:
            assert "Network computes something else" in messages[name], name
        assert "buffer layers.0.count by" in messages["tokens counted"]


def test_what_keeps_to_its_token_is_allowed(ranks: Ranks) -> None:
    first, second = ranks(2).run(first_calls, "allowed")
    for name in ALLOWED:
        assert "Network verified" in first[name], name
        assert second[name] == "passed"


# -- what a forward pass alone does not show --------------------------------------------------------------------------


class Gated(nn.Module):
    """A branch that starts closed, as adaLN-zero's do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * x.mean(1, keepdim=True)


def wrong_gradient() -> str:
    model = network(lambda: nn.Sequential(Attention(), SharedMean()))
    return first_call(model, plan(), torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1)))


def behind_a_closed_gate() -> tuple[str, bool]:
    model = network(Gated)
    with torch.inference_mode():
        message = first_call(model, plan(), torch.randn(2, 9, 8))
    return message, bool((model.layers[0].gate == 0).all())


def test_a_wrong_gradient_behind_a_right_output_is_found(ranks: Ranks) -> None:
    for message in ranks(2).run(wrong_gradient):
        assert "differ: layers." in message
        assert "output" not in message.split("rounding")[0]


def test_closed_gates_are_open_while_compared(ranks: Ranks) -> None:
    for message, closed_again in ranks(2).run(behind_a_closed_gate):
        assert "Network computes something else" in message
        assert closed_again


# -- all ranks agree --------------------------------------------------------------------------------------------------


def where_one_group_sees_nothing() -> str:
    """The tokens of the second group are all the same, so that their mean over a slice is that over all."""
    x = torch.randn(2, 8, 8) if dist.get_rank() < 2 else torch.ones(2, 8, 8)
    mesh = SequenceMesh.create("cpu", ulysses_size=1, ring_size=2)
    try:
        verify_plan(network(COMPARED["mean"]), mesh, plan(), (x,))
    except ValueError as error:
        return str(error)
    return "no error"


class Small(nn.Module):
    """Runs out of memory on one rank if it sees more than its slice."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 5 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return x


def out_of_memory() -> str:
    mesh = SequenceMesh.create("cpu", ulysses_size=2)
    model, x = network(Small), torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1))
    report = verify_plan(model, mesh, plan(), (x,))
    undo = parallelize(model, mesh, plan())
    assert model(x).shape == x.shape
    undo()
    return str(report)


def test_a_difference_in_one_group_is_an_error_on_all_ranks(ranks: Ranks) -> None:
    messages = ranks(4).run(where_one_group_sees_nothing)
    assert "Network computes something else" in messages[0]
    assert messages == [messages[0]] * 4


def test_no_room_on_one_rank_leaves_the_comparison_out(ranks: Ranks) -> None:
    for report in ranks(2).run(out_of_memory):
        assert report.startswith("not compared")
        assert report.endswith("since a device has no room for the whole sequence")


# -- what surrounds the call ------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attention, x, use_reentrant=True)


def surrounded(by: str) -> str:
    lines: list[str] = []
    model, whole = (network(Checkpointed if by == "reentrant checkpoint" else nn.Identity) for _ in range(2))
    mesh = SequenceMesh.create("cpu", ulysses_size=2)
    parallelize(model, mesh, plan(), log=lines.append)
    x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    called: Any = torch.compile(model, backend="eager") if by == "compilation" else model
    y = checkpoint(called, x, use_reentrant=False) if by == "checkpoint" else called(x)
    assert torch.allclose(y, whole(x), atol=1e-6)
    gradients = []
    for output in (y, whole(x)):
        x.grad = None
        output.sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.allclose(*gradients, atol=1e-5)
    return lines[0] if lines else ""


@pytest.mark.parametrize(
    "by", ["checkpoint", "reentrant checkpoint", pytest.param("compilation", marks=pytest.mark.full)]
)
def test_what_surrounds_the_call_or_lies_within(ranks: Ranks, by: str) -> None:
    line = ranks(2).run(surrounded, by)[0]
    assert "Network verified" in line
    assert ("use_reentrant=True" in line) == (by[0] == "r")
