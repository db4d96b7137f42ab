"""Trains a video transformer on latent video shards: `python train.py fit --config configs/demo.yaml`.

Every setting can be overridden on the command line, such as `--trainer.max_steps 500` or `--model.learning_rate 1e-4`.
`--trainer.strategy` chooses how the model is split, and `--model.transformer` which family of diffusers it is of; the
LightningModule does not change with either.
"""

from lightning.pytorch.cli import LightningCLI
from rectified_flow import RectifiedFlow

import lightning_videoscale as vs


def main(args: list[str] | None = None) -> None:
    LightningCLI(RectifiedFlow, vs.VideoDataModule, args=args)


if __name__ == "__main__":
    main()
