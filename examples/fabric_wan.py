"""Sequence parallelism in a loop of one's own, with Lightning Fabric: `python fabric_wan.py --devices 2`.

Fabric's DDP averages gradients over all ranks. Three things make sequence parallelism of it: a mesh, `parallelize`
before `fabric.setup`, and batches and noise that the ranks of a group have in common.
"""

import argparse

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_videoscale.parallel import SequenceMesh, parallelize


class Clips(Dataset):
    """Latents and text of moving gradients, in the place of real ones."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        clip = torch.linspace(-1, 1, 4 * 3 * 8 * 8).roll(7 * index).view(4, 3, 8, 8)
        return clip, torch.full((4, 16), index / 16)


def main(args: list[str] | None = None) -> list[float]:
    """Trains, and returns the losses of the group's batches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--ulysses-size", type=int, help="ranks that share a sequence (default: all devices)")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args(args)

    fabric = Fabric(devices=options.devices, strategy="ddp" if options.devices > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(0)
    model = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        ffn_dim=128,
        num_layers=2,
    )
    replicas, rank = 1, 0
    if options.devices > 1:
        mesh = SequenceMesh.create(fabric.device.type, ulysses_size=options.ulysses_size or options.devices)
        parallelize(model, mesh)
        replicas, rank = mesh.dp.size, mesh.dp.rank
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    sampler = DistributedSampler(Clips(), replicas, rank, shuffle=True)
    loader = fabric.setup_dataloaders(DataLoader(Clips(), batch_size=2, sampler=sampler), use_distributed_sampler=False)
    losses = []
    for step, (clean, text) in zip(range(options.steps), loader, strict=False):
        generator = torch.Generator(fabric.device).manual_seed(step * replicas + rank)  # the same in a group
        noise = torch.randn(clean.shape, generator=generator, device=fabric.device)
        time = torch.rand(len(clean), generator=generator, device=fabric.device)
        noisy = torch.lerp(clean, noise, time.view(-1, 1, 1, 1, 1))
        loss = F.mse_loss(model(noisy, 1000 * time, text, return_dict=False)[0], noise - clean)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        fabric.print(f"step {step}: {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
