"""What the host does for a layer of a split network beside the same fused layer unsplit, forward and backward.

    torchrun --nproc-per-node 2 benchmarks/parallel/host_time.py

Tiny models, so that computing takes next to nothing. A layer is a share of the difference between networks that
differ in some, of the medians over all steps. ``fast`` is the same of their lower deciles: other work on a machine only
adds to a step, so the fast ones are nearest to what the host does. Counted are calls of Python functions and of
functions in C, operations of torch (nested ones too), and nodes of the autograd graph. Timed is what the main thread
computes, waiting for others left out; networks take turns.

``kernels`` is "reference", the plain PyTorch that stands for fused kernels on CPUs, or "empty": only results are
allocated, as where a GPU is given one kernel to launch. What a GPU's driver and NCCL need to launch is in neither.

On GPUs ``kernels`` is "cuda", and nothing is counted: the time is that until forward and then backward have returned,
which is before the device has done the work. ``device_us`` is what the device needs for a step of the larger network,
split: less than the host's, or it is not the host that was measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import HunyuanVideoTransformer3DModel, WanTransformer3DModel
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.kernels.reference import qk_norm_rope, rows
from lightning_videoscale.parallel import SequenceMesh, parallelize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, HEAD_DIM = (12, 128) if DEVICE == "cuda" else (4, 16)
LAYERS = (12, 4)
WARM_UP = 22  # calls, of which the first 20 compare what ranks are given
Row = dict[str, Any]
Key = tuple[str, int]  # "split" or "whole", and layers
Steps = dict[Key, list[tuple[float, float]]]
Part = Callable[[float, float], float]
PARTS: dict[str, Part] = {
    "forward_us": lambda forward, backward: forward,
    "backward_us": lambda forward, backward: backward,
    "both_us": lambda forward, backward: forward + backward,
}


def wan(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM, "ffn_dim": 128}
    sizes |= {"text_dim": 16, "freq_dim": 16}
    channels = {"in_channels": 4, "out_channels": 4, "rope_max_seq_len": 32}
    model = WanTransformer3DModel(
        num_layers=layers, cross_attn_norm=True, qk_norm="rms_norm_across_heads", **sizes, **channels
    )
    return model, {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "timestep": torch.randint(0, 1000, (1,)),
        "encoder_hidden_states": torch.randn(1, 8, 16),
        "return_dict": False,
    }


def hunyuan_video(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """Half of the layers have two streams, half one."""
    axes = (HEAD_DIM // 2, HEAD_DIM // 4, HEAD_DIM // 4)
    sizes = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM, "mlp_ratio": 2.0, "rope_axes_dim": axes}
    inputs = {"in_channels": 4, "out_channels": 4, "text_embed_dim": 8, "pooled_projection_dim": 8, "patch_size": 1}
    model = HunyuanVideoTransformer3DModel(
        num_layers=layers // 2, num_single_layers=layers // 2, num_refiner_layers=1, **sizes, **inputs
    )
    return model, {
        "hidden_states": torch.randn(1, 4, 2, 4, 4),
        "timestep": torch.randint(0, 1000, (1,)),
        "encoder_hidden_states": torch.randn(1, 8, 8),
        "encoder_attention_mask": torch.ones(1, 8, dtype=torch.int64),
        "pooled_projections": torch.randn(1, 8),
        "guidance": torch.full((1,), 6000.0),
        "return_dict": False,
    }


FAMILIES: dict[str, Callable[[int], tuple[nn.Module, dict[str, Any]]]] = {"wan": wan, "hunyuan_video": hunyuan_video}


class Network:
    """A fused network, split or whole."""

    def __init__(self, family: str, layers: int, mesh: SequenceMesh | None) -> None:
        torch.manual_seed(0)
        self._model, self._inputs = FAMILIES[family](layers)
        inject_fused_kernels(self._model.to(DEVICE))
        self._inputs = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in self._inputs.items()}
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if mesh is not None:
            parallelize(self._model, mesh, verify_plan=False)
        for _ in range(WARM_UP):
            self.forward().backward()

    def forward(self) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            output: Tensor = self._model(**self._inputs)[0]
        return output.sum()

    def seconds(self) -> tuple[float, float]:
        """Of the main thread, forward and backward; of a GPU's host, which computes backward in another thread."""
        clock = time.thread_time
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            clock = time.perf_counter
        begin = clock()
        loss = self.forward()
        between = clock()
        loss.backward()
        return between - begin, clock() - between

    def device_us(self) -> float:
        """What a GPU needs for a step that it does not wait for: its kernels, but for NCCL's, which wait for others."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.forward().backward()
            torch.cuda.synchronize()
        return float(sum(event.device_time for event in profile.events() if "nccl" not in event.name))

    def counts(self) -> Row:
        operations: list[str] = []
        backward_operations: list[str] = []
        with counted_operations(operations):
            loss = self.forward()
        with counted_operations(backward_operations):
            loss.backward()
        calls, backward_calls = [0], [0]
        with counted_calls(calls):
            loss = self.forward()
        nodes = count_nodes(loss)
        with counted_calls(backward_calls):
            loss.backward()
        return {
            "forward_python_calls": calls[0],
            "backward_python_calls": backward_calls[0],
            "forward_operations": len(operations),
            "backward_operations": len(backward_operations),
            "autograd_nodes": nodes,
        }


@contextmanager
def counted_operations(names: list[str]) -> Iterator[None]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield
    names += [event.name for event in profile.events() if event.name.startswith(("aten::", "c10d::"))]


@contextmanager
def counted_calls(count: list[int]) -> Iterator[None]:
    def note(frame: Any, event: str, argument: Any) -> None:
        count[0] += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def count_nodes(loss: Tensor) -> int:
    seen: set[Any] = set()
    found = [loss.grad_fn]
    while found:
        node = found.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += [parent for parent, _ in node.next_functions]
    return len(seen)


@contextmanager
def kernels(what: str) -> Iterator[None]:
    """Inside, fused kernels compute ("reference") or allocate what a first call of a shape has returned ("empty")."""
    own = [(module, name, getattr(module, name)) for module in (rows, qk_norm_rope) for name in ("forward", "backward")]
    try:
        for module, name, compute in own if what == "empty" else ():
            setattr(module, name, allocating(compute))
        yield
    finally:
        for module, name, compute in own:
            setattr(module, name, compute)


def allocating(compute: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, Any] = {}

    def run(variant: Any, inputs: Any, *arguments: Any) -> Any:
        first = inputs[0] if isinstance(inputs[0], Tensor) else inputs[0][0]
        key = variant, first.shape, tuple(argument is None for argument in arguments)
        if key not in known:
            known[key] = compute(variant, inputs, *arguments)
        return like(known[key])

    return run


def like(x: Any) -> Any:
    if isinstance(x, Tensor):
        return torch.empty_like(x)
    if not isinstance(x, tuple):
        return x
    members = [like(member) for member in x]
    return type(x)(*members) if hasattr(x, "_fields") else tuple(members)


def measure(family: str, what: str, mesh: SequenceMesh, options: argparse.Namespace) -> Row:
    more, less = LAYERS
    with kernels(what):
        networks = {
            (kind, layers): Network(family, layers, mesh if kind == "split" else None)
            for kind in ("split", "whole")
            for layers in LAYERS
        }
        counts = {key: network.counts() if DEVICE == "cpu" else {} for key, network in networks.items()}
        rounds = [turn(networks, options.repeats) for _ in range(options.rounds)]
    row: Row = {"family": family, "kernels": what}
    for name in counts["split", more]:
        split, whole = ((counts[k, more][name] - counts[k, less][name]) / (more - less) for k in ("split", "whole"))
        row[name] = {"split": split, "whole": whole, "ratio": round(split / whole, 3)}
    for name, part in PARTS.items():
        row[name] = summary(rounds, part)
    if DEVICE == "cuda":
        row["device_us"] = round(networks["split", more].device_us(), 1)
    return row


def turn(networks: dict[Key, Network], repeats: int) -> Steps:
    """Seconds of steps, forward and backward, of split and whole networks, which take turns step by step."""
    times: Steps = {key: [] for key in networks}
    for _ in range(repeats):
        for key, network in networks.items():
            times[key].append(network.seconds())
    return times


def summary(rounds: Sequence[Steps], part: Part) -> Row:
    """A layer's microseconds, and the ratio; 10th and 90th percentile of the ratios of single rounds."""
    every = {key: [step for each in rounds for step in each[key]] for key in rounds[0]}
    ratios = sorted(
        of_a_layer(each, "split", part, statistics.median) / of_a_layer(each, "whole", part, statistics.median)
        for each in rounds
    )
    spread = [round(ratios[len(ratios) // 10], 3), round(ratios[-1 - len(ratios) // 10], 3)]
    return beside(every, part, statistics.median) | {"p10_p90": spread, "fast": beside(every, part, lower_decile)}


def beside(steps: Steps, part: Part, statistic: Callable[[Sequence[float]], float]) -> Row:
    split, whole = (of_a_layer(steps, kind, part, statistic) for kind in ("split", "whole"))
    return {"split": round(split, 1), "whole": round(whole, 1), "ratio": round(split / whole, 3)}


def of_a_layer(steps: Steps, kind: str, part: Part, statistic: Callable[[Sequence[float]], float]) -> float:
    more, less = (statistic([part(*step) for step in steps[kind, layers]]) for layers in LAYERS)
    return 1e6 * (more - less) / (LAYERS[0] - LAYERS[1])


def lower_decile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=10)[0] if len(values) > 1 else values[0]


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=8, help="steps of each network in a round")
    options = parser.parse_args()
    commit = options.commit or provenance.commit()
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    mesh = SequenceMesh.create(DEVICE, ulysses_size=dist.get_world_size())
    compared = ("cuda",) if DEVICE == "cuda" else ("reference", "empty")
    settings = {"ranks": dist.get_world_size(), "layers": LAYERS, "rounds": options.rounds}
    settings |= {"repeats": options.repeats, "load_average": round(os.getloadavg()[0], 1)}
    output = options.output or provenance.path("parallel", "host_time")
    found = []
    for family, what in product(options.families, compared):
        found.append(measure(family, what, mesh, options))
        if dist.get_rank() == 0:
            show(found[-1])
            provenance.write(output, "parallel/host_time", commit, settings, found)
    mesh.close()
    dist.destroy_process_group()


def show(row: Row) -> None:
    print(f"{row['family']}, {row['kernels']}")
    for name, value in row.items():
        if isinstance(value, dict):
            values = f"split {value['split']:9.1f}  whole {value['whole']:9.1f}  {value['ratio']:.3f}"
            values += f"  fast steps {value['fast']['ratio']:.3f}" if "fast" in value else ""
            print(f"  {name:22} {values}", flush=True)


if __name__ == "__main__":
    main()
