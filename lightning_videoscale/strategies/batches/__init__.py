"""One batch and one noise for all ranks of a sequence-parallel group.

- `group_batches`: `GroupBatches`, what a strategy does with batches in every loop of the Trainer.
- `group_loader`: `GroupLoader`, which lets one rank of the group read each batch.
- `turns`: `Turns`, every n-th element of an order that the ranks agree on.
- `same_data`: `check_same_data`, which refuses loaders that give the group's ranks different data.
- `sharing`: `BatchSharing`, which hands what one rank read to the others, on the device and ahead of time.
"""
