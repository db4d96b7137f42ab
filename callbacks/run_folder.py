"""Where the files of a run lie."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_videoscale.user_paths import local, on_disk


def run_folder(trainer: pl.Trainer) -> Path:
    """Returns the folder of this run and no other; collective, once loggers have begun their runs.

    It is the first logger's. Most loggers, such as W&B's, have one for all runs: then it is that of `ModelCheckpoint`,
    which makes one in there from the logger's name and version. Without a logger it is ``default_root_dir``. Of a URL,
    it is what follows its scheme, in the current folder.
    """
    logger = trainer.loggers[0] if trainer.loggers else None
    if logger is None or isinstance(logger, TensorBoardLogger | CSVLogger):
        return _local(str(trainer.log_dir or trainer.default_root_dir))
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    folder = _local(str(logger.save_dir or trainer.default_root_dir)) / str(logger.name) / version
    return trainer.strategy.broadcast(folder)  # other ranks know no version


def named_folder(folder: str | Path | None) -> Path | None:
    """Returns the folder that a user names for a callback's files, in which ``~`` is the home.

    Raises:
        ValueError: If it is a URL.
    """
    return None if folder is None else on_disk(folder, "folder")


def _local(place: str) -> Path:
    scheme, separator, path = place.partition("://")
    if not separator:
        return local(place)
    folder = Path.cwd() / path
    rank_zero_warn(
        f"The folder of the run is at {scheme}://, and what is written beside checkpoints (reports, logs, samples) is "
        f"local: it goes to {folder}. Name another by the callback's folder=."
    )
    return folder
