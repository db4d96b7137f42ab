"""A case of training a Wan on a mesh, and how far it is from one device that sees the clips of all ranks."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import DoublePrecision
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from lightning_videoscale.attention import AttentionBackend
from lightning_videoscale.parallel.schedules import ScheduleName
from lightning_videoscale.strategies import (
    SequenceParallelDDPStrategy,
    SequenceParallelDeepSpeedStrategy,
    SequenceParallelFSDP2Strategy,
)
from tests.distributed.wan_training import IMAGE_DIM, Clips, LateRectifiedFlow, RectifiedFlow, all_assembled
from tests.distributed.zero import deepspeed_on_cpu, float64_inside
from tests.models import gradient_error, lifted_float_casts

SHAPES = {"even": (2, 4, 4), "odd": (3, 2, 10)}  # 8 and 15 tokens
STEPS, STEPS_BY_GRAPHS = 2, 4  # two by graphs follow two without
CLIP = {"norm": 0.05, "value": 1e-4}


@dataclass(frozen=True)
class Case:
    """What may matter; by default what is nearest to nothing.

    Attributes:
        backend: The strategy: ``"ddp"``, ``"fsdp2"``, ``"fsdp2_replicas"`` (two copies of the model), ``"zero1"``,
            ``"zero2"``, ``"zero3"``, ``"zero3_late"`` (the network is partitioned as it is built).
        mesh: Sizes (dp, ring, ulysses).
        tokens: ``"even"`` or ``"odd"``: whether the length divides by two and by four.
        heads: Attention heads.
        masks: Whether texts are padded and latents weighed.
        clipping: ``"norm"``, ``"value"`` or nothing.
        accumulation: Micro-batches for each optimizer step.
        checkpointing: Of activations, by the ``"strategy"``, by the ``"model"`` or by nobody.
        batch_size: Clips of each data-parallel rank.
        variant: ``"t2v"``, ``"ti2v"`` (each token has a timestep) or ``"i2v"`` (attends to tokens of an image).
        own_noise: Whether the step draws random numbers; then dp must be 1.
        attention: Which kernel computes attention; one device has torch's own pick.
        schedule: In which order projections and exchanges run.
        float32: Whether to compute in float32, with the model's own casts; else in float64 without them.
        steps: Of the optimizer.
        graphs: Whether the network runs by CUDA graphs where it can.
        verified: Whether the split network is compared with the whole one when it is first called.
    """

    backend: str = "ddp"
    mesh: tuple[int, int, int] = (1, 1, 1)
    tokens: str = "even"
    heads: int = 4
    masks: bool = False
    clipping: str | None = None
    accumulation: int = 1
    checkpointing: str | None = None
    batch_size: int = 1
    variant: str = "t2v"
    own_noise: bool = False
    attention: AttentionBackend = "auto"
    schedule: ScheduleName = "serial"
    float32: bool = False
    steps: int = STEPS
    graphs: bool = False
    verified: bool = True

    @property
    def is_zero(self) -> bool:
        return self.backend.startswith("zero")

    @property
    def alone(self) -> Case:
        """The same training on one device."""
        clips = self.mesh[0] * self.batch_size
        one = replace(self, backend="ddp", mesh=(1, 1, 1), checkpointing=None, batch_size=clips)
        return replace(one, attention="auto", schedule="serial", graphs=False, verified=False)

    def file(self, folder: Path) -> Path:
        """Where the result of this training on one device is kept."""
        return folder / ("_".join(map(str, vars(self.alone).values())).replace(" ", "") + ".pt")


class Outcome(NamedTuple):
    """Losses of all micro-batches, gradients of all optimizer steps before clipping, parameters at the end."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]


class Errors(NamedTuple):
    """This rank's losses, and of a training the largest errors as `gradient_error` has them."""

    losses: list[float]
    gradients: float
    parameters: float


def train(case: Case) -> Outcome:
    """Trains in float64; under ZeRO with the parameters and gradients in float32, or all in float32."""
    record = (ZeroRecord if case.is_zero else Record)()
    accelerator = "cuda" if dist.get_backend() == "nccl" else "cpu"
    with ExitStack() as contexts:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        if not case.float32:
            contexts.enter_context(float64_inside() if case.is_zero else lifted_float_casts())
        if case.is_zero and accelerator == "cpu":
            contexts.enter_context(deepspeed_on_cpu())
        if accelerator == "cuda":  # whose other kernels make a product of float32 of three of tf32
            contexts.enter_context(sdpa_kernel(SDPBackend.MATH))
        torch.manual_seed(3)
        trainer = pl.Trainer(
            strategy=_strategy(case),
            accelerator=accelerator,
            devices=dist.get_world_size(),
            plugins=[] if case.is_zero or case.float32 else [DoublePrecision()],
            accumulate_grad_batches=case.accumulation,
            gradient_clip_val=CLIP[case.clipping] if case.clipping else None,
            gradient_clip_algorithm=case.clipping,
            max_steps=case.steps,
            callbacks=[record],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        clips = Clips(
            SHAPES[case.tokens],
            torch.float32,  # the same numbers under ZeRO, which takes no others
            length=case.alone.batch_size * case.accumulation * case.steps,
            image=case.variant == "i2v",
            masks=case.masks,
        )
        trainer.fit(_module(case), DataLoader(clips, batch_size=case.batch_size))
    if case.graphs and case.checkpointing is None:  # checkpoints that restore random numbers stay eager
        assert record.graphs["replayed"] >= 2, f"{case}: {record.graphs}"
    return Outcome(record.losses, record.gradients, record.parameters)


def train_alone(cases: list[Case], folder: Path) -> None:
    """Writes what the cases are compared with."""
    for case in cases:
        torch.save(tuple(train(case.alone)), case.file(folder))


def compare(cases: list[Case], folder: Path) -> list[Errors]:
    """Trains every case on all ranks; collective over them."""
    errors = []
    for case in cases:
        got = train(case)
        # The unpickler of only weights is in Python, and took 8 % of all this.
        expected = Outcome(*torch.load(case.file(folder), map_location="cpu", weights_only=False))
        assert len(got.gradients) == len(expected.gradients) == case.steps
        gradients = max(map(gradient_error, map(_on_host, got.gradients), expected.gradients))
        errors.append(Errors(got.losses, gradients, gradient_error(_on_host(got.parameters), expected.parameters)))
    return errors


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.cpu() for name, x in tensors.items()}


def _strategy(case: Case) -> Any:
    _, ring, ulysses = case.mesh
    shared: dict[str, Any] = {"ring_size": ring, "ulysses_size": ulysses}
    shared |= {"attention_backend": case.attention, "schedule": case.schedule}
    shared |= {"activation_checkpointing": case.checkpointing == "strategy", "verify_plan": case.verified}
    if case.graphs:
        shared |= {"graphs": True, "graphs_max_memory": 0.5}
    if case.is_zero:
        strategy = SequenceParallelDeepSpeedStrategy(int(case.backend[4]), **shared)
        # Else DeepSpeed would replace the widened F.linear by its own, and keep parameters as small as these whole.
        strategy.config["zero_optimization"] |= {
            "memory_efficient_linear": False,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
        }
        return strategy
    if case.backend == "ddp":
        return SequenceParallelDDPStrategy(**shared)
    return SequenceParallelFSDP2Strategy(replicas=2 if case.backend == "fsdp2_replicas" else 1, **shared)


class SGDFlow(RectifiedFlow):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        # SGD, unlike Adam, shows in the parameters by which factor a gradient was scaled or clipped.
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class LateSGDFlow(LateRectifiedFlow, SGDFlow):
    pass


def _module(case: Case) -> pl.LightningModule:
    config: dict[str, Any] = {"num_attention_heads": case.heads}
    if case.variant == "i2v":
        config |= {"in_channels": 9, "image_dim": IMAGE_DIM, "added_kv_proj_dim": 12 * case.heads}
    return (LateSGDFlow if case.backend == "zero3_late" else SGDFlow)(
        per_token_timesteps=case.variant == "ti2v",
        checkpointing=case.checkpointing == "model",
        own_noise=case.own_noise,
        masks=case.masks,
        compute_dtype=torch.float32 if case.float32 else torch.float64,
        **config,
    )


class Record(Callback):
    """Keeps an `Outcome`, and how many calls ran by CUDA graphs."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.parameters: dict[str, Tensor] = {}
        self.graphs: dict[str, int] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.gradients.append(self.gradients_of(module))

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.parameters = self.parameters_of(module)
        self.graphs = trainer.strategy.describe_graphs()  # type: ignore[attr-defined]

    def gradients_of(self, module: pl.LightningModule) -> dict[str, Tensor]:
        assert all(p.grad is not None for p in module.parameters())
        return all_assembled((name, p.grad) for name, p in module.named_parameters())

    def parameters_of(self, module: pl.LightningModule) -> dict[str, Tensor]:
        return all_assembled(module.named_parameters())


class RecordOfUsed(Record):
    """Zeros are the gradients of what has none, such as what was not called or has no influence."""

    def gradients_of(self, module: pl.LightningModule) -> dict[str, Tensor]:
        used = all_assembled((name, p.grad) for name, p in module.named_parameters() if p.grad is not None)
        return {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in module.named_parameters()} | used


class ZeroRecord(Record):
    def gradients_of(self, module: pl.LightningModule) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad

        return {name: safe_get_full_grad(p).clone() for name, p in module.named_parameters()}

    def parameters_of(self, module: pl.LightningModule) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(p).clone() for name, p in module.named_parameters()}
