"""From a plan to the batches that a training step receives."""
