"""A whole Wan training step, forward and backward, on one GPU: eager, compiled, and with fused kernels.

    python benchmarks/kernels/wan_step.py

Wan-1.3B and four layers of Wan-14B in bfloat16 with float32 modulation tables and rotary embedding, batch 1, no
activation checkpointing, the same attention kernel everywhere (cuDNN through scaled_dot_product_attention). Blocks are
compiled one by one. Where the time goes is from a profile: attention, matrix products, everything else. The longest
sequence comes from a line through the peaks at several lengths.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.strategies.compilation import compile_blocks

GIB = 2**30
MODELS = {
    "Wan-1.3B": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "Wan-14B, 4 layers": {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 4},
}
LATENT = (60, 104)  # 480 x 832 pixels: 1560 tokens to a frame
FRAMES = 21  # 32 760 tokens
FRAMES_OF_PEAKS = (5, 9, 13, 17)
MODES = ("eager", "compiled", "fused", "fused, compiled", "fused, recomputed", "fused, compiled, recomputed")
Row = dict[str, Any]


def kind(kernel: str) -> str:
    """What a kernel is, by its name: ``attention``, ``gemm`` or ``other``."""
    name = kernel.lower()
    if any(part in name for part in ("flash", "fmha", "cudnn_generated", "sdpa", "attention")):
        return "attention"
    if any(part in name for part in ("gemm", "cutlass", "nvjet", "xmma", "sm90_x")):
        return "gemm"
    return "other"


@contextmanager
def prepared(model: nn.Module, mode: str, backend: str) -> Iterator[None]:
    """The model as a mode has it; afterwards as it was."""
    report = None
    if "fused" in mode:
        report = inject_fused_kernels(model, backend, recompute_norms="recomputed" in mode)  # type: ignore[arg-type]
    torch._dynamo.reset()
    undo = compile_blocks(model, {"dynamic": False}) if "compiled" in mode else None
    try:
        yield
    finally:
        if undo is not None:
            undo()
        if report is not None:
            report.undo()


def covered(spans: list[tuple[float, float]]) -> float:
    """The time in which at least one of them runs: a dependent kernel is launched before the one it waits for ends."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def wan(config: dict[str, int]) -> WanTransformer3DModel:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = WanTransformer3DModel(qk_norm="rms_norm_across_heads", cross_attn_norm=True, **config)
    rope = copy.deepcopy(model.rope)
    model.to(torch.bfloat16)
    model.rope = rope
    for block in model.blocks:
        block.scale_shift_table.data = block.scale_shift_table.data.float()
    return model


def draw(frames: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(1, 16, frames, *LATENT, device="cuda", dtype=torch.bfloat16),
        torch.tensor([500], device="cuda"),
        torch.randn(1, 512, 4096, device="cuda", dtype=torch.bfloat16),
    )


def step(model: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        model(*inputs, return_dict=False)[0].float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def peak(model: nn.Module, frames: int) -> int:
    """Bytes at the peak of a step."""
    inputs = draw(frames)
    step(model, inputs)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step(model, inputs)
    return torch.cuda.max_memory_allocated()


def measure(model: nn.Module, frames: int, repeats: int) -> Row:
    """Time, where it goes, and the peak."""
    inputs = draw(frames)
    for _ in range(2):
        step(model, inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        step(model, inputs)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(model, inputs)
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
        "median_ms": round(statistics.median(times), 1),
        "min_ms": round(min(times), 1),
        "max_ms": round(max(times), 1),
        **{f"{name}_ms": round(ms, 1) for name, ms in spent.items()},
        "largest_others_ms": {n: round(ms, 1) for n, ms in sorted(largest.items(), key=lambda x: -x[1])[:12]},
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def longest(model: nn.Module, frames: Sequence[int]) -> Row:
    """The longest sequence that fits this GPU, by a line through the peaks."""
    tokens = np.array([f * LATENT[0] * LATENT[1] // 4 for f in frames], dtype=np.float64)
    peaks = np.array([peak(model, f) for f in frames], dtype=np.float64)
    per_token, at_zero = np.polyfit(tokens, peaks, 1)
    room = torch.cuda.get_device_properties(0).total_memory
    return {
        "peaks": [{"tokens": int(t), "peak_bytes": int(p)} for t, p in zip(tokens, peaks, strict=True)],
        "bytes_per_token": round(float(per_token)),
        "longest_tokens": int((room - at_zero) / per_token),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--frames", type=int, default=FRAMES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peaks", type=int, nargs="*", default=FRAMES_OF_PEAKS, help="frames; none: times only")
    parser.add_argument("--output", type=Path, help="file to write; left out, one under benchmarks/results")
    parser.add_argument("--commit", help="the commit that is measured, where the folder is no git checkout")
    options = parser.parse_args()
    commit = options.commit or provenance.commit()
    rows: list[Row] = []
    for name in options.models:
        model = wan(MODELS[name])
        for mode in options.modes:
            row: Row = {"model": name, "mode": mode, "tokens": options.frames * LATENT[0] * LATENT[1] // 4}
            with prepared(model, mode, options.backend):
                row |= measure(model, options.frames, options.repeats)
                row |= longest(model, options.peaks) if options.peaks else {}
            rows.append(row)
            show(row)
        del model
        gc.collect()
        torch.cuda.empty_cache()
    settings = {"dtype": "bfloat16", "attention": "cuDNN", "batch_size": 1, "backend": options.backend}
    output = options.output or provenance.path("kernels", "wan_step")
    provenance.write(output, "kernels/wan_step", commit, settings, rows)
    print(f"written to {output}")


def show(row: Row) -> None:
    longest = f", longest {row['longest_tokens']} tokens" if "longest_tokens" in row else ""
    print(
        f"{row['model']:18s} {row['mode']:16s} {row['median_ms']:>7.1f} ms: attention {row['attention_ms']}, "
        f"matrix products {row['gemm_ms']}, everything else {row['other_ms']}; peak {row['peak_bytes'] / GIB:.1f} GiB"
        f"{longest}",
        flush=True,
    )
    for name, ms in row["largest_others_ms"].items():
        print(f"{'':20s}{ms:>7.1f} ms  {name}", flush=True)


if __name__ == "__main__":
    main()
