"""What a training step takes, and its memory, by the share of the blocks that are computed again in backward.

    python benchmarks/strategies/recomputed_share.py    # on one GPU

Wan-1.3B with random weights and fused kernels in bf16-mixed with AdamW. ``activation_checkpointing=`` of the strategies
takes such a share. Shares take turns, step by step; ratios are of the same turn. A share that memory does not hold is
noted as such.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.launch import say
from benchmarks.wan_training import TINY_WAN, WAN_1_3B, RectifiedFlow
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.strategies.blocks import checkpoint_activations

BENCHMARK = "strategies/recomputed_share"
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
LATENTS = {14_040: (9, 60, 104), 32_760: (21, 60, 104)}  # frames, height, width, by tokens
TINY = {12: (3, 4, 8), 24: (3, 8, 8)}
Row = dict[str, Any]


class Training:
    """A model in training whose share may be changed between steps."""

    def __init__(self, config: dict[str, int], device: torch.device) -> None:
        torch.manual_seed(0)
        with device:
            self._module = RectifiedFlow(config, attention="flash" if device.type == "cuda" else "default")
        inject_fused_kernels(self._module)
        self._optimizer = torch.optim.AdamW(self._module.parameters(), fused=device.type == "cuda")
        self._device = device

    def step(self, share: float, latents: Tensor) -> tuple[float, int] | None:
        """Milliseconds, and the most bytes that were allocated; None where memory ran out."""
        undo = checkpoint_activations(self._module.transformer, share)
        try:
            return self._step(latents)
        except torch.OutOfMemoryError:
            pass  # whose traceback holds the activations
        finally:
            undo()
        self._optimizer.zero_grad()
        torch.cuda.empty_cache()
        return None

    def _step(self, latents: Tensor) -> tuple[float, int]:
        self._wait()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        with torch.autocast(self._device.type, torch.bfloat16):
            loss = self._module.training_step({"latents": latents})
        self._module.backward(loss)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._wait()
        peak = torch.cuda.max_memory_allocated() if self._device.type == "cuda" else 0
        return 1e3 * (time.perf_counter() - begin), peak

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def measure(training: Training, tokens: int, latents: Tensor, rounds: int) -> list[Row]:
    """A row for each share, of which the first must fit."""
    fits = [share for share in SHARES if training.step(share, latents) is not None]
    order = random.Random(0)
    steps = [{share: training.step(share, latents) for share in order.sample(fits, len(fits))} for _ in range(rounds)]
    return [row_of(tokens, share, steps if share in fits else []) for share in SHARES]


def row_of(tokens: int, share: float, steps: list[dict[float, tuple[float, int] | None]]) -> Row:
    taken = [(step[share], step[SHARES[0]]) for step in steps]
    row: Row = {"tokens": tokens, "share": share, "outcome": "measured" if steps else "out_of_memory"}
    if not steps:
        return row
    assert all(mine and whole for mine, whole in taken), "what fitted once fits again"
    ratios = [mine[0] / whole[0] for mine, whole in taken if mine and whole]
    return row | {
        "step_ms": round(statistics.median(mine[0] for mine, _ in taken if mine), 3),
        "over_all": round(statistics.median(ratios), 4),
        "over_all_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "peak_bytes": max(mine[1] for mine, _ in taken if mine),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30, help="of Wan-1.3B's 30")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="dry run on CPUs: nothing to publish")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="the commit that is measured, where the folder is no git checkout")
    options = parser.parse_args()
    commit = options.commit or provenance.commit()
    config = TINY_WAN | {"num_layers": 4} if options.tiny else WAN_1_3B | {"num_layers": options.layers}
    device = torch.device("cpu" if options.tiny else "cuda")
    settings = {"model": config, "rounds": options.rounds, "dry_run": options.tiny}
    output = options.output or provenance.path("strategies", "recomputed_share")
    training, rows = Training(config, device), list[Row]()
    for tokens, size in (TINY if options.tiny else LATENTS).items():
        rows += measure(training, tokens, torch.randn(1, 16, *size, device=device), options.rounds)
        for row in rows[-len(SHARES) :]:
            say(str(row))
        provenance.write(output, BENCHMARK, commit, settings, rows)


if __name__ == "__main__":
    main()
