"""Attention that exchanges over the group: `exchange_attention` makes a network's modules do so, as its plan says.

Of modules that the plan names, calls of `scaled_dot_product_attention` are redirected.

A module's own projections, norms and rotations run as they are, on this rank's tokens; only the attention itself is
replaced. That holds for whatever reaches torch's function from inside the module, such as diffusers' processors with
their native backend, and is traced by `torch.compile` without a graph break.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_videoscale.attention import AttentionChoices, as_choices, open_mask
from lightning_videoscale.attention.masks import is_biased, visible
from lightning_videoscale.compat.diffusers import own_attention_backend
from lightning_videoscale.compat.patching import call_within, only_redirects, own_forward, says_where_it_attends
from lightning_videoscale.kernels.capture import is_capturing
from lightning_videoscale.parallel.attention import gather_mask, sequence_parallel_attention
from lightning_videoscale.parallel.context import SequenceContext
from lightning_videoscale.parallel.plan import Attention, SplitPlan, submodules
from lightning_videoscale.parallel.ulysses import check_heads
from lightning_videoscale.undo import Undo

_TORCH = as_choices("sdpa")

_Masks = tuple[Tensor | None, Tensor | None, Tensor | None]


def exchange_attention(model: nn.Module, plan: SplitPlan, context: SequenceContext) -> Callable[[], None]:
    """Makes a network's attention exchange over the group, as its plan says; returns what takes it back.

    Raises:
        ValueError: If the network has no module of a path in the plan, or too few heads.
    """
    if not isinstance(plan.attention, Mapping):
        return plan.attention(model, context)
    if context.schedule != "serial" and plan.hide_exchange is not None:
        return plan.hide_exchange(model, context)
    undo = Undo()
    for pattern, rule in plan.attention.items():
        for path, module in submodules(model, pattern).items():
            heads = getattr(module, "heads", getattr(module, "num_heads", None))  # as diffusers' attention has them
            if isinstance(heads, int):
                check_heads(heads, context.mesh.ulysses.size)
            context.attention[path] = module
            if rule.in_one_call is not None:
                undo.add(rule.in_one_call(module))
            forward = exchanging_forward(module, path, rule, context)
            undo.set(module, "forward", MethodType(forward, module))  # a copy of the module has it for its own
    return undo


@dataclass(frozen=True)
class AttentionPlace:
    """Where attention exchanges. Compiled code never reads the path, so that all blocks may share it.

    Attributes:
        path: The module's.
        rule: What the plan says of it.
        context: The group and the tables of the pass.
        is_marked: Whether the module says where it calls attention, see `call_within`.
    """

    path: str
    rule: Attention
    context: SequenceContext
    is_marked: bool


def exchanging_forward(module: nn.Module, path: str, rule: Attention, context: SequenceContext) -> Callable[..., Any]:
    """Returns what runs a module's forward as it is now, and exchanges where that attends; it takes the module.

    Of a forward that is its class's, eager code looks up what it is in each call, as the class may be patched.
    """
    original: Any = module.forward
    unbound = original.__func__ if isinstance(original, MethodType) else None
    of_class = "forward" not in vars(module)
    place = AttentionPlace(path, rule, context, says_where_it_attends(module))

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        exchange = RedirectedAttention(place, own_attention_backend(getattr(self, "processor", None)) is not None)
        call = partial(original, *args, **kwargs) if unbound is None else partial(unbound, self, *args, **kwargs)
        if torch.compiler.is_compiling():
            with exchange:
                return call()
        if of_class:
            call = partial(type(self).forward, self, *args, **kwargs)
        if place.context.suspended:  # called by what a user has put around it since
            return call()
        if place.is_marked:
            result = call_within(self, exchange, call)
        else:
            with exchange:
                result = call()
        exchange.check_calls(type(self).__name__)
        return result

    return only_redirects(forward, own_forward(module))


class RedirectingMode(TorchFunctionMode):
    """Inside, `_attend` takes the place of `scaled_dot_product_attention`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls the function, or attends in its place."""
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        if func is Tensor.unflatten:
            func = torch.unflatten  # the same, and traced inside a mode, where the method's super() is not
        return func(*args, **(kwargs or {}))

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError


class RedirectedAttention(RedirectingMode):
    """Inside, attention is over the tokens of all ranks; one call of it is expected, or that nothing is computed."""

    def __init__(self, place: AttentionPlace, by_torch: bool) -> None:
        super().__init__()
        self.place, self._by_torch, self._calls = place, by_torch, 0
        self._computes = torch.compiler.is_compiling() or place.is_marked  # these are not followed

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Notes whether anything is computed with parameters: where a hook skips the module, nothing is."""
        if not self._computes:
            self._computes = any(isinstance(x, nn.Parameter) for x in (*args, *(kwargs or {}).values()))
        return super().__torch_function__(func, types, args, kwargs)

    def check_calls(self, name: str) -> None:
        """Refuses a module that attended otherwise, or more than once."""
        if self._calls > 1 or (self._computes and not self._calls):
            raise ValueError(
                f"{self.place.path} ({name}) exchanges once in a forward pass, by scaled_dot_product_attention, and "
                f"called it {self._calls} times. "
                + ("Choose torch's own attention, in diffusers the backend 'native'." if not self._calls else "")
            )

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """As torch's function, (B, H, s, D) of this rank's tokens; H and h may differ without ``enable_gqa``."""
        self._check(query.shape, key.shape, attn_mask, dropout_p, is_causal)
        query = self._without_bias(query, attn_mask)
        own, mask, empty = self.masks(attn_mask, query)
        out = self.exchanged(query, key, value, mask, scale, self._choices)
        if (hidden := self._hidden(own, empty, attn_mask)) is not None:
            out = out.masked_fill(hidden[:, None, :, None], 0.0)
        return out

    def attend_tokens_first(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """As torch's function, (B, s, H, D) of this rank's tokens."""
        (batch, tokens, heads, dim), (_, keys, kv_heads, _) = query.shape, key.shape
        self._check((batch, heads, tokens, dim), (batch, kv_heads, keys, dim), mask, 0.0, False)
        query = self._without_bias(query, mask)
        own, whole, empty = self.masks(mask, query)
        out = self._exchanged(query, key, value, whole, None, self._choices)
        if (hidden := self._hidden(own, empty, mask)) is not None:
            out = out.masked_fill(hidden[:, :, None, None], 0.0)
        return out

    @property
    def _choices(self) -> AttentionChoices:
        """A backend that the user set, and that calls torch's function, is torch's own pick."""
        return _TORCH if self._by_torch else self.place.context.choices

    def _hidden(self, own: Tensor | None, empty: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Of which queries the results are to be zeroed, (B, s) or (B, 1); None: of none."""
        if self.place.rule.padded_rows and mask is not None:
            assert own is not None
            return own.logical_not()
        return None if empty is None else empty[:, None]

    def _check(
        self,
        query: Sequence[int],
        key: Sequence[int],
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
    ) -> None:
        """Counts a call and refuses it, if need be, given the shapes of queries and keys, (B, H, s, D)."""
        self._calls += 1
        context, rule = self.place.context, self.place.rule
        objection = self._objection(query, key, attn_mask, dropout_p, is_causal)
        if context.on_exchange is not None:
            if objection is None and attn_mask is not None:
                objection = uneven(attn_mask) if rule.padded_rows else None
                objection = objection or self._hidden_though_unmasked(attn_mask)
            context.on_exchange(self.place.path, objection)
        if objection is not None:
            raise ValueError(f"{self.place.path} cannot attend over a split sequence: {objection}")

    def _without_bias(self, query: Tensor, mask: Tensor | None) -> Tensor:
        """Refuses other biases than 0 and -inf, once for a mask in a pass.

        Compiled code and CUDA graphs cannot wait for values: such a bias makes NaN of the query there.
        """
        if mask is None or mask.dtype is torch.bool:
            return query
        if torch.compiler.is_compiling() or is_capturing():
            return query + torch.where(is_biased(mask), torch.nan, 0.0)
        self.place.context.record.once(mask, "bias", partial(self._refuse_bias, mask))
        return query

    def _refuse_bias(self, mask: Tensor) -> None:
        """Refuses the bias of one rank on all of them."""
        mesh, transport = self.place.context.mesh, self.place.context.transport
        if bool(gather_mask(is_biased(mask).view(1, 1), (1,) * mesh.sp.size, mesh, transport).any()):
            raise ValueError(
                f"{self.place.path} cannot attend over a split sequence: its mask is a bias other than 0 for keys that "
                "count and -1000 or less for those that do not. Give it as bool."
            )

    def tokens(self, streams: tuple[str, ...]) -> int:
        """Returns how many tokens of the streams the call is expected to have."""
        return self.place.context.lengths(streams)[self.place.context.mesh.sp.rank]

    def masks(self, mask: Tensor | None, query: Tensor) -> _Masks:
        """Which keys may be attended, of this rank and of all, None for all of them; once for all layers.

        Last, (B,) bool, True for samples of which none may be and which the mask of all keys opens: their results are
        to be zeroed. None if there can be no such sample.
        """
        record, rule, batch = self.place.context.record, self.place.rule, query.shape[0]
        streams = rule.key_streams
        if mask is None:
            missing = record.missing(streams)
            return (None, None, None) if missing is None else self._gathered(None, missing, batch, query.device)
        settings = "keys", streams, batch, rule.padded_rows, rule.unmasked
        return record.once(mask, settings, lambda: self._gathered(mask, record.missing(streams), batch, query.device))

    def exchanged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float | None,
        choices: AttentionChoices,
    ) -> Tensor:
        """Attends from (B, H, s, D) to keys and values of all ranks; the second of `masks` says what counts."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self._exchanged(q, k, v, mask, scale, choices).transpose(1, 2)

    def _exchanged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float | None,
        choices: AttentionChoices,
    ) -> Tensor:
        """The same of (B, s, H, D)."""
        context, rule = self.place.context, self.place.rule
        return sequence_parallel_attention(
            query,
            key,
            value,
            context.mesh,
            lengths=context.lengths(rule.queries),
            key_lengths=None if rule.keys is None else context.lengths(rule.keys),
            whole_key_mask=mask,
            transport=context.transport,
            scale=scale,
            attention_backend=choices,
            number=context.number,
        )

    def _gathered(
        self, mask: Tensor | None, missing: tuple[bool, ...] | None, batch: int, device: torch.device
    ) -> _Masks:
        context, rule = self.place.context, self.place.rule
        own = key_mask(mask, missing, batch, device, padded_rows=rule.padded_rows)
        assert own is not None
        whole = gather_mask(own, context.lengths(rule.key_streams), context.mesh, context.transport)
        if mask is None or rule.unmasked is not None:
            return own, whole, None
        return own, *open_mask(whole)

    def _hidden_though_unmasked(self, mask: Tensor) -> str | None:
        """A look at values, which costs a synchronisation."""
        unmasked, streams = self.place.rule.unmasked, self.place.rule.key_streams
        if unmasked is None:
            return None
        start = sum(self.tokens((stream,)) for stream in streams[: streams.index(unmasked)])
        own = _of_keys(mask, mask.shape[0], self.place.rule.padded_rows)
        if bool(own[:, start : start + self.tokens((unmasked,))].all()):
            return None
        return f"its mask hides tokens of {unmasked}, of which the plan says unmasked={unmasked!r}."

    def _objection(
        self, query: Sequence[int], key: Sequence[int], mask: Tensor | None, dropout_p: float, is_causal: bool
    ) -> str | None:
        rule = self.place.rule
        for what, shape, streams in (("query", query, rule.queries), ("key", key, rule.key_streams)):
            mine = self.tokens(streams)
            if len(shape) != 4 or shape[2] != mine:
                return (
                    f"its {what} is {tuple(shape)}, and this rank has {mine} tokens of {', '.join(streams)} in dim 2."
                )
        if is_causal:
            return "it is causal."
        if dropout_p:
            return f"it drops attention weights, dropout_p={dropout_p}."
        return None if mask is None else _mask_objection(mask, key[2], rule.padded_rows)


def _mask_objection(mask: Tensor, keys: int, padded_rows: bool) -> str | None:
    """By what all ranks see alike: shapes and strides, no values."""
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if len(shape) != 4 or shape[3] != keys:
        return f"its mask is {tuple(mask.shape)}, for {keys} keys of this rank."
    expanded = [size == 1 or (size > 1 and mask.stride(dim - 4) == 0) for dim, size in enumerate(shape)]
    if not expanded[1]:
        return f"its mask {tuple(mask.shape)} has a dim of heads."
    if not expanded[2] and not (padded_rows and shape[2] == shape[3]):
        return (
            f"its mask {tuple(mask.shape)} has a dim of queries. If these are rows of padding that nobody reads, the "
            "plan may say so: Attention(padded_rows=True)."
        )
    return None


def key_mask(
    mask: Tensor | None, missing: tuple[bool, ...] | None, batch: int, device: torch.device, *, padded_rows: bool
) -> Tensor | None:
    """Returns (B, keys), True where a key may be attended and is not missing; None if all may be.

    Args:
        mask: As torch's function takes it.
        missing: Whether each key is none; None if all are there.
        batch: B.
        device: Of the mask, where there is but ``missing``.
        padded_rows: As `Attention` has it.
    """
    own = None if mask is None else _of_keys(mask, batch, padded_rows)
    if missing is None:
        return own
    there = torch.tensor(missing, device=device).logical_not().expand(batch, -1)
    return there if own is None else own & there


def _of_keys(mask: Tensor, batch: int, padded_rows: bool) -> Tensor:
    allowed = visible(mask)[(None,) * (4 - mask.ndim)][:, 0]
    keys = allowed.diagonal(dim1=-2, dim2=-1) if padded_rows and allowed.shape[1] > 1 else allowed[:, 0]
    return keys.expand(batch, -1)


def uneven(mask: Tensor) -> str | None:
    """Returns what stands against a mask (B, 1, tokens, tokens), or what broadcasts to it, by its values, too."""
    allowed = visible(mask)[(None,) * (4 - mask.ndim)]
    if allowed.shape[2] == 1:
        return None
    keys = allowed.diagonal(dim1=-2, dim2=-1)
    if bool(((allowed == keys[..., None, :]) | ~keys[..., None]).all()):
        return None
    return "its mask differs between queries that are no padding; padding are those that it masks as keys, too."
