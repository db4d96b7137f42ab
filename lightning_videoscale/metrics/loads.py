"""The loads B · S^p of the data-parallel ranks, from their micro-batches."""

from __future__ import annotations

from torch import Tensor


def loads_of(batch_sizes: Tensor, sequence_lengths: Tensor, p: float) -> Tensor:
    """Adds up B · S^p of the micro-batches that a rank accumulates in a step.

    Args:
        batch_sizes: Samples, as for `ComputeCV.update`.
        sequence_lengths: Tokens per sample, the same shape.
        p: Exponent of the sequence length, above 0.

    Returns:
        Loads, float64 of shape ``(dp_ranks, steps)``.

    Raises:
        ValueError: The shapes differ, have another number of dimensions or no element.
    """
    dimensions = batch_sizes.ndim
    if batch_sizes.shape != sequence_lengths.shape or dimensions not in (1, 2, 3) or batch_sizes.numel() == 0:
        raise ValueError(
            "batch_sizes and sequence_lengths must both have shape (dp_ranks,), (dp_ranks, micro_batches) or (dp_ranks,"
            f" steps, micro_batches); got {tuple(batch_sizes.shape)} and {tuple(sequence_lengths.shape)}."
        )
    loads = batch_sizes.double() * sequence_lengths.double() ** p
    if dimensions < 3:
        return loads.reshape(len(loads), 1, -1).sum(dim=2)
    return loads.sum(dim=2)
