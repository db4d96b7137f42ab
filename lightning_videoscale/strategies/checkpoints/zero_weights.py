"""The trained weights under ZeRO, for averages: each rank's pieces of the float32 copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_videoscale.compat.deepspeed import full_shape, is_gathered, own_values
from lightning_videoscale.strategies.checkpoints.errors import CheckpointError
from lightning_videoscale.strategies.checkpoints.optimizer_names import ParameterNames
from lightning_videoscale.strategies.checkpoints.saved_tensors import SavedTensors
from lightning_videoscale.strategies.checkpoints.shares import RankAssignment
from lightning_videoscale.strategies.checkpoints.zero_partitions import Piece, assemble, set_master, set_parameter
from lightning_videoscale.trained_weights import LocalValues


class ZeroWeights:
    """See `TrainedWeights`. A share is one flat tensor for each of ZeRO's pieces, with the padding at its end.

    Parameter by parameter the ranks assemble what is shown or saved, so that none holds more than one beside its own.

    Raises:
        RuntimeError: By the collective methods, if it is not.
    """

    def __init__(
        self, module: nn.Module, pieces: list[Piece], device: torch.device, is_current: Callable[[], bool]
    ) -> None:
        self._module, self._device, self._is_current = module, device, is_current
        self._pieces = {str(index): piece for index, piece in enumerate(pieces)}

    def shares(self) -> dict[str, Tensor]:
        """See `TrainedWeights`: the float32 copies, whatever the parameters show."""
        return {key: piece.flat.detach() for key, piece in self._pieces.items()}

    @torch.no_grad()
    def show(self, shares: LocalValues) -> Callable[[], None]:
        """See `TrainedWeights`; keeps a copy of what this rank holds of the parameters."""
        own = {parameter: own_values(parameter).clone() for parameter in self._parameters()}

        @torch.no_grad()
        def show_own() -> None:
            for parameter, values in own.items():
                own_values(parameter).copy_(values)
                if is_gathered(parameter):
                    parameter.partition()  # which frees it; the next use gathers it anew

        try:
            with self._in_copies(shares):
                for parameter in own:
                    set_parameter(parameter, assemble(parameter, self._device), trained=False)
        except BaseException:
            show_own()
            raise
        return show_own

    @torch.no_grad()
    def to_names(self, shares: LocalValues) -> dict[str, Tensor]:
        """See `TrainedWeights`: this rank's share of whole tensors, on the CPU."""
        names, ranks = ParameterNames(self._module), RankAssignment(dist.get_world_size())
        found: dict[str, Tensor] = {}
        with self._in_copies(shares):
            for parameter in self._parameters():
                whole = assemble(parameter, self._device)
                if ranks.next(whole.numel()) == dist.get_rank():
                    found |= dict.fromkeys(names[parameter], whole.cpu())
        return found

    @torch.no_grad()
    def from_names(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """See `TrainedWeights`.

        Raises:
            CheckpointError: If a tensor has another shape than its parameter.
        """
        names, stored = ParameterNames(self._module), SavedTensors.of(saved)
        with self._in_copies({}):
            for parameter in self._parameters():
                name = next((name for name in names[parameter] if name in stored), None)
                if name is None:
                    continue
                if stored.shape(name) != full_shape(parameter):
                    raise CheckpointError(
                        f"The average of {name} in the checkpoint has shape {stored.shape(name)}, and the parameter "
                        f"{full_shape(parameter)}."
                    )
                set_master(parameter, stored[name])
            return {key: share.clone() for key, share in self.shares().items()}

    def _parameters(self) -> list[Any]:
        return [parameter for piece in self._pieces.values() for parameter in piece.parameters]

    @contextmanager
    def _in_copies(self, shares: LocalValues) -> Iterator[None]:
        """Puts other values into the float32 copies, which DeepSpeed's functions read and set, and back."""
        if not self._is_current():
            raise RuntimeError(
                "The averages belong to the DeepSpeed engine of the training, which another loop of the Trainer has "
                "replaced. Save a checkpoint after fit, and name it: trainer.validate(module, data, ckpt_path=...)."
            )
        own = {key: share.clone() for key, share in self.shares().items()}
        try:
            self._fill(shares)
            yield
        finally:
            self._fill(own)

    def _fill(self, shares: LocalValues) -> None:
        for key, share in shares.items():
            self._pieces[key].flat.data.copy_(share)
