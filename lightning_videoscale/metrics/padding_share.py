"""Padding share: how much of the work is done on tokens that nobody needs."""

from __future__ import annotations

from torch import Tensor

from lightning_videoscale.metrics.ratio import Ratio


class PaddingShare(Ratio):
    """Padding share = 1 − useful tokens / processed tokens, over everything seen.

    Padded text, latents padded to a common shape and batches that only fill a gap (``meta.loss_weight`` 0, useful
    tokens 0) all count. Several steps, and several ranks when synced, add up their tokens.

    Example:
        >>> padding = PaddingShare()
        >>> padding.update(torch.tensor([60, 90]), torch.tensor([100, 100]))
        >>> padding.compute().item()
        0.25
    """

    sums = ("padding", "processed")
    higher_is_better = False

    padding: Tensor
    processed: Tensor

    def update(self, useful_tokens: Tensor, processed_tokens: Tensor) -> None:
        """Adds samples, micro-batches or ranks.

        Args:
            useful_tokens: Tokens that carry something, any shape, for example one value per sample.
            processed_tokens: Tokens that the model works on, padding included, the same shape.

        Raises:
            ValueError: The shapes differ, or useful tokens are not between 0 and the processed ones.
        """
        if useful_tokens.shape != processed_tokens.shape:
            raise ValueError(
                "useful_tokens and processed_tokens must have the same shape; "
                f"got {tuple(useful_tokens.shape)} and {tuple(processed_tokens.shape)}."
            )
        if not bool(((useful_tokens >= 0) & (useful_tokens <= processed_tokens)).all()):
            raise ValueError(
                "useful tokens must lie between 0 and the processed tokens; "
                f"got {useful_tokens.tolist()} of {processed_tokens.tolist()}."
            )
        self.padding += (processed_tokens.double() - useful_tokens.double()).sum()
        self.processed += processed_tokens.double().sum()
