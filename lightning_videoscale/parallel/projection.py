"""What an attention module makes of one stream's tokens before it attends: `Projection`, said by each model family.

A schedule that hides the exchange needs it, as it computes and sends query, key and value one by one. Attention that is
redirected (`redirection`) does without.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Projection:
    """Query, key and value of a stream: a linear layer, a norm, a rotation; none of them sees another token.

    All names are those of the attention module's children, and of arguments of its ``forward``. A child that a model
    has as None is left out.

    Layouts with each pair's values twice: ``"sd"`` (s, head dim), or fewer channels if only a head's first are rotated;
    ``"bshd"`` (1, s, 1, head dim); ``"bsc"`` (B, s, all heads' channels). With each once: ``"bhsd"`` (B, H, s,
    head dim / 2); ``"shd"`` (s, H, head dim / 2). Others are no two tables of all tokens: ``"complex"`` is one, cos +
    i sin, (s, head dim / 2) or (B, s, head dim / 2); ``"matrices"`` are rotations (B, s, 1, head dim / 2, 2, 2);
    ``"dict"`` are complex numbers (1, 1, s, head dim / 2) by the names query and key; ``"axes"`` are tables (positions,
    head dim / 3) for each third of a head, and where in them a token is, (1, s) each.

    Attributes:
        tokens: The argument with the stream's tokens, (B, s, D).
        linears: Of query, key and value; None for what other streams give.
        norms: Of query and key.
        across_heads: Whether norms are over the channels of all heads, not of each.
        rotary: The argument with the tables (cos, sin) of the stream's positions, if its queries and keys are rotated.
            Where a call has None for it, they are not.
        layout: What the tables are, see above.
        halves: Whether a pair is a channel of a head's first half and one of its second, instead of two neighbours.
        tokens_of: The streams whose tokens that argument has, one behind the other; this one's alone if left out.
        joined: The layer that its code calls instead where diffusers has joined the three (``fuse_projections``); None
            if it goes on calling the three.
        packed: Whether the three are one layer's first channels, one behind the other, and others follow.
        rotary_of: The streams whose positions the tables have, one behind the other; this one's alone if left out.
        rotary_part: Which member of that argument is this stream's, where each stream has its own tables in there.
        output: What the attended tokens pass at the end, a Linear or a list of one and a Dropout.
    """

    tokens: str = "hidden_states"
    linears: tuple[str | None, str | None, str | None] = ("to_q", "to_k", "to_v")
    norms: tuple[str, str] = ("norm_q", "norm_k")
    across_heads: bool = False
    rotary: str | None = None
    layout: str = "sd"
    halves: bool = False
    tokens_of: tuple[str, ...] = ()
    joined: str | None = None
    packed: bool = False
    rotary_of: tuple[str, ...] = ()
    rotary_part: int | None = None
    output: str = "to_out"
