"""Small networks that run by CUDA graphs, and their training beside eager twins."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from lightning_videoscale.graphs import GraphedNetwork, GraphOptions
from lightning_videoscale.injection import inject_fused_kernels

SHAPES = ((3, 8, 8), (1, 16, 8), (2, 10, 6))

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, by the first deterministic product


def wan(layers: int = 5, fused: bool = True) -> WanTransformer3DModel:
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=64,
        ffn_dim=256,
        num_layers=layers,
        text_dim=64,
        qk_norm="rms_norm_across_heads",
        cross_attn_norm=True,
    ).cuda()
    if fused:
        inject_fused_kernels(model)
    return model


def graphed(network: nn.Module, mode: Any = True, cuts: tuple[int, ...] = (2, 4)) -> GraphedNetwork:
    """Has a network run by graphs, without a strategy."""
    blocks: Any = network.blocks
    runs = GraphedNetwork(
        network,
        network.forward,
        [blocks[i] for i in cuts],
        GraphOptions(mode, 0.5),
        None,
        lambda: 0,
        lambda: 0,
        True,
        print,
    )
    network.forward = runs
    return runs


def draw(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (
        torch.randn(1, 16, *shape, device="cuda", generator=generator),
        torch.rand(1, device="cuda", generator=generator) * 1000,
        torch.randn(1, 12, 64, device="cuda", generator=generator),
    )


class Training:
    """Steps of one network with an optimizer, and what they computed."""

    def __init__(self, network: nn.Module, dtype: torch.dtype | None = torch.bfloat16) -> None:
        self.network, self.dtype = network, dtype
        self.optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=1e-3)

    def loss(self, number: int, shape: tuple[int, ...]) -> Tensor:
        inputs = draw(shape, number)
        torch.manual_seed(number)
        with torch.autocast("cuda", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            (out,) = self.network(*inputs, return_dict=False)
        loss: Tensor = (out.float() - inputs[0]).square().mean()
        return loss

    def step(self, number: int, shape: tuple[int, ...], micro_batches: int = 1) -> tuple[float, float]:
        total = 0.0
        for micro_batch in range(micro_batches):
            loss = self.loss(100 * number + micro_batch, shape)
            loss.backward()
            total += float(loss)
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, float(norm)


def both(change: Callable[[nn.Module], object] = lambda _: None, **options: Any) -> tuple[Training, Training, Any]:
    """The same network twice, eager and by graphs."""
    eager, other = wan(), wan()
    change(eager)
    change(other)
    runs = graphed(other)
    return Training(eager, **options), Training(other, **options), runs
