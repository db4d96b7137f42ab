"""Messages in the place of Lightning's: they name our strategies, as Lightning's own do not split sequences."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NoReturn

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_videoscale.compat.lightning import LaunchedStrategy, is_interactive

if TYPE_CHECKING:
    from lightning_videoscale.strategies.settings import SequenceParallelSettings

_SHARES_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # set by torchrun: whether all starts of the ranks have one store
_SHOWN = 5  # names of parameters in a message
_WHAT_TO_DO = {
    "expect_autograd_hooks_": (
        "DDP with static_graph=True has to average the first micro-batch of a run, which accumulated gradients do not "
        "do: leave static_graph=True out, or accumulate_grad_batches (and strategy.block_backward_sync())."
    ),
    "got mixed torch.Tensor and DTensor": (
        "Parameters are sharded, and whole only while the module runs that holds them. Use them in its forward, and "
        "call the module itself rather than another method of it. A frozen network that follows one that trains is to "
        "be sharded like it: name it in shard_frozen=[...] of the strategy."
    ),
    "FSDP does not support deepcopy": (
        "Copy the network before it is sharded, in __init__ or configure_model, and name a copy that is frozen in "
        "shard_frozen=[...] of the strategy. An average of what trains is vs.callbacks.EMA's."
    ),
}
"""Of what torch says of DDP, and where shards are used as whole parameters."""


class OwnMessages(LaunchedStrategy):
    """Goes before a Lightning strategy in the bases of a class; part of `SequenceParallelMixin`."""

    _settings: SequenceParallelSettings
    _averaged: list[str]

    def __repr__(self) -> str:
        # Fabric, and a Trainer of the package pytorch_lightning, print a strategy that they do not know.
        return (
            f"<{type(self).__name__}, a strategy for lightning.pytorch.Trainer; elsewhere "
            "lightning_videoscale.parallel.parallelize splits a model>"
        )

    @override
    def check_launcher(self) -> None:
        """Refuses to start the script again where there is none, and warns where torchrun cannot start ranks again.

        Raises:
            ValueError: In a notebook, unless the processes are forked.
        """
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) and os.environ.get(_SHARES_STORE) == "True":
            rank_zero_warn(
                "torchrun has started the ranks again. Those of before have left their addresses, by which these may "
                "wait for each other or fail to connect. If so, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and start "
                "torchrun with --rdzv-backend=c10d or --standalone."
            )
        if is_interactive() and self.launcher is not None and not self.launcher.is_interactive_compatible:
            raise ValueError(
                f"{type(self).__name__} starts its processes by running the script again, and a notebook is none: put "
                f'the code into a script, or take strategy="{self._ddp_name()}_notebook", which forks the notebook '
                '(SequenceParallelDDPStrategy(start_method="fork") with further arguments). Lightning\'s own '
                '"ddp_notebook" would not split sequences.'
            )

    @override
    def on_exception(self, exception: BaseException) -> None:
        exception.args = tuple(self._own_words(arg) if isinstance(arg, str) else arg for arg in exception.args)
        super().on_exception(exception)

    def _own_words(self, message: str) -> str:
        """What a message of DDP's says; Lightning would replace it by one that names a strategy of its own.

        What DDP or FSDP2 says of itself alone is followed by what to do.
        """
        message = "".join([message, *(f" {what}" for said, what in _WHAT_TO_DO.items() if said in message)])
        if "Expected to have finished reduction in the prior iteration" not in message:
            return message
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        return (
            f"The loss of a step does not depend on all trainable parameters{self._named(found)}, and DDP waits for "
            "the gradients of all. Freeze what is not to train before fit. If it is to train in other steps, take "
            f'strategy="{self._ddp_name()}_find_unused_parameters_true", or '
            "SequenceParallelDDPStrategy(find_unused_parameters=True) with further arguments. Lightning's own "
            '"ddp_find_unused_parameters_true" would not split sequences.'
        )

    def _note_averaged(self, module: nn.Module) -> None:
        """Notes what DDP is about to number; manual optimization may freeze some of it for a while in each step."""
        self._averaged = [name for name, parameter in module.named_parameters() if parameter.requires_grad]

    def _named(self, indices: re.Match[str] | None) -> str:
        """The parameters that DDP gives the numbers of, as far as it does."""
        if indices is None:
            return ""
        unused = [self._averaged[index] for index in map(int, indices[1].split()) if index < len(self._averaged)]
        more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
        return f" (not on {', '.join(unused[:_SHOWN])}{more})"

    def _ddp_name(self) -> str:
        named = self._settings.ring_size
        return "usp_ddp" if isinstance(named, int) and named > 1 else "ulysses_ddp"


def first_names(names: list[str]) -> str:
    """As many names of parameters as a message takes, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{names[:_SHOWN]}{more}"


def refuse_fabric(name: str) -> NoReturn:
    """What Fabric calls for one of our names, of which it would otherwise say that there is none.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"strategy={name!r} is one for lightning.pytorch.Trainer. Under Fabric, train with Fabric's own "
        'strategy="ddp" and split the model yourself, between fabric.launch and fabric.setup: '
        "lightning_videoscale.parallel.parallelize(model, SequenceMesh.create(fabric.device.type, ulysses_size=...)). "
        "The ranks of a group must then get the same batch and noise."
    )
