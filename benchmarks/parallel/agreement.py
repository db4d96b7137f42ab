"""What it costs to compare the ranks' inputs and losses: steps of Wan-1.3B, its sequence split over all ranks.

    torchrun --nproc-per-node 2 benchmarks/parallel/agreement.py

A step is forward, the loss and backward, in bf16 with activation checkpointing and without an optimizer. Variants take
turns, so that clocks and heat touch all alike: nothing is compared (twice: how far equal runs lie apart), or every step
compares its inputs and its loss. Most steps only count; that is too little to show in a step's time, so it is taken
alone, on the host. What a training pays is the sum: counting in every step, comparing in every 211th.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import WanTransformer3DModel

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.launch import join_ranks, say
from benchmarks.timing import alternate
from benchmarks.wan_training import TINY_WAN, WAN_1_3B
from lightning_videoscale.parallel import Agreement, CollectiveTransport, SequenceMesh, parallelize, rank_agreement

LATENT = (60, 104)  # 480 x 832 pixels: 1560 tokens to a frame
WARM_UP, REPEATS, ROUNDS = 2, 4, 9
COUNTED = 100_000


class Training:
    """Steps of one network on clips of one length.

    Args:
        config: Of the transformer.
        device: Of this rank.
    """

    def __init__(self, config: dict[str, int], device: torch.device) -> None:
        torch.manual_seed(0)
        with device:
            self.network = WanTransformer3DModel(
                in_channels=16, freq_dim=256, qk_norm="rms_norm_across_heads", cross_attn_norm=True, **config
            )
        self.network.enable_gradient_checkpointing()
        mesh, transport = SequenceMesh.create(device.type, ulysses_size=dist.get_world_size()), CollectiveTransport()
        parallelize(self.network, mesh, transport=transport)
        self.losses = Agreement(mesh, transport)
        self.text_dim, self.device = config["text_dim"], device

    def take(self, shape: tuple[int, int, int]) -> None:
        """Goes on with clips of a shape in latents."""
        generator = torch.Generator(self.device).manual_seed(1)
        self.noisy = torch.randn(1, 16, *shape, device=self.device, generator=generator)
        self.text = torch.randn(1, 512, self.text_dim, device=self.device, generator=generator)
        self.time = torch.full((1,), 500.0, device=self.device)

    def step(self) -> None:
        """Forward, loss and backward."""
        with torch.autocast(self.device.type, torch.bfloat16):
            velocity = self.network(self.noisy, self.time, self.text, return_dict=False)[0]
            loss = F.mse_loss(velocity.float(), self.noisy)
        self.losses.check("losses", {"loss": loss})
        loss.backward()
        self.network.zero_grad(set_to_none=False)


@contextmanager
def comparing(variant: str) -> Iterator[None]:
    """Compares in every call, or in none."""
    always = patch.object(rank_agreement, "_FIRST", float("inf"))
    never = patch.object(Agreement, "check", lambda *_, **__: None)
    with always if variant == "comparing" else never:
        yield


def counting_us(training: Training) -> float:
    """What a call takes the host that does not compare, in microseconds."""
    with patch.object(rank_agreement, "_FIRST", 0), patch.object(rank_agreement, "_INTERVAL", 2**62):
        begin = time.perf_counter()
        for _ in range(COUNTED):
            training.losses.check("losses", {})
        return 1e6 * (time.perf_counter() - begin) / COUNTED


def measure(training: Training, frames: int, shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """The row of one length."""
    training.take(shape)
    times = alternate(
        dict.fromkeys(("off", "off again", "comparing"), training.step),
        device=training.device,
        warm_up=WARM_UP,
        repeats=REPEATS,
        rounds=rounds,
        around=comparing,
    )
    off, compared = times["off"], times["comparing"]
    counted = counting_us(training)
    interval = rank_agreement._INTERVAL
    share = (compared.over(off) - 1) / interval + 2 * counted / 1e3 / off.median
    return {
        "frames": frames,
        "tokens": shape[0] * shape[1] * shape[2] // 4,
        "step_ms": round(off.median, 3),
        "step_ms_of_rounds": [round(value, 3) for value in off.rounds],
        "comparing_ms_of_rounds": [round(value, 3) for value in compared.rounds],
        "equal_runs_percent": round(100 * (times["off again"].over(off) - 1), 4),
        "comparing_percent_of_its_step": round(100 * (compared.over(off) - 1), 4),
        "counting_us": round(counted, 3),
        "percent_of_training": round(100 * share, 5),
    }


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--frames", type=int, nargs="+", default=[1, 5, 21], help="latent frames, 1560 tokens each")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tiny", action="store_true", help="a model of one layer and small clips, on CPUs too")
    options = parser.parse_args()
    device = join_ranks(torch.cuda.is_available())
    first = dist.get_rank() == 0
    commit = (options.commit or provenance.commit()) if first else ""
    output = options.output or provenance.path("parallel", "agreement")
    config = TINY_WAN if options.tiny else WAN_1_3B
    settings = {
        "model": config,
        "ranks": dist.get_world_size(),
        "precision": "bf16 autocast",
        "activation_checkpointing": True,
        "compared_at_first": rank_agreement._FIRST,
        "compared_every": rank_agreement._INTERVAL,
        "warm_up": WARM_UP,
        "repeats": REPEATS,
        "rounds": options.rounds,
    }
    training, rows = Training(config, device), []
    for frames in options.frames:
        row = measure(training, frames, (frames, 16, 16) if options.tiny else (frames, *LATENT), options.rounds)
        rows.append(row)
        if first:
            provenance.write(output, "parallel/agreement", commit, settings, rows)
            say(
                f"{row['tokens']} tokens: {row['step_ms']} ms a step; "
                f"comparing {row['comparing_percent_of_its_step']} % of it "
                f"(equal runs {row['equal_runs_percent']} %), counting {row['counting_us']} us; "
                f"{row['percent_of_training']} % of a training"
            )
    if first:
        print(f"written to {output}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
