"""A Wan trained as a user would, on clips that bring their own noise: what the parity tests have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import Dataset

from tests.models import tiny_wan

IMAGE_DIM = 8


class Clips(Dataset[dict[str, Tensor]]):
    """Latents (C, F, H, W), noise, time and text; the sequence has F · H/2 · W/2 tokens.

    Args:
        shape: Frames, height and width of the latents.
        dtype: Of all tensors.
        length: Number of clips.
        image: With what Wan 2.1 I2V starts from: tokens of an image encoder and channels beside the latents. Its
            cross-attention takes the last 512 tokens for text, whatever there are.
        masks: With texts of different lengths, and a weight for every latent (0 for the first frame, as where it is
            given, else different for each).
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        length: int = 8,
        image: bool = False,
        masks: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> Tensor:
            return torch.randn(length, *shape, generator=generator, dtype=dtype)

        texts = 512 if image else 5
        self.tensors = {"latents": draw(4, *shape), "text": draw(texts, 16), "noise": draw(4, *shape)}
        self.tensors["time"] = torch.rand(length, generator=generator, dtype=dtype)
        if image:
            self.tensors |= {"image": draw(7, IMAGE_DIM), "condition": draw(5, *shape)}
        if masks:
            # Of two tokens at least: where there is one to attend to, the gradients of queries and keys are zero, and
            # what float32 makes of them is rounding alone.
            lengths = torch.arange(length) % (texts - 1) + 2
            self.tensors["text_mask"] = torch.arange(texts) < lengths[:, None]
            self.tensors["weight"] = draw(1, *shape).abs()
            self.tensors["weight"][:, :, 0] *= shape[0] == 1

    def __len__(self) -> int:
        return len(self.tensors["latents"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: x[index] for name, x in self.tensors.items()}


class MaskedCrossAttention(WanAttnProcessor):
    """Cross-attention that leaves out the padding of texts, for which diffusers' Wan has no argument.

    A user's own: sequence parallelism leaves cross-attention alone.
    """

    mask: Tensor | None = None

    def __call__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, *_: Any) -> Tensor:
        assert self.mask is not None
        result: Tensor = super().__call__(attn, hidden_states, encoder_hidden_states, self.mask[:, None, None])
        return result


class RectifiedFlow(pl.LightningModule):
    """An ordinary training module: no line about sequence parallelism.

    Args:
        per_token_timesteps: As Wan 2.2 TI2V, which gives every token a timestep of its own; "repeated": zero for the
            tokens of the first frame and one for all others.
        checkpointing: Use diffusers' own gradient checkpointing.
        own_noise: Draw noise and time in the step; else they come with the clips, and any number of data-parallel ranks
            together compute what one device computes on all their clips.
        masks: Leave the padding of texts out of cross-attention.
        compute_dtype: What batches are cast to.
        **config: As for `tiny_wan`.
    """

    def __init__(
        self,
        per_token_timesteps: bool | str = False,
        checkpointing: bool = False,
        own_noise: bool = False,
        masks: bool = False,
        compute_dtype: torch.dtype | None = None,
        **config: Any,
    ) -> None:
        super().__init__()
        self.per_token_timesteps = per_token_timesteps
        self.own_noise = own_noise
        self.compute_dtype = compute_dtype
        self._checkpointing = checkpointing
        self._config = config
        self._cross_attention = MaskedCrossAttention() if masks else None
        self.build()

    def build(self) -> None:
        self.transformer = tiny_wan(**self._config)
        if self._checkpointing:
            self.transformer.enable_gradient_checkpointing()
        if self._cross_attention is not None:
            for block in self.transformer.blocks:
                block.attn2.set_processor(self._cross_attention)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        if self.compute_dtype is not None:
            batch = {name: x.to(self.compute_dtype) if x.is_floating_point() else x for name, x in batch.items()}
        x, noise, t = batch["latents"], batch["noise"], batch["time"]
        if not t.is_floating_point():  # whole thousandths, which no precision rounds
            t = t.double() / 1000
        if self.own_noise:
            noise, t = torch.randn_like(x), torch.rand_like(t)
        tokens = x.shape[2] * x.shape[3] // 2 * x.shape[4] // 2
        spread = torch.linspace(0.5, 1, tokens, dtype=t.dtype, device=x.device)
        if self.per_token_timesteps == "repeated":
            spread = (torch.arange(tokens, device=x.device) >= tokens // x.shape[2]).to(t.dtype)
        timestep = t[:, None] * spread if self.per_token_timesteps else t
        sigma = t.to(x.dtype).view(-1, 1, 1, 1, 1)
        noisy = (1 - sigma) * x + sigma * noise
        if "condition" in batch:
            noisy = torch.cat((noisy, batch["condition"]), dim=1)
        if self._cross_attention is not None:
            self._cross_attention.mask = batch["text_mask"]
        velocity = self.transformer(noisy, timestep * 1000, batch["text"], batch.get("image")).sample
        error = (velocity - (noise - x)).square()
        return (error * batch["weight"]).mean() if "weight" in batch else error.mean()

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: dict[str, Tensor]) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)


class LateRectifiedFlow(RectifiedFlow):
    """Builds its network where Lightning offers to shard it as it is built."""

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if not hasattr(self, "transformer"):
            super().build()


class Record(Callback):
    """Keeps every loss and, for every optimizer step, the gradients it used: averaged, clipped and assembled."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        if trainer.global_step > len(self.gradients):
            self.gradients.append(
                all_assembled((name, p.grad) for name, p in module.named_parameters() if p.grad is not None)
            )


def assembled(x: Tensor) -> Tensor:
    """A copy of the whole tensor of which this rank may hold a shard; then collective."""
    return all_assembled([("", x)])[""]


def all_assembled(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """`assembled` of each, in one collective: DTensor's own way is one for each, which takes a millisecond."""
    whole = {name: x.detach().clone() for name, x in named}
    sharded = {name: x for name, x in whole.items() if isinstance(x, DTensor)}
    if not sharded:
        return whole
    (mesh, placements), *others = {(x.device_mesh, x.placements) for x in sharded.values()}
    assert not others, others
    group = mesh.get_group(placements.index(Shard(0)))
    shards = [x.to_local() for x in sharded.values()]
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    # As one tensor: to pickle sixty takes three times as long.
    mine = torch.cat([x.flatten() for x in shards]).cpu(), [x.shape for x in shards]
    dist.all_gather_object(of_ranks, mine, group)
    parts = [
        [x.view(shape) for x, shape in zip(flat.split([shape.numel() for shape in shapes]), shapes, strict=True)]
        for flat, shapes in of_ranks
    ]
    for (name, x), *of_one in zip(sharded.items(), *parts, strict=True):
        whole[name] = torch.cat(of_one).to(x.device, x.dtype)
    return whole
