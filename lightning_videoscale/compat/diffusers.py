"""What diffusers' models declare about themselves, read in 0.37 to 0.42. diffusers itself is not imported here.

Attributes that a model may lack are declarations: a model without them, of whatever package, declares nothing.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

from torch import Tensor, nn

from lightning_videoscale.compat.names import Package
from lightning_videoscale.compat.patching import patch

DIFFUSERS = Package("diffusers", "0.37 to 0.42")

CLASS_NAME = "_class_name"
"""The member of a model's configuration file that names its class."""


KERNELS_OF_BACKENDS: dict[
    str, Literal["sdpa", "cudnn", "efficient", "flash", "math", "flash_attn_2", "flash_attn_3"]
] = {
    "native": "sdpa",
    "_native_cudnn": "cudnn",
    "_native_efficient": "efficient",
    "_native_flash": "flash",
    "_native_math": "math",
    "flash": "flash_attn_2",
    "_flash_3": "flash_attn_3",
}
"""By the names that ``set_attention_backend`` takes, how the same kernel is called here."""


def block_classes(network: nn.Module) -> set[str]:
    """Returns the class names of a network's transformer blocks; transformers' models declare them too.

    ``compile_repeated_blocks`` and ``device_map="auto"`` use them, and no method returns them.
    """
    return set(getattr(network, "_repeated_blocks", None) or getattr(network, "_no_split_modules", None) or ())


def kept_in_float32(network: nn.Module) -> set[str]:
    """Returns the names, or parts of paths, of what a network keeps in float32 when it is loaded in another dtype."""
    return set(getattr(network, "_keep_in_fp32_modules", None) or ())


def joins_text_masks(network: nn.Module) -> bool:
    """Whether a Qwen-Image's attention is given a mask of text and image, as in 0.37, instead of the text's.

    What diffusers itself splits of the blocks' arguments, ``_cp_plan``, tells: nothing public does.
    """
    plan = getattr(network, "_cp_plan", None) or {}
    return "encoder_hidden_states_mask" not in plan.get("transformer_blocks.*", {})


def modulation_method() -> str:
    """The method by which Qwen-Image's blocks shift and scale, which nothing public does."""
    return "_modulate"


def projection_functions(module: str) -> tuple[str, str]:
    """Returns the paths of the functions that make queries, keys and values in a module of Flux's models.

    Processors of Flux.1 and Flux.2 call the first, and it the second; nothing public returns what they make.

    Args:
        module: The dotted name of the module that has them.
    """
    return f"{module}._get_qkv_projections", f"{module}._get_projections"


def projection_functions_of_wan(module: str) -> tuple[str, str]:
    """As `projection_functions`, of Wan and its copies: of the tokens, and of the image that is attended to, too."""
    return f"{module}._get_qkv_projections", f"{module}._get_added_kv_projections"


def chunk_of_feed_forward(block: Any) -> int | None:
    """How many tokens a block of SD3 feeds forward at once, which ``enable_forward_chunking`` sets; None: all."""
    size: int | None = block._chunk_size
    return size


def wrap_own_checkpoints(
    network: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> list[Callable[[], None]]:
    """Wraps what checkpoints a network's blocks, a function of a block and its arguments; returns what takes it back.

    ``enable_gradient_checkpointing`` sets it, and nothing public returns it.
    """
    checkpointing = [module for module in network.modules() if getattr(module, "gradient_checkpointing", False) is True]
    return [
        patch(module, "_gradient_checkpointing_func", wrap(function))
        for module in checkpointing
        if callable(function := getattr(module, "_gradient_checkpointing_func", None))
    ]


def cache_by_values(network: nn.Module) -> str | None:
    """Returns the configuration's class of a cache that decides by hidden states what is computed; None without one.

    ``enable_cache`` sets it, and the public ``is_cache_enabled`` says only that there is one.
    """
    name = type(getattr(network, "_cache_config", None)).__name__
    return name if name in ("FirstBlockCacheConfig", "SeaCacheConfig") else None


def cache_of(network: nn.Module) -> str | None:
    """Says which module has a hook of ``enable_cache`` that keeps numbers from call to call; None if none has."""
    for path, name, _ in _stateful_hooks(network):
        return f"{path or 'it'} has a cache, {name}, which keeps numbers from call to call"
    return None


def keep_caches(network: nn.Module) -> Callable[[], None]:
    """Returns a function that puts what the caches of ``enable_cache`` keep back to what it is now.

    ``reset_stateful_hooks`` is public and empties them, and nothing returns what they keep.
    """
    found = (value for _, _, hook in _stateful_hooks(network) for value in vars(hook).values() if _is_state(value))
    kept = [(state, _copied(vars(state))) for state in {id(state): state for state in found}.values()]

    def put_back() -> None:
        for state, before in kept:
            vars(state).clear()
            vars(state).update(before)

    return put_back


def _stateful_hooks(network: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """The paths of modules, with the names of their hooks and these."""
    for path, module in network.named_modules():
        registry = module.__dict__.get("_diffusers_hook")
        for name, hook in () if registry is None else registry.hooks.items():
            if DIFFUSERS.get(hook, "_is_stateful"):
                yield path, name, hook


def _is_state(value: Any) -> bool:
    """Whether a hook resets it; classes of several names do not share another."""
    return callable(getattr(type(value), "reset", None))


def _copied(value: Any) -> Any:
    """A copy, of tensors too: caches write into some. All else that a state holds never changes."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copied, value))
    if not _is_state(value):
        return value
    other = copy.copy(value)
    vars(other).update(_copied(vars(value)))
    return other


def dispatch_settings(processor: Any) -> tuple[Any, Any]:
    """Returns the attention backend and the parallel configuration that a processor hands to ``dispatch_attention_fn``.

    ``set_attention_backend`` and ``enable_parallelism`` set them on every processor, and nothing returns them.
    """
    try:
        return processor._attention_backend, processor._parallel_config
    except AttributeError as error:
        raise DIFFUSERS.missing(processor, "_attention_backend or _parallel_config") from error


def active_attention_backend() -> str | None:
    """Returns what attends where a processor names no backend; None without diffusers. Nothing public returns it."""
    home: Any = sys.modules.get("diffusers.models.attention_dispatch")
    if home is None:
        return None
    backend = DIFFUSERS.get(home, "_AttentionBackendRegistry").get_active_backend()[0]
    return str(getattr(backend, "value", backend))


def attends_by_torch(dispatch: Any, backend: Any) -> bool:
    """Whether ``dispatch_attention_fn``, or what is in its place, only calls torch's function.

    Args:
        dispatch: That function.
        backend: What it is given; None is the active one, which nothing public returns.
    """
    home: Any = sys.modules["diffusers.models.attention_dispatch"]
    if dispatch is not home.dispatch_attention_fn:
        return False
    name = active_attention_backend() if backend is None else str(getattr(backend, "value", backend))
    return name == "native"


def own_attention_backend(processor: Any) -> str | None:
    """Returns what ``set_attention_backend`` was called with for a processor; None if it was not.

    Such as ``"native"`` or ``"_native_cudnn"``. Nothing public returns it.
    """
    backend = getattr(processor, "_attention_backend", None)
    return None if backend is None else str(getattr(backend, "value", backend))


class HearsOfBackends:
    """A processor that ``set_attention_backend`` reaches: it passes over those without an attribute for it."""

    def on_backend(self, name: str | None) -> None:
        """Is called when a backend is set, and with None when it is taken back."""
        raise NotImplementedError

    @property
    def _attention_backend(self) -> Any:
        return vars(self).get("_backend")

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        self.on_backend(None if backend is None else str(getattr(backend, "value", backend)))
        self._backend = backend


def declare_as(cls: type[nn.Module], base: type[nn.Module]) -> None:
    """Lets caches (``enable_cache``) find what diffusers declares of a class of blocks for a subclass of it.

    They look up a block's very class in a registry that is public by name, in a module that is not. A class that is
    not in there has no caches, nor has its subclass.
    """
    if "diffusers" not in sys.modules:
        return
    registry = DIFFUSERS.get("diffusers.hooks._helpers", "TransformerBlockRegistry")
    try:
        declared = registry.get(base)
    except ValueError:
        return
    registry.register(cls, copy.copy(declared))
