"""Predicts what the fine-tuning examples take on 4 and 8 GPUs of a node, from what they took on one.

    python benchmarks/predictions/finetuning.py

Nothing here is measured but what it starts from, ``examples/finetuning-h200.json``: steps of one clip on one H200.
T tokens, N GPUs that share the clip, P parameters, A of them or beside them trained.

- Step: `steps.step` under the layout that is chosen for N GPUs. Checkpointing computes forward again, and LoRA no
  gradients of the base's weights. The host is assumed to take half as long again. Where one GPU was measured, its
  time over its prediction is a factor. To this come the gathers and sums of `exchange`, as if nothing hid them.
- Memory, whole weights: weights, gradients, AdamW's two states and the average are 20 bytes for each parameter, and
  AdamW's temporaries 4 more. In backward, there are activations in the place of gradients and temporaries. The larger
  of both counts.
- Memory, LoRA: 2 bytes for each parameter of the base, 20 for each of the adapters, and activations.
- FSDP2 holds an N-th of what is counted for each parameter, and two gathered blocks with all that is in no block. DDP
  holds everything.
- Activations grow with T / N, as was measured on 1, 2 and 4 GPUs (``parallel/activation_memory-h200x4.json``). How
  much they are for each token is what one GPU took under LoRA, without the other parts. Gradients of all weights also
  need the inputs of a block's feed-forward layers, 2 · (W + F) bytes for each token.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.predictions.exchange import GPUS, averaged, sharded
from benchmarks.predictions.scaling import read, rest_of_a_step
from benchmarks.predictions.steps import WAN_1_3B, WAN_14B, Rest, StepTime, Transformer, Work, step
from lightning_videoscale.parallel.layout import MACHINES, Layout, Machine, choose_layout

Row = dict[str, Any]
MEASURED, MEMORY = "examples/finetuning-h200", "parallel/activation_memory-h200x4"
LENGTHS = (32_760, 75_600)  # 81 frames at 480p and at 720p
JOBS = (1, 4, 8)
AGAIN = Work(linears=4 / 3, attention=18 / 14, exchange=3 / 2, rows=4 / 3, host=3 / 2)
ADAPTED = 8  # square layers of a block: query, key, value and output of both its attentions


@dataclass(frozen=True)
class Example:
    """A config of `examples/configs`.

    Attributes:
        config: Its name.
        model: What is trained.
        rank: Of the adapters; None: all weights are trained.
        is_sharded: Whether by FSDP2, else DDP.
    """

    config: str
    model: Transformer
    rank: int | None
    is_sharded: bool

    @property
    def outside(self) -> int:
        """Parameters in no block: embeddings of patches, times and texts, and the head."""
        return self.model.width * (8 * self.model.width + 4096 + 256 + 2 * 64)

    @property
    def parameters(self) -> int:
        """P."""
        return self.model.parameters + self.outside

    @property
    def trained(self) -> int:
        """A."""
        if self.rank is None:
            return self.parameters
        return ADAPTED * 2 * self.rank * self.model.width * self.model.layers

    @property
    def base_bytes(self) -> int:
        """A parameter's of the network, as it is stored."""
        return 4 if self.rank is None else 2


EXAMPLES = (
    Example("finetune_wan_1_3b_lora", WAN_1_3B, 32, is_sharded=False),
    Example("finetune_wan_1_3b", WAN_1_3B, None, is_sharded=True),
    Example("finetune_wan_14b_lora", WAN_14B, 32, is_sharded=True),
    Example("finetune_wan_14b", WAN_14B, None, is_sharded=True),
)


def step_seconds(example: Example, tokens: int, layout: Layout, machine: Machine, rest: Rest) -> StepTime:
    """Of the device, without what FSDP2 and DDP exchange, and of the host."""
    gpus = layout.ulysses * layout.ring if example.is_sharded else 1
    share = example.trained / example.model.parameters / gpus
    work = AGAIN._replace(parameters=share)
    if example.rank is not None:
        work = work._replace(linears=1.0)
    return step(example.model, tokens, layout, machine, rest, GPUS, work)


def exchanged(example: Example, gpus: int, machine: Machine) -> float:
    """Seconds of gradients and parameters between the GPUs."""
    if example.is_sharded:
        return sharded(example.parameters, example.trained, gpus, machine)
    return averaged(example.trained, gpus, machine)


def held(example: Example, gpus: int) -> float:
    """Bytes of a GPU before the first step: weights, states, the average and, of adapters, gradients; gathered ones."""
    share = 1 / gpus if example.is_sharded else 1.0
    of_trained = 16 if example.rank is None else 20
    base = 0 if example.rank is None else example.base_bytes * example.parameters
    block = example.model.parameters / example.model.layers
    gathered = 2 * 2 * block + example.base_bytes * example.outside if example.is_sharded else 0.0
    return share * (base + of_trained * example.trained) + gathered


def peak_bytes(example: Example, tokens: int, gpus: int, per_token: float) -> float:
    """The largest of a step; ``per_token`` are bytes of activations under LoRA."""
    if example.rank is None:
        per_token += 2 * (example.model.width + example.model.ffn)
    backward = held(example, gpus) + per_token * tokens / gpus
    optimizer = 24 * example.parameters / gpus if example.rank is None else 0.0
    return max(backward, optimizer)


def measured_rows() -> dict[str, Row]:
    """By config."""
    return {row["config"]: row for row in read(MEASURED)["rows"]}


def bytes_per_token(model: Transformer, measured: dict[str, Row]) -> float:
    """Of activations, from the example of the model that trains adapters on one GPU."""
    lora = next(example for example in EXAMPLES if example.model == model and example.rank is not None)
    row = measured[lora.config]
    return float((row["peak_allocated_gib"] * 2**30 - held(lora, 1)) / row["tokens"])


def check(example: Example, row: Row, machine: Machine, rest: Rest, per_token: float) -> Row:
    """The formulas beside one measured row."""
    device = step_seconds(example, row["tokens"], Layout(1, 1), machine, rest).device
    peak = peak_bytes(example, row["tokens"], row["gpus"], per_token) / 2**30
    return {
        "kind": "check", "config": example.config, "gpus": row["gpus"], "tokens": row["tokens"],
        "predicted_ms": round(1e3 * device, 1), "measured_ms": row["step_ms"],
        "error": round(1e3 * device / row["step_ms"] - 1, 4),
        "predicted_gib": round(peak, 2), "measured_gib": row["peak_allocated_gib"],
        "error_gib": round(peak / row["peak_allocated_gib"] - 1, 4), "fitted_to_gib": example.rank is not None,
    }  # fmt: skip


def prediction(
    example: Example, tokens: int, gpus: int, machine: Machine, rest: Rest, per_token: float, factor: float
) -> Row:
    """One example on some GPUs; ``factor`` is what one GPU took over its prediction."""
    layout = choose_layout(gpus, example.model.heads, 128, machine, {tokens: 1}).layout
    device, host = step_seconds(example, tokens, layout, machine, rest)
    exchange = exchanged(example, gpus, machine)
    return {
        "kind": "prediction", "config": example.config, "gpus": gpus, "tokens": tokens,
        "ulysses": layout.ulysses, "ring": layout.ring,
        "step_ms": round(1e3 * max(factor * device + exchange, host), 1),
        "device_ms": round(1e3 * factor * device, 1), "host_ms": round(1e3 * host, 1),
        "exchange_ms": round(1e3 * exchange, 1),
        "peak_gib": round(peak_bytes(example, tokens, gpus, per_token) / 2**30, 2),
    }  # fmt: skip


def rows_of(example: Example, measured: dict[str, Row], machine: Machine, rest: Rest) -> list[Row]:
    """The check, where one GPU was measured, and the predictions of all that was not."""
    per_token = bytes_per_token(example.model, measured)
    one = measured.get(example.config)
    checks = [] if one is None else [check(example, one, machine, rest, per_token)]
    factor = 1.0 if one is None else one["step_ms"] / checks[0]["predicted_ms"]
    return checks + [
        prediction(example, tokens, gpus, machine, rest, per_token, factor)
        for gpus in JOBS
        for tokens in LENGTHS
        if one is None or (gpus, tokens) != (one["gpus"], one["tokens"])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=provenance.RESULTS / "predictions/finetuning-h200.json")
    options = parser.parse_args()
    commit = provenance.commit()
    machine = MACHINES["h200"]
    rest, measured = rest_of_a_step(machine), measured_rows()
    rows = [row for example in EXAMPLES for row in rows_of(example, measured, machine, rest)]
    hashes = {
        name: hashlib.sha256((provenance.RESULTS / f"{name}.json").read_bytes()).hexdigest()
        for name in (MEASURED, MEMORY, "kernels/wan_step-h200", "parallel/strong_scaling-h200x2")
    }
    settings = {
        "kind": "prediction",
        "of": "NVIDIA H200, 1 to 8 of a node",
        "inputs": hashes,
        "bytes_per_token": {model.name: round(bytes_per_token(model, measured)) for model in (WAN_1_3B, WAN_14B)},
        "assumed": ["link between 8 GPUs as between 4", "the host takes half as long again with checkpointing"],
        "rest": rest._asdict(),
    }
    provenance.write(options.output, "predictions/finetuning", commit, settings, rows)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
