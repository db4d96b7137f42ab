"""A network that was changed for a run is in no state to be pickled: `refuse_pickling` says so, and what to do."""

from __future__ import annotations

import pickle
from typing import Any, NoReturn

from torch import nn

from lightning_videoscale.undo import Undo


def refuse_pickling(network: nn.Module) -> Undo:
    """Makes pickling a network, as ``torch.save(network)`` does, an error that says what to save instead.

    To be called before other hooks are there: of a module, pickle comes to its hooks first, and would name one of ours.

    Returns:
        What lets it be pickled again.
    """
    return Undo(network.register_forward_hook(_NeverPickled(type(network).__name__)).remove)


class _NeverPickled:
    """A hook that does nothing, but where it is pickled."""

    def __init__(self, network: str) -> None:
        self._network = network

    def __call__(self, *_: Any) -> None:
        return

    def __deepcopy__(self, _: Any) -> _NeverPickled:
        return self  # copies of a network are changed likewise

    def __reduce__(self) -> NoReturn:
        raise pickle.PicklingError(
            f"{self._network} cannot be pickled during a run, as its attention and its hooks belong to the ranks. Save "
            "its state_dict(), or by save_pretrained where it has that; of hyperparameters, leave it out by "
            "save_hyperparameters(ignore=[...]). Once fit has ended, or the undo that parallelize has returned was "
            "called, it can be pickled."
        )
