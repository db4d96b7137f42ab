"""Forward and backward of a few blocks of each fused family on one GPU: eager, compiled, and with fused kernels.

    python benchmarks/kernels/family_step.py

Models have random weights of the published sizes and a few of their blocks, in bfloat16 with float32 buffers. One
sample of a usual length, no activation checkpointing. All modes of a family attend by the same kernel: cuDNN's, and
flash for Flux, whose blocks hand over gradients in two layouts, which torch's call of cuDNN cannot take. Modes are
copies that share their parameters, and take turns, as in `wan_step`. Where the time goes is from a profile of one step.
``--tiny`` tries the script with small models on whatever device there is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    WanTransformer3DModel,
)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.kernels.wan_step import ATTENTION, DEVICE, breakdown, free_cache, variant
from benchmarks.timing import alternate

MODES = ("eager", "compiled", "fused", "fused, compiled")
Inputs = Mapping[str, Any]
Row = dict[str, Any]


class Family(NamedTuple):
    """A model with few blocks, as published and tiny; how it is called on a latent of (frames, height, width)."""

    cls: type[nn.Module]
    config: Mapping[str, Any]
    tiny: Mapping[str, Any]
    size: tuple[int, int, int]
    inputs: Callable[[nn.Module, tuple[int, int, int]], Inputs]
    attention: SDPBackend = ATTENTION


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def of_wan(model: Any, size: tuple[int, int, int]) -> Inputs:
    timestep = torch.tensor([500], device=DEVICE)
    text = random(1, 512, model.config.text_dim)
    return {"hidden_states": random(1, 16, *size), "timestep": timestep, "encoder_hidden_states": text}


def of_hunyuan(model: Any, size: tuple[int, int, int]) -> Inputs:
    return {
        "hidden_states": random(1, 16, *size),
        "timestep": torch.tensor([500], device=DEVICE),
        "encoder_hidden_states": random(1, 256, model.config.text_embed_dim),
        "encoder_attention_mask": torch.ones(1, 256, device=DEVICE, dtype=torch.bool),
        "pooled_projections": random(1, model.config.pooled_projection_dim),
        "guidance": torch.tensor([6000.0], device=DEVICE),
    }


def of_cogvideox(model: Any, size: tuple[int, int, int]) -> Inputs:
    frames, height, width = size
    tokens, dim = frames * height * width // 4, model.config.attention_head_dim
    angles = torch.rand(tokens, dim // 2, device=DEVICE).repeat_interleave(2, 1)
    return {
        "hidden_states": random(1, frames, 16, height, width),
        "encoder_hidden_states": random(1, model.config.max_text_seq_length, model.config.text_embed_dim),
        "timestep": torch.tensor([500], device=DEVICE),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def of_ltx(model: Any, size: tuple[int, int, int]) -> Inputs:
    frames, height, width = size
    return {
        "hidden_states": random(1, frames * height * width, 128),
        "encoder_hidden_states": random(1, 128, model.config.caption_channels),
        "timestep": torch.tensor([500], device=DEVICE),
        "encoder_attention_mask": torch.ones(1, 128, device=DEVICE, dtype=torch.bool),
        "num_frames": frames,
        "height": height,
        "width": width,
    }


def of_flux(model: Any, size: tuple[int, int, int]) -> Inputs:
    frames, height, width = size
    places = torch.cartesian_prod(*(torch.arange(n, device=DEVICE) for n in size)).float()
    return {
        "hidden_states": random(1, frames * height * width, 64),
        "encoder_hidden_states": random(1, 512, model.config.joint_attention_dim),
        "pooled_projections": random(1, model.config.pooled_projection_dim),
        "timestep": torch.tensor([0.5], device=DEVICE),
        "img_ids": places,
        "txt_ids": torch.zeros(512, 3, device=DEVICE),
        "guidance": torch.tensor([3.5], device=DEVICE),
    }


FAMILIES: dict[str, Family] = {
    "Wan-14B, 4 of 40 blocks": Family(
        WanTransformer3DModel,
        {"num_layers": 4, "qk_norm": "rms_norm_across_heads", "cross_attn_norm": True},
        {"num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 128},
        (9, 60, 104),
        of_wan,
    ),
    "HunyuanVideo, 2 of 20 and 4 of 40 blocks": Family(
        HunyuanVideoTransformer3DModel,
        {"num_layers": 2, "num_single_layers": 4},
        {"num_attention_heads": 2, "attention_head_dim": 128, "num_single_layers": 2},
        (13, 60, 104),
        of_hunyuan,
    ),
    "CogVideoX-5B, 6 of 42 blocks": Family(
        CogVideoXTransformer3DModel,
        {"num_layers": 6, "num_attention_heads": 48, "use_rotary_positional_embeddings": True},
        {"num_attention_heads": 2, "num_layers": 2},
        (13, 60, 90),
        of_cogvideox,
    ),
    "LTX-Video, 8 of 28 blocks": Family(
        LTXVideoTransformer3DModel,
        {"num_layers": 8},
        {"num_attention_heads": 2, "num_layers": 2, "cross_attention_dim": 128},
        (16, 22, 40),
        of_ltx,
    ),
    "Flux, 4 of 19 and 8 of 38 blocks": Family(
        FluxTransformer2DModel,
        {"num_layers": 4, "num_single_layers": 8, "guidance_embeds": True},
        {"num_attention_heads": 2, "num_layers": 1, "num_single_layers": 2},
        (1, 64, 64),
        of_flux,
        SDPBackend.FLASH_ATTENTION,
    ),
}
TINY_SIZES = {"LTX-Video, 8 of 28 blocks": (2, 4, 4), "Flux, 4 of 19 and 8 of 38 blocks": (1, 4, 4)}


def named(words: Sequence[str]) -> list[str]:
    """The families whose names begin with one of these words."""
    return [name for name in FAMILIES if any(name.startswith(each) for each in words)]


def network(name: str, tiny: bool) -> nn.Module:
    """A family's model, with the same weights in every process."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    with DEVICE:
        model = family.cls(**{**family.config, **(family.tiny if tiny else {})})
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def latent(name: str, tiny: bool) -> tuple[int, int, int]:
    """The size of its latent."""
    return TINY_SIZES.get(name, (2, 4, 4)) if tiny else FAMILIES[name].size


def step(model: nn.Module, inputs: Inputs, attention: SDPBackend) -> None:
    with sdpa_kernel(attention):
        model(**inputs, return_dict=False)[0].float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def times(steps: Mapping[str, Callable[[], None]], rounds: int, repeats: int) -> dict[str, Row]:
    """Milliseconds of each mode, and how each compares with the others round by round."""

    @contextmanager
    def turn(_: str) -> Iterator[None]:
        free_cache()
        yield

    found = alternate(
        steps,
        device=DEVICE,
        warm_up=2,
        repeats=repeats,
        rounds=rounds,
        around=turn,
    )
    return {
        mode: {
            "median_ms": round(mine.median, 2),
            "rounds_ms": [round(ms, 2) for ms in mine.rounds],
            "speedup_over": {other: found[other].spread_over(mine) for other in steps if other != mode},
        }
        for mode, mine in found.items()
    }


def measure(name: str, options: argparse.Namespace) -> list[Row]:
    """One row per mode."""
    family = FAMILIES[name]
    torch._dynamo.reset()
    model, size = network(name, options.tiny), latent(name, options.tiny)
    inputs = family.inputs(model, size)
    modes = {mode: variant(model, mode, "auto") for mode in options.modes}
    steps = {mode: partial(step, each, inputs, family.attention) for mode, each in modes.items()}
    rows = [
        {"model": name, "mode": mode, "latent": list(size), "attention": family.attention.name, **row}
        for mode, row in times(steps, options.rounds, options.repeats).items()
    ]
    for row in rows if DEVICE.type == "cuda" else []:
        row |= breakdown(steps[row["mode"]], digits=2)
    return rows


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(FAMILIES), help="the first words of their names")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--rounds", type=int, default=8, help="turns of every mode")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps in a turn, after one that is not")
    parser.add_argument("--tiny", action="store_true", help="try the script with small models")
    options = parser.parse_args()
    commit = options.commit or provenance.commit()
    output = options.output or provenance.path("kernels", "family_step")
    settings = {"dtype": "bfloat16", "batch_size": 1}
    settings |= {"rounds": options.rounds, "repeats": options.repeats, "tiny": options.tiny}
    rows: list[Row] = []
    for name in named(options.models):
        rows += (mine := measure(name, options))
        provenance.write(output, "kernels/family_step", commit, settings, rows)
        for row in mine:
            show(row)
        free_cache()
    print(f"written to {output}")


def show(row: Row) -> None:
    over = ", ".join(f"{ratio['median']:.3f}x over {other}" for other, ratio in row["speedup_over"].items())
    spent = " ".join(f"{name} {row[f'{name}_ms']}" for name in ("attention", "gemm", "other") if f"{name}_ms" in row)
    print(f"{row['model']}, {row['mode']}: {row['median_ms']} ms ({spent}); {over}", flush=True)


if __name__ == "__main__":
    main()
