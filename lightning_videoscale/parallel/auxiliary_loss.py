"""What goes in and out of a model's split region beside its own inputs, and loss terms of what it computes there.

`context_of`       how a model is split
`gather_sequence`  makes a slice whole, so that a loss of it has the value and the gradients of one rank
`split_sequence`   gives this rank's tokens of what a user adds to hidden states
`check_loss`       refuses a loss that was taken from a slice
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_videoscale.parallel.context import SequenceContext
from lightning_videoscale.parallel.sharding import gather_for_users, split

_CONTEXT = "_sequence_context"


def attach_context(model: nn.Module, context: SequenceContext | None) -> None:
    """Lets `gather_sequence` find how a model is split; None when it is whole again."""
    if context is None:
        delattr(model, _CONTEXT)
    else:
        setattr(model, _CONTEXT, context)


def context_of(model: nn.Module) -> SequenceContext | None:
    """Returns how a model is split; None if it is whole."""
    return getattr(model, _CONTEXT, None)


def gather_sequence(x: Tensor, dim: int, model: nn.Module, streams: Sequence[str] = ("video",)) -> Tensor:
    """Returns the whole of what a model computed for this rank's tokens, on every rank of the group.

    For loss terms of hidden states, such as a distance to a teacher's features or a balance of experts. The same code
    runs with and without sequence parallelism: where the model is whole, ``x`` is returned. Reduce over the channels
    first: one value per token is sent much faster than its hidden state, ::

        per_token = (hidden - target).square().mean(-1)                      # (B, s), s of this rank's S tokens
        loss = loss + gather_sequence(per_token, 1, self.transformer).mean()  # over (B, S)

    What must see all tokens may also go on inside the network, as a hook that adds their mean to each of them.
    Collective over the group. Gradients follow the one rule (see `sharding`): they are averaged over all ranks.

    Args:
        x: Slice with this rank's tokens along ``dim``, of the model's last forward pass.
        dim: The sequence dim.
        model: The network that was split.
        streams: Whose tokens they are, one stream behind the other.
    """
    context = context_of(model)
    return x if context is None or context.suspended else gather_for_users(x, dim, context, streams)


def split_sequence(x: Tensor, dim: int, model: nn.Module, streams: Sequence[str] = ("video",)) -> Tensor:
    """Returns this rank's tokens of a whole tensor, the counterpart of `gather_sequence`.

    For hooks that add something to a model's hidden states, such as the features of a control branch that is not
    split. The same code runs with and without sequence parallelism: where the model is whole, ``x`` is returned. ::

        block.register_forward_hook(lambda _, __, hidden: hidden + split_sequence(control, 1, self.transformer))

    Args:
        x: As all ranks of the group have it, whole along ``dim``.
        dim: The sequence dim.
        model: The network that was split, while it is called.
        streams: Whose tokens they are, one stream behind the other.

    Raises:
        ValueError: If ``x`` is not as long as the streams of this forward pass.
    """
    context = context_of(model)
    return x if context is None or context.suspended else split(x, dim, context, streams)


def check_loss(loss: Tensor) -> None:
    """Refuses a loss that depends on a slice of a split sequence other than through a gather.

    Such a term is a different number on each rank, and the average of its gradients is that of the mean over all
    tokens only where it is a mean and all slices are equally long. The loss's graph is followed down to the gathers,
    which is a few nodes. A term that depends on nothing before the split that trains, and on no exchange between the
    ranks, is not noticed, nor is one of what a compiled block returned, as its graph is one node.

    Args:
        loss: A scalar that backward is to start from.

    Raises:
        ValueError: If it does.
    """
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        returns = getattr(node, "returns", None)  # as the functions of this room have it, see `sharding`
        if returns == "whole":
            continue
        if returns == "slice":
            raise ValueError(
                "The loss has a term taken inside the region where the sequence is split, of this rank's tokens only: "
                "its value and gradients would be wrong. Make what it is taken from whole first: "
                "lightning_videoscale.parallel.gather_sequence(values, dim, network), with values such as (B, tokens)."
            )
        nodes.extend(parent for parent, _ in node.next_functions)
