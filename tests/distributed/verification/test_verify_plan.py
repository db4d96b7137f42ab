"""What a plan forgot is an error on the first call, on all ranks, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import LTXVideoTransformer3DModel, WanTransformer3DModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_videoscale.injection import wan  # noqa: F401  # registers Wan's plan
from lightning_videoscale.parallel import (
    SequenceContext,
    SequenceMesh,
    Split,
    SplitPlan,
    parallelize,
    read_diffusers_plan,
    sequence_parallel_attention,
    verify_plan,
)
from lightning_videoscale.parallel.plan import Undo
from lightning_videoscale.strategies import (
    SequenceParallelDDPStrategy,
    SequenceParallelDeepSpeedStrategy,
    SequenceParallelFSDP2Strategy,
    network_changes,
)
from tests.distributed.groups import reused_groups
from tests.distributed.pool import ProcessPool
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed
from tests.models import tiny_wan

Ranks = Callable[[int], ProcessPool]


# -- layers that a user may have in the region ------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention that its plan exchanges, with rotated positions if it is given angles."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(8, 24), causal
        self.context: SequenceContext | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 2)).unbind(2)
        if self.context is None:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2)
        else:
            lengths = self.context.lengths_of(x.shape[1])
            out = sequence_parallel_attention(q, k, v, self.context.mesh, lengths=lengths)
        return x + out.flatten(2)


class Applied(nn.Module):
    """A function of (B, S, 8), and the module that it uses."""

    def __init__(self, function: Callable[..., Tensor], module: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.module = function, module

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.module) if self.module is not None else self.function(x)


class CrossAttention(nn.Module):
    """Attends to as many tokens of a text as a rank of two has of nine."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.attention = nn.Parameter(torch.randn(1, 5, 8)), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        text = self.text.expand(x.shape[0], -1, -1)
        return x + self.attention(x, text, text)[0]


class Counter(nn.Module):
    """Counts its calls, or the tokens that it has seen."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.count += x.shape[1] if self.what == "tokens" else 1
        return x


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


class Network(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def exchange(model: nn.Module, context: SequenceContext) -> Undo:
    layers = [layer for layer in model.modules() if isinstance(layer, Attention | SharedMean)]

    def give(value: SequenceContext | None) -> None:
        for layer in layers:
            layer.context = value

    give(context)
    return lambda: give(None)


def plan(attention: Callable[[nn.Module, SequenceContext], Undo] = exchange) -> SplitPlan:
    return SplitPlan({"": {"x": Split(1)}}, {}, {"head": 1}, attention)


def network(layer: Callable[[], nn.Module]) -> Network:
    torch.manual_seed(0)
    return Network(layer(), Attention())


def first_call(model: nn.Module, split: SplitPlan | None, *args: Any, **kwargs: Any) -> str:
    """The error, or what is logged."""
    lines: list[str] = []
    with reused_groups():
        mesh = SequenceMesh.create("cpu", ulysses_size=dist.get_world_size())
    undo = parallelize(model, mesh, split, log=lines.append)
    try:
        model(*args, **kwargs)
    except ValueError as error:
        with pytest.raises(ValueError, match="where its sequence is split"):  # again, for who goes on
            model(*args, **kwargs)
        return str(error)
    finally:
        undo()
    return lines[0] if lines else "passed"


def first_calls(kind: str) -> dict[str, str]:
    seen = {name: layer for name, (layer, _) in SEEN.items()}
    layers = {"seen": seen, "compared": COMPARED, "allowed": ALLOWED}[kind]
    x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1))
    return {name: first_call(network(layer), plan(), x) for name, layer in layers.items()}


def test_what_mixes_tokens_by_what_it_is_is_refused_by_name(ranks: Ranks) -> None:
    for messages in ranks(2).run(first_calls, "seen"):
        for name, (_, call) in SEEN.items():
            assert "Network mixes tokens where its sequence is split" in messages[name], name
            assert call in messages[name]


def test_what_mixes_tokens_by_how_it_is_used_is_found_by_comparison(ranks: Ranks) -> None:
    for messages in ranks(2).run(first_calls, "compared"):
        for name in COMPARED:
            assert "Network computes something else where its sequence is split" in messages[name], name
        assert "buffer layers.0.count by" in messages["tokens counted"]


def test_what_keeps_to_its_token_is_allowed(ranks: Ranks) -> None:
    first, second = ranks(2).run(first_calls, "allowed")
    for name in ALLOWED:
        assert "verified on its first call: split and whole differ by at most" in first[name], name
        assert second[name] == "passed"


# -- what a forward pass alone does not show --------------------------------------------------------------------------


class SharedMean(nn.Module):
    """A mean over all tokens of the group, of which nobody has told autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.context: SequenceContext | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.context is None:
            return x - x.mean(1, keepdim=True)
        total = x.sum(1, keepdim=True)
        dist.all_reduce(total.detach(), group=self.context.mesh.sp.group)
        return x - total.detach() / sum(self.context.lengths_of(x.shape[1]))


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
        assert "In relation to the whole sequence differ: layers." in message
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
    assert "split and whole differ by at most" in line
    assert ("gradients left out, as checkpoints with use_reentrant=True give none" in line) == (by[0] == "r")


# -- it leaves no trace -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """What could keep a trace: random numbers, a buffer, a gate that is zero, gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.dropout, self.counter = Attention(), nn.Dropout(0.5), Counter("calls")
        self.gate = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x) + self.gate * self.counter(self.dropout(x))


class Training(pl.LightningModule):
    """Has parameters of its own, before the network and after it, which FSDP2 gathers around the network's call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.own = Network(Block(), Block()), nn.Linear(8, 8)
        self.calls = 0

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.calls += 1
        return (self.own(self.net(self.own(batch))) - batch).square().mean()

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


STRATEGIES: dict[str, Any] = {
    "ddp": SequenceParallelDDPStrategy,
    "fsdp2": SequenceParallelFSDP2Strategy,
    "zero3": SequenceParallelDeepSpeedStrategy,
}


def train(strategy: str, verify: bool, **arguments: Any) -> tuple[dict[str, Tensor], list[str], int]:
    """Two steps; parameters and buffers, what was logged of the plan, and how often the user's code ran."""
    lines: list[str] = []
    batches = DataLoader(torch.randn(8, 9, 8, generator=torch.Generator().manual_seed(1)), batch_size=2)
    torch._dynamo.reset()
    with (
        deepspeed_on_cpu() if strategy == "zero3" else nullcontext(),
        patch.object(network_changes, "rank_zero_info", lines.append),
    ):
        arguments |= {"stage": 3} if strategy == "zero3" else {}
        module = Training()
        pl.Trainer(
            strategy=STRATEGIES[strategy](
                ulysses_size=2, modules=["net"], plan=plan(), verify_plan=verify, **arguments
            ),
            accelerator="cpu",
            devices=dist.get_world_size(),
            max_steps=2,
            num_sanity_val_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, batches, batches)
        state = {name: weights(x) for name, x in [*module.named_parameters(), *module.named_buffers()]}
    return state, lines, module.calls


def weights(x: Tensor) -> Tensor:
    if hasattr(x, "ds_id"):
        from deepspeed.utils import safe_get_full_fp32_param

        x = safe_get_full_fp32_param(x)
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        ("ddp", {"activation_checkpointing": True, "compile": {"backend": "eager"}}),
        ("fsdp2", {"activation_checkpointing": True}),
        pytest.param("zero3", {}, marks=needs_deepspeed),
    ],
)
def test_training_is_what_it_is_without(ranks: Ranks, strategy: str, arguments: dict[str, Any]) -> None:
    verified, plain = (ranks(2).run(train, strategy, verify, **arguments) for verify in (True, False))
    for (state, _, calls), (expected, _, expected_calls) in zip(verified, plain, strict=True):
        assert all(torch.equal(state[name], x) for name, x in expected.items())
        assert calls == expected_calls
    outputs, gradients = verified[0][1]  # in the sanity check, and in the first step
    assert "Split plan of Network verified on its first call: split and whole differ by at most" in outputs
    assert "Split plan of Network verified on its first call: split and whole differ by at most" in gradients
    assert verified[1][1] == plain[0][1] == []


# -- diffusers' models ------------------------------------------------------------------------------------------------


class ExchangedAttention:
    """What a user writes who knows of self-attention only, or forgets to exchange at all."""

    def __init__(self, context: SequenceContext | None) -> None:
        self.context = context

    def __call__(self, attn: Any, hidden_states: Tensor, _: None, __: None, image_rotary_emb: Any) -> Tensor:
        from diffusers.models.transformers.transformer_ltx import apply_rotary_emb

        q, k = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        q, k = (apply_rotary_emb(x, image_rotary_emb) for x in (q, k))
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, attn.to_v(hidden_states)))
        if self.context is None:
            out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        else:
            lengths = self.context.lengths_of(hidden_states.shape[1])
            out = sequence_parallel_attention(q, k, v, self.context.mesh, lengths=lengths)
        return attn.to_out[1](attn.to_out[0](out.flatten(2)))


def ltx_attention(exchanged: bool) -> Callable[[Any, SequenceContext], Undo]:
    def install(model: Any, context: SequenceContext) -> Undo:
        layers = [block.attn1 for block in model.transformer_blocks]
        originals = [layer.processor for layer in layers]
        for layer in layers:
            layer.set_processor(ExchangedAttention(context if exchanged else None))

        def undo() -> None:
            for layer, original in zip(layers, originals, strict=True):
                layer.set_processor(original)

        return undo

    return install


def ltx(exchanged: bool, text_is_split: bool) -> str:
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 8}
    model = LTXVideoTransformer3DModel(in_channels=4, out_channels=4, num_layers=2, **sizes)
    declared = read_diffusers_plan(model, ltx_attention(exchanged))
    if not text_is_split:
        declared = replace(declared, inputs={"": {"hidden_states": Split(1, 3)}})
    return first_call(
        model,
        declared,
        torch.randn(1, 12, 4),
        torch.randn(1, 6, 8),
        torch.tensor([500]),
        torch.ones(1, 6, dtype=torch.int64),
        num_frames=3,
        height=2,
        width=2,
    )


class MyWan(WanTransformer3DModel):
    """What Wan's tests say nothing of."""


def wans() -> list[str]:
    inputs = torch.randn(1, 4, 1, 4, 4), torch.tensor([7.0]), torch.randn(1, 3, 16)
    mine = tiny_wan()
    mine.__class__ = MyWan
    return [first_call(model, None, *inputs) for model in (tiny_wan(), mine)]


def test_a_tested_family_costs_nothing(ranks: Ranks) -> None:
    tested, mine = ranks(2).run(wans)[0]
    assert tested == "passed"
    assert "Split plan of MyWan verified on its first call" in mine


def test_plans_of_ltx(ranks: Ranks) -> None:
    """diffusers also splits the text, whose keys then must travel, too."""
    pool = ranks(2)
    for message in pool.run(ltx, exchanged=True, text_is_split=True):
        assert "transformer_blocks.0.attn2 (LTXAttention) calls scaled_dot_product_attention" in message
        assert "attn1" not in message
    for message in pool.run(ltx, exchanged=False, text_is_split=False):
        assert "transformer_blocks.0.attn1 (LTXAttention) calls scaled_dot_product_attention" in message
        assert "attn2" not in message
    assert "verified on its first call" in pool.run(ltx, exchanged=True, text_is_split=False)[0]
