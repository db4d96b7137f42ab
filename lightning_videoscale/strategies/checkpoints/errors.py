"""What is wrong with a checkpoint: `CheckpointError`."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the message says why and what to do."""
