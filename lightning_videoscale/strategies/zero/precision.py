"""Precision under DeepSpeed, where a clipping that would not happen is an error."""

from __future__ import annotations

from typing import Any, cast

from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from typing_extensions import override


class ZeroPrecision(DeepSpeedPrecision):
    """Lightning's, which takes every call of ``clip_gradients`` and does nothing: DeepSpeed clips within its step.

    Args:
        precision: As for ``DeepSpeedPrecision``.
        max_norm: What DeepSpeed clips the norm of all gradients to; 0 for no clipping.
    """

    def __init__(self, precision: str, max_norm: float) -> None:
        super().__init__(cast(Any, precision))
        self._max_norm = max_norm

    @override
    def clip_gradients(
        self,
        optimizer: Optimizable,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Leaves it to DeepSpeed.

        Raises:
            ValueError: If DeepSpeed does something else than what is asked for.
        """
        way = GradClipAlgorithmType(gradient_clip_algorithm).value
        if clip_val > 0 and (way, clip_val) != ("norm", self._max_norm):
            does = f"clips their norm to {self._max_norm}" if self._max_norm else "does not clip"
            raise ValueError(
                f"clip_gradients was called with {clip_val} by {way}: under ZeRO parameters "
                f"have no .grad to clip, and DeepSpeed, which has the gradients, {does}. Set "
                'Trainer(gradient_clip_val=...), or with manual optimization strategy.config["gradient_clipping"] '
                "before fit; DeepSpeed clips by norm only."
            )
