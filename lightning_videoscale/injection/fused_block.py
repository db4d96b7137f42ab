"""How one class of blocks is replaced: by a subclass of the same name whose forward uses fused kernels."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from lightning_videoscale.compat.diffusers import declare_as
from lightning_videoscale.compat.patching import around_attention
from lightning_videoscale.families import class_path
from lightning_videoscale.injection.methods import difference, replacement_of, source_hash
from lightning_videoscale.injection.modulation import GroupedModulation
from lightning_videoscale.injection.parts import Part, changed_part, object_to_parts


def _nothing(module: nn.Module) -> str | None:
    return None


def _every_one(module: nn.Module) -> bool:
    return True


@dataclass(frozen=True)
class FusedBlock:
    """How blocks of one class get a forward that uses fused kernels.

    Attributes:
        class_path: ``"package.module.ClassName"`` of the blocks; a name, so that nothing is imported for models
            nobody uses.
        forward: The new forward. It takes ``self`` (the block, whose parameters and submodules stay as they are, and
            whose ``kernel_backend`` says what is to run its kernels, and whose ``recompute_norms`` whether to keep norm
            outputs for backward) and parameters of the same names as the original.
        what: What it does, for the report: ``"norm1, norm3: norm_modulate"``.
        known_forwards: `source_hash` of every original forward that the new one stands for; as a mapping, each with
            the releases that have it, for the report. None means whatever the class's body says, for classes whose code
            you own; a decorated forward must be named.
        helpers: Functions of the class's module that the original forward calls, and the new one does the work of, by
            name (``"Class.method"`` too), each with its `source_hash`.
        parts: The norms that the new forward does the work of. Where one has changed, the original is called.
        objection: Returns why else one block cannot be replaced, None if it can.
        is_meant: Whether a module of that class is such a block at all, where one class has many uses; the others are
            not in the report.
        only_with: Path of another class, of which no block in the model may keep its own forward; None if this one does
            not depend on others.
        last_linear: Returns the Linear that the output of a block comes from, or why the forward cannot leave that
            one's bias gradient to its caller now; where it can, it does so when called with ``detach_bias=True``. None
            if it never can.
        branches: Names of the submodules whose last Linear's bias gradient the forward takes where it can; a
            block may have None for some.
        gathers: Whether the new forward takes, beside ``self``, all arguments in one mapping by the original's names,
            with its defaults; for blocks that have very many.
        says_where_it_attends: Whether the new forward calls attention inside of `around_attention` alone.
        change: Returns what else than ``parts`` has changed so that the original is called, None for nothing.
        unless_given: An argument for the attention, such as an IP-adapter's, with which the original is called.
    """

    class_path: str
    forward: Callable[..., Any]
    what: str
    known_forwards: Collection[str] | None = field(default=None, hash=False)
    helpers: Mapping[str, str] = field(default_factory=dict, hash=False)
    parts: tuple[Part, ...] = ()
    objection: Callable[[nn.Module], str | None] = _nothing
    is_meant: Callable[[nn.Module], bool] = _every_one
    only_with: str | None = None
    last_linear: Callable[[Any], nn.Linear | str] | None = None
    branches: tuple[str, ...] = ()
    gathers: bool = False
    says_where_it_attends: bool = False
    change: Callable[[nn.Module], str | None] = _nothing
    unless_given: str | None = None

    def refusal(self, module: nn.Module) -> str | None:
        """Returns why ``module``, an instance of the named class, must be left as it is, or None."""
        if "forward" in vars(module):
            return "its forward was replaced on the instance already; inject before whatever did that"
        cls = type(module)
        replacement = replacement_of(cls, "forward")
        if self.known_forwards is None:
            if replacement is not None:
                return f"its forward was replaced by {replacement}; known_forwards may name it by its source_hash"
        elif (other := difference(cls, "forward", self.known_forwards)) is not None:
            return f"its forward {other}" if replacement is None else f"its forward was replaced by {replacement}"
        for name, expected in self.helpers.items():
            if source_hash(attrgetter(name)(sys.modules[cls.__module__])) != expected:
                return f"{name}, which its forward calls, is not the one that the fused forward was written for"
        return self.objection(module) or object_to_parts(module, self.parts)


def fused_block_of(module: nn.Module) -> FusedBlock | None:
    """Returns what the module was replaced by, or None where it is an original."""
    block: FusedBlock | None = vars(type(module)).get("_fused_block")
    return block


def original_forward(module: nn.Module) -> Callable[..., Any]:
    """Returns the forward that a fused one took the place of, bound to the module."""
    original: Callable[..., Any] = module._original_forward  # type: ignore[assignment]  # no module or tensor
    return original


def unfused(module: nn.Module, change: str) -> Callable[..., Any]:
    """Returns the original forward of a fused module, and warns, once, that and why it is called."""
    if not torch.compiler.is_compiling():
        warnings.warn(f"{class_path(type(module))} runs without its fused kernels: {change}.", stacklevel=2)
    return original_forward(module)


@functools.cache
def fused_class(base: type[nn.Module], block: FusedBlock) -> type[nn.Module]:
    """Returns the subclass of ``base`` with the fused forward.

    It carries the name of ``base`` (diffusers finds the blocks to compile by it), and its instances can be copied and
    pickled.

    Raises:
        TypeError: If the forwards differ in their parameter names, by which hooks and callers address arguments.
    """
    forward = _gathering(block.forward, base.forward) if block.gathers else block.forward
    names, expected = (list(inspect.signature(f).parameters) for f in (forward, base.forward))
    if names != expected:
        raise TypeError(f"The fused forward for {block.class_path} takes {names}, the original takes {expected}.")

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        reduced = base.__reduce_ex__(self, protocol)
        assert isinstance(reduced, tuple)
        return _new_instance, (base, block), *reduced[2:]

    def original_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with around_attention(self):  # somewhere in it
            return super(fused, self).forward(*args, **kwargs)  # a call that Dynamo can trace

    is_conditional = block.parts or block.unless_given is not None or block.change is not _nothing
    members = {
        "forward": _unless_changed(forward, block) if is_conditional else forward,
        "_original_forward": original_forward,
        "_fused_block": block,
        "forward_says_where_it_attends": block.says_where_it_attends,
        "__reduce_ex__": reduce,
    }
    identity = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    fused: Any = type(base.__name__, (base,), members | identity)
    declare_as(fused, base)
    return fused  # type: ignore[no-any-return]


def _gathering(fused: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward with the original's signature, which hands all arguments on in one mapping."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        return fused(self, given.arguments)

    return forward


def _unless_changed(fused: Callable[..., Any], block: FusedBlock) -> Callable[..., Any]:
    """The fused forward, or the original where the block has changed or is called as only that can be."""
    parts, other_change, name = block.parts, block.change, block.unless_given
    place = -1 if name is None else list(inspect.signature(fused).parameters).index(name) - 1

    @functools.wraps(fused)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        change = changed_part(self, parts) or other_change(self)
        if name is not None and (given := args[place] if place < len(args) else kwargs.get(name)):
            change = change or f"it was called with {name} {sorted(given)}"
        if change is None:
            return fused(self, *args, **kwargs)
        named = {key: _per_token(value) for key, value in kwargs.items()}
        return unfused(self, change)(*map(_per_token, args), **named)

    # One code for each class: Dynamo counts the recompilations of a code, and stops at eight.
    own: Any = forward
    own.__code__ = own.__code__.replace(co_name=f"forward_of_{block.class_path.rpartition('.')[2]}")
    return forward


def _per_token(argument: Any) -> Any:
    return argument.per_token() if isinstance(argument, GroupedModulation) else argument


def _new_instance(base: type[nn.Module], block: FusedBlock) -> nn.Module:
    cls = fused_class(base, block)  # type: ignore[arg-type]  # mypy mistakes the instances' hash for the class's
    return cls.__new__(cls)
