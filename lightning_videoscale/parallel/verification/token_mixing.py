"""Calls inside a split region that mix tokens, of which each rank has only its own: `TokenMixing`.

Seen is what mixes by what it is: attention, convolutions, norms and recurrent layers over tokens. What mixes by how it
is used (a mean, a softmax, a roll over tokens) is for the comparison of values, see `plan_verification`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_videoscale.compat.torch.trees import COMMON_LEAVES, quick_leaves
from lightning_videoscale.parallel.context import SequenceContext

_CONVOLUTIONS = {f"{kind}{n}d" for kind in ("conv", "conv_transpose") for n in (1, 2, 3)}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


class TokenMixing(TorchFunctionMode):
    """Follows the slices of a forward pass through the functions of torch, and notes the calls that mix their tokens.

    A tensor holds tokens if it was computed from a slice and has a slice's length along a dim. Text of every rank,
    which no slice went into, may be attended and mixed at will.

    Attributes:
        found: The calls, as "module path (class): what".
        region: The modules that were given tokens of a slice, or returned some, by path; without the network itself.
            Attention that exchanges is among them with all that it calls, as its tokens come from other ranks.
    """

    leaves_attention = True  # see `attention.dispatch`

    def __init__(self, context: SequenceContext) -> None:
        super().__init__()
        self.found: list[str] = []
        self.region: dict[str, nn.Module] = {}
        self._context = context
        self._slices = WeakIdKeyDictionary()
        self._seen_ids: set[int] = set()  # of slices that were, too: asked first, as most tensors are not among them
        self._path: list[str] = []

    @contextmanager
    def watching(self, network: nn.Module) -> Iterator[None]:
        """Inside, forward passes of the network are followed."""
        names = {module: name for name, module in network.named_modules()}
        attends = {inner for path in self._context.attention for inner in _inside(network, path)}

        def note(module: nn.Module, values: Any) -> None:
            if not (name := names.get(module)):
                return
            if module in attends or self._any_is_followed((values,)):
                self.region[name] = module

        def enter(module: nn.Module, args: Any) -> None:
            self._path.append(f"{names.get(module, '?') or 'the network'} ({type(module).__name__})")
            note(module, args)

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            self._path.pop()
            note(module, output)

        handles = [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]
        self._context.on_split = self._follow
        try:
            with self:
                yield
        finally:
            self._context.on_split = None
            for handle in handles:
                handle.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls the function, after a look at what it is given."""
        kwargs = kwargs or {}
        from_slices = self._any_is_followed(args) or self._any_is_followed(kwargs.values())
        if from_slices and self._mixes(getattr(func, "__name__", ""), args, kwargs):
            self.found.append(f"{self._path[-1] if self._path else 'the network'} calls {func.__name__}")
        result = func(*args, **kwargs)
        if from_slices and not _takes_no_values(func):  # a message from other ranks is received in such a tensor
            results = quick_leaves(result)
            if getattr(func, "__name__", "") == "qk_norm_rope.default":  # keeps queries and keys apart
                results = [y for x, y in zip(args[:2], result, strict=False) if self._is_followed(x)]
            for x in results:
                if isinstance(x, Tensor):
                    self._follow(x)
        return result

    def _follow(self, x: Tensor) -> None:
        self._slices[x] = True
        self._seen_ids.add(id(x))

    def _any_is_followed(self, values: Iterable[Any]) -> bool:
        """Whether one of the values is, or holds one that is; called for whatever a forward pass does with tensors."""
        for x in values:
            if type(x) in COMMON_LEAVES:
                if self._is_followed(x):
                    return True
            elif any(map(self._is_followed, quick_leaves(x))):
                return True
        return False

    def _is_followed(self, x: Any) -> bool:
        return id(x) in self._seen_ids and isinstance(x, Tensor) and x in self._slices

    def _has_tokens(self, x: Any, dims: Iterable[int]) -> bool:
        """Whether one of the dims is as long as a slice."""
        return self._is_followed(x) and any(x.shape[dim] in self._context.record.local_lengths for dim in dims)

    def _mixes(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        def argument(position: int, keyword: str) -> Any:
            return args[position] if position < len(args) else kwargs.get(keyword)

        x = argument(0, "input")
        if name == "scaled_dot_product_attention":
            return self._has_tokens(argument(1, "key"), [-2])
        if name == "multi_head_attention_forward":
            return self._has_tokens(argument(1, "key"), [0])
        if name in _CONVOLUTIONS:
            kernel = argument(1, "weight").shape[2:]
            return self._has_tokens(x, [dim for dim, size in enumerate(kernel, -len(kernel)) if size > 1])
        if name in ("group_norm", "instance_norm"):
            return self._has_tokens(x, range(2, x.ndim))
        if name == "batch_norm":
            return bool(argument(5, "training")) and self._is_followed(x)
        if name in ("layer_norm", "rms_norm"):
            return self._has_tokens(x, range(-len(argument(1, "normalized_shape")), -1))
        return name in _RECURRENT and self._has_tokens(x, range(x.ndim - 1))


def _inside(network: nn.Module, path: str) -> list[nn.Module]:
    """The module at a path and all in it; none where a user has taken it away."""
    with suppress(AttributeError):
        return [*network.get_submodule(path).modules()]
    return []


def _takes_no_values(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name.startswith("new_") or name.endswith("_like")
