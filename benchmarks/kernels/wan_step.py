"""A whole Wan training step, forward and backward, on one GPU: eager, compiled, and with fused kernels.

    python benchmarks/kernels/wan_step.py

Wan-1.3B and four layers of Wan-14B in bfloat16 with float32 modulation tables and rotary embedding, batch 1, no
activation checkpointing, the same attention kernel everywhere (cuDNN through scaled_dot_product_attention). Blocks are
compiled one by one.

Modes are copies of the model that share its parameters. They take turns, in another order in every round, since a
GPU at its power limit slows down as it gets warm: what compares two modes is the median of their ratios round by round.
Clock, power and temperature of every turn are in the file. Where the time goes is from a profile of one step, as
attention, matrix products, and everything else. The longest sequence comes from a line through the peaks at several
lengths.

The file is written anew after every part. ``--tiny`` runs a small model on whatever device there is, to try the script.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.gpu_state import GpuState
from benchmarks.timing import alternate
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.kernels.backend import BackendName
from lightning_videoscale.strategies.compilation import compile_blocks

GIB = 2**30
MODELS = {
    "Wan-1.3B": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "Wan-14B, 4 layers": {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 4},
}
TINY = {"num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 128, "num_layers": 2}
FRAMES_OF_PEAKS = (5, 9, 13, 17)
MODES = ("eager", "compiled", "fused", "fused, compiled", "fused, recomputed", "fused, compiled, recomputed")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ATTENTION = SDPBackend.CUDNN_ATTENTION if DEVICE.type == "cuda" else SDPBackend.MATH
Row = dict[str, Any]


class Latents(NamedTuple):
    """The size of a clip for the model, in latent pixels."""

    frames: int = 21
    height: int = 60  # 480 x 832 pixels: 1560 tokens to a frame
    width: int = 104

    @property
    def tokens(self) -> int:
        return self.frames * self.height * self.width // 4


def kind(kernel: str) -> str:
    """What a kernel is, by its name: ``attention``, ``gemm`` or ``other``.

    What cuDNN's attention runs beside its backward, products of outputs and gradients and casts of dq, is attention.
    """
    name = kernel.lower()
    if any(part in name for part in ("flash", "fmha", "cudnn_generated", "cudnn::fusion", "sdpa", "attention")):
        return "attention"
    if any(part in name for part in ("gemm", "cutlass", "nvjet", "xmma", "sm90_x")):
        return "gemm"
    return "other"


def covered(spans: list[tuple[float, float]]) -> float:
    """The time in which at least one of them runs: a dependent kernel is launched before the one it waits for ends."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def wan(config: dict[str, int]) -> WanTransformer3DModel:
    torch.manual_seed(0)
    with DEVICE:
        model = WanTransformer3DModel(qk_norm="rms_norm_across_heads", cross_attn_norm=True, **config)
    rope = copy.deepcopy(model.rope)
    model.to(torch.bfloat16)
    model.rope = rope
    for block in model.blocks:
        block.scale_shift_table.data = block.scale_shift_table.data.float()
    return model


def variant(model: nn.Module, mode: str, backend: BackendName) -> nn.Module:
    """A copy of the model as a mode has it, of the same parameters."""
    made = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    if "fused" in mode:
        inject_fused_kernels(made, backend, recompute_norms="recomputed" in mode)
    if "compiled" in mode:
        compile_blocks(made, {"dynamic": False})
    return made


def draw(size: Latents) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(1, 16, *size, device=DEVICE, dtype=torch.bfloat16),
        torch.tensor([500], device=DEVICE),
        torch.randn(1, 512, 4096, device=DEVICE, dtype=torch.bfloat16),
    )


def step(model: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    with sdpa_kernel(ATTENTION):
        model(*inputs, return_dict=False)[0].float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def time_in_turns(modes: dict[str, nn.Module], size: Latents, rounds: int, repeats: int) -> dict[str, Row]:
    """Times, how each compares with the others round by round, and the state of the GPU in every turn."""
    inputs = draw(size)
    with GpuState() as gpu:

        @contextmanager
        def turn(mode: str) -> Iterator[None]:
            free_cache()  # what another mode left would not fit this one's tensors
            with gpu.watch(mode):
                yield

        times = alternate(
            {mode: partial(step, model, inputs) for mode, model in modes.items()},
            device=DEVICE,
            warm_up=2,
            repeats=repeats,
            rounds=rounds,
            around=turn,
        )
    return {
        mode: {
            "median_ms": round(mine.median, 1),
            "min_ms": round(min(mine.rounds), 1),
            "max_ms": round(max(mine.rounds), 1),
            "rounds_ms": [round(ms, 1) for ms in mine.rounds],
            "speedup_over": {other: times[other].spread_over(mine) for other in modes if other != mode},
            "gpu": gpu.turns.get(mode, []),
        }
        for mode, mine in times.items()
    }


def breakdown(one_step: Callable[[], None], digits: int) -> Row:
    """Where the time of a step goes on the device, in milliseconds of so many digits, and its peak."""
    one_step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        one_step()
        torch.cuda.synchronize()
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    largest: dict[str, float] = defaultdict(float)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans[kind(event.name)].append((event.time_range.start, event.time_range.end))
            if kind(event.name) == "other":
                largest[event.name[:90]] += event.device_time_total / 1e3
    spent = {name: covered(spans[name]) / 1e3 for name in ("attention", "gemm", "other")}
    return {
        **{f"{name}_ms": round(ms, digits) for name, ms in spent.items()},
        "largest_others_ms": {n: round(ms, digits) for n, ms in sorted(largest.items(), key=lambda x: -x[1])[:12]},
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def peak(model: nn.Module, size: Latents) -> int:
    """Bytes at the peak of a step."""
    inputs = draw(size)
    step(model, inputs)
    free_cache()
    torch.cuda.reset_peak_memory_stats()
    step(model, inputs)
    return torch.cuda.max_memory_allocated()


def longest(model: nn.Module, sizes: Sequence[Latents]) -> Row:
    """The longest sequence that fits this GPU, by a line through the peaks."""
    torch._dynamo.reset()  # every length is compiled by itself, and what other modes compiled counts towards the limit
    tokens = np.array([size.tokens for size in sizes], dtype=np.float64)
    peaks = np.array([peak(model, size) for size in sizes], dtype=np.float64)
    per_token, at_zero = np.polyfit(tokens, peaks, 1)
    room = torch.cuda.get_device_properties(0).total_memory
    return {
        "peaks": [{"tokens": int(t), "peak_bytes": int(p)} for t, p in zip(tokens, peaks, strict=True)],
        "bytes_per_token": round(float(per_token)),
        "longest_tokens": int((room - at_zero) / per_token),
    }


def free_cache() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def measure(name: str, options: argparse.Namespace) -> Iterator[tuple[list[Row], list[Row]]]:
    """Yields one row per mode, after every part with more in them, and those that have changed."""
    size = Latents(2, 4, 6) if options.tiny else Latents(options.frames)
    model = wan(TINY if options.tiny else MODELS[name])
    torch._dynamo.reset()
    modes = {mode: variant(model, mode, options.backend) for mode in options.modes}
    times = time_in_turns(modes, size, options.rounds, options.repeats)
    rows = [{"model": name, "mode": mode, "tokens": size.tokens, **times[mode]} for mode in modes]
    yield rows, rows
    if DEVICE.type != "cuda":
        return
    for row in rows:
        row |= breakdown(partial(step, modes[row["mode"]], draw(size)), digits=1)
        yield rows, [row]
    for row in rows if options.peaks else []:
        row |= longest(modes[row["mode"]], [size._replace(frames=frames) for frames in options.peaks])
        yield rows, [row]


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--frames", type=int, default=Latents().frames)
    parser.add_argument("--rounds", type=int, default=6, help="turns of every mode")
    parser.add_argument("--repeats", type=int, default=2, help="timed steps in a turn, after one that is not")
    parser.add_argument("--peaks", type=int, nargs="*", default=FRAMES_OF_PEAKS, help="frames; none: times only")
    parser.add_argument("--tiny", action="store_true", help="try the script with a small model")
    options = parser.parse_args()
    commit = options.commit or provenance.commit()
    output = options.output or provenance.path("kernels", "wan_step")
    settings = {
        "dtype": "bfloat16", "attention": ATTENTION.name, "batch_size": 1, "backend": options.backend,
        "rounds": options.rounds, "repeats": options.repeats, "tiny": options.tiny,
    }  # fmt: skip
    done: list[Row] = []
    for name in ["tiny"] if options.tiny else options.models:
        rows: list[Row] = []
        for rows, changed in measure(name, options):
            provenance.write(output, "kernels/wan_step", commit, settings, done + rows)
            for row in changed:
                show(row)
        done += rows
        free_cache()
    print(f"written to {output}")


def show(row: Row) -> None:
    """Prints what is known so far."""
    over = [f"{ratio['median']:.3f}x over {other}" for other, ratio in row["speedup_over"].items()]
    print(f"{row['model']}, {row['mode']}: {row['median_ms']} ms; {', '.join(over)}", flush=True)
    if "other_ms" not in row:
        print(f"    rounds {row['rounds_ms']}, GPU {[tuple(state.values()) for state in row['gpu']]}", flush=True)
        return
    print(
        f"    attention {row['attention_ms']}, matrix products {row['gemm_ms']}, everything else {row['other_ms']} ms; "
        f"peak {row['peak_bytes'] / GIB:.1f} GiB; longest {row.get('longest_tokens')}",
        flush=True,
    )
    for name, ms in row["largest_others_ms"].items() if "longest_tokens" not in row else ():
        print(f"{ms:>11.1f} ms  {name}", flush=True)


if __name__ == "__main__":
    main()
