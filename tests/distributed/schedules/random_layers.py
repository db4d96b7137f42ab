"""Layers of any shape, split over ranks: `Shape`, and what a rank computes of one by a schedule."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_videoscale.models.wan.split import SequenceParallelWanAttention
from lightning_videoscale.parallel import SequenceContext, SequenceMesh, Transport, parallelize, split
from lightning_videoscale.parallel.schedules import ScheduleName
from tests.distributed.summing import sum_over_ranks

_AXES = {6: (2, 2, 2), 8: (4, 2, 2), 10: (4, 4, 2)}
"""Of a head dim, the channels that each of three positions rotates."""


class Shape(NamedTuple):
    """What may matter of a layer.

    Attributes:
        seed: Of all numbers.
        batch: Samples.
        heads: As many as ranks that share them, or more.
        pairs: Of channels of a head.
        tokens: Of the video, one for each rank or more.
        text: Tokens that attend with the video, with weights of their own; none if 0.
        joined: Layers behind that have one set of weights for both.
        unbiased: Which projections have no bias.
        rotated: Whether there are rotary tables, if there is no text.
        checkpointed: Whether activation checkpointing is on.
    """

    seed: int
    batch: int
    heads: int
    pairs: int
    tokens: int
    text: int
    joined: int
    unbiased: tuple[str, ...]
    rotated: bool
    checkpointed: bool


def random_shape(numbers: random.Random, ulysses_size: int, *, text: bool) -> Shape:
    """Draws a shape whose heads so many ranks can share, and whose tokens four can."""
    return Shape(
        seed=numbers.randint(0, 9999),
        batch=numbers.randint(1, 3),
        heads=numbers.randint(ulysses_size, 7),
        pairs=numbers.randint(3, 5) if text else numbers.randint(1, 5),
        tokens=numbers.randint(4, 23),
        text=numbers.randint(1, 9) if text else 0,
        joined=numbers.randint(0, 1) if text else 0,
        unbiased=tuple(name for name in ("to_q", "to_k", "to_v", "to_out.0") if numbers.random() < 0.3),
        rotated=numbers.random() < 0.8,
        checkpointed=numbers.random() < 0.3,
    )


def run_layer(
    mesh: SequenceMesh, schedule: ScheduleName, shape: Shape, transport: Transport | None = None, device: str = "cpu"
) -> dict[str, Tensor]:
    """The output of a random layer on this rank, in float64, and the gradients of its input and parameters."""
    torch.manual_seed(shape.seed)
    found, parameters = (_joint if shape.text else _single)(mesh, schedule, shape, transport, device)
    sum_over_ranks(parameters.values(), mesh.sp.group)
    return found | parameters


Results = tuple[dict[str, Tensor], dict[str, Tensor]]
"""The output with gradients of inputs, and this rank's part of those of parameters."""


def _single(
    mesh: SequenceMesh, schedule: ScheduleName, shape: Shape, transport: Transport | None, device: str
) -> Results:
    """Of Wan: the video alone, with a norm over all heads."""
    heads, dim = shape.heads, 2 * shape.pairs
    layer = WanAttention(heads * dim, heads, dim, cross_attention_dim_head=None, processor=WanAttnProcessor()).double()
    _randomise(layer, layer, shape)
    layer.to(device)
    whole = _normal(shape.batch, shape.tokens, heads * dim).to(device).requires_grad_()
    angles = torch.rand(1, shape.tokens, 1, shape.pairs, dtype=torch.float64).repeat_interleave(2, 3).to(device)
    context = SequenceContext(mesh, transport, schedule=schedule)
    context.begin_forward()
    x, tables = split(whole, 1, context), []
    for table in (angles.cos(), angles.sin()):
        tables.append(split(table, 1, context))
        context.keep_whole(tables[-1], table)
    layer.set_processor(SequenceParallelWanAttention(context, "layer", layer.processor))
    inputs = x, None, None, tuple(tables) if shape.rotated else None
    y = checkpoint(layer, *inputs, use_reentrant=False) if shape.checkpointed else layer(*inputs)
    cotangent = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(mesh.sp.rank))
    return _differentiate(y, cotangent.to(device), layer, {"x": whole})


def _joint(
    mesh: SequenceMesh, schedule: ScheduleName, shape: Shape, transport: Transport | None, device: str
) -> Results:
    """Of Flux: text and video attend together, with a norm of each head."""
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=shape.joined,
        attention_head_dim=2 * shape.pairs,
        num_attention_heads=shape.heads,
        joint_attention_dim=8,
        pooled_projection_dim=6,
        axes_dims_rope=_AXES[2 * shape.pairs],
    ).double()
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        _randomise(block, block.attn, shape)
    model.to(device)
    if shape.checkpointed:
        model.enable_gradient_checkpointing()
    leaves = {
        "hidden_states": _normal(shape.batch, shape.tokens, 4),
        "encoder_hidden_states": _normal(shape.batch, shape.text, 8),
    }
    leaves = {name: x.to(device).requires_grad_() for name, x in leaves.items()}
    others = {
        "timestep": torch.rand(shape.batch),
        "pooled_projections": _normal(shape.batch, 6),
        "img_ids": torch.randint(0, 9, (shape.tokens, 3)),
        "txt_ids": torch.zeros(shape.text, 3),
    }
    undo = parallelize(model, mesh, transport=transport, schedule=schedule)
    y = model(**leaves, **{name: x.to(device) for name, x in others.items()}).sample
    found = _differentiate(y, _normal(*y.shape).to(device), model, leaves)
    undo()
    return found


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _randomise(module: nn.Module, attention: nn.Module, shape: Shape) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    linears = dict(attention.named_modules())
    for name in linears.keys() & shape.unbiased:  # Flux's later layers have no "to_out.0"
        linears[name].bias = None


def _differentiate(y: Tensor, cotangent: Tensor, module: nn.Module, leaves: dict[str, Tensor]) -> Results:
    parameters: dict[str, Any] = dict(module.named_parameters())
    gradients = torch.autograd.grad(y, [*leaves.values(), *parameters.values()], cotangent, allow_unused=True)
    of_leaves = {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=False)}
    of_parameters = dict(zip(parameters, gradients[len(leaves) :], strict=True))
    return {"output": y.detach(), **of_leaves}, {name: g for name, g in of_parameters.items() if g is not None}
