"""Trains Wan on latent video shards: `python train_wan.py fit --config configs/demo.yaml`.

Every setting can be overridden on the command line, such as `--trainer.max_steps 500` or `--model.learning_rate 1e-4`.
`--trainer.strategy` chooses how the model is split; the LightningModule does not change with it.
"""

from lightning.pytorch.cli import LightningCLI
from wan_module import WanRectifiedFlow

import lightning_videoscale as vs


def main(args: list[str] | None = None) -> None:
    LightningCLI(WanRectifiedFlow, vs.VideoDataModule, args=args)


if __name__ == "__main__":
    main()
