"""Which micro-batch took how much memory."""

from __future__ import annotations

import torch


class PeakMemory:
    """Peaks of single micro-batches, of which a window keeps that of the fewest and that of the most tokens.

    The device's peak is reset before every micro-batch, for every other reader of this process too.

    Args:
        device: The CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: dict[int, float] = {}

    def begin(self) -> None:
        """To be called before a micro-batch."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def end(self, tokens: int) -> None:
        """To be called after its backward.

        Args:
            tokens: B * S.
        """
        peak = float(torch.cuda.max_memory_allocated(self._device))
        self._peaks[tokens] = max(peak, self._peaks.get(tokens, 0.0))

    def take(self) -> list[tuple[float, float]]:
        """Returns tokens and peak in bytes of the smallest and of the largest micro-batch, and begins a new window."""
        peaks, self._peaks = self._peaks, {}
        return [(float(tokens), peaks[tokens]) for tokens in sorted({min(peaks), max(peaks)})] if peaks else []

    def capacity(self) -> float:
        """Bytes that this process could reserve."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return float(torch.cuda.memory_reserved(self._device) + free)
