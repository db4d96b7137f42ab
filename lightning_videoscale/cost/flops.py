"""The work of a diffusion transformer, counted from its configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from lightning_videoscale.families import AllFamilies, known

_TRAINING = 3
"""Forward, and backward for inputs and for weights."""


@dataclass(frozen=True)
class TransformerFlops:
    """FLOPs of a training step: ``per_token * ΣS + per_pair * ΣS²``.

    Args:
        layers: Transformer blocks.
        width: Width d of a token.
        ffn_width: Width of the feed-forward layer's middle.
        cross_attention: Whether every block also attends to text (its keys and values, a few hundred, are not counted).
        checkpointing: Whether backward computes the forward pass again.
        frozen: Share of the weights that are frozen, as under adapters: backward computes no gradients of them.
    """

    layers: int
    width: int
    ffn_width: int
    cross_attention: bool = True
    checkpointing: bool = True
    frozen: float = 0.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], checkpointing: bool = True) -> TransformerFlops:
        """Reads the configuration of a diffusers transformer.

        Raises:
            ValueError: If it lacks the number of layers, heads or the head's width.
        """
        missing = [name for name in ("num_layers", "num_attention_heads", "attention_head_dim") if name not in config]
        if missing:
            raise ValueError(f"The transformer's configuration lacks {missing}; give TransformerFlops its sizes.")
        width = int(config["num_attention_heads"]) * int(config["attention_head_dim"])
        layers = int(config["num_layers"]) + int(config.get("num_single_layers") or 0)
        ffn_width = int(config.get("ffn_dim") or width * float(config.get("mlp_ratio") or 4))
        joint = "num_single_layers" in config or "max_text_seq_length" in config
        return cls(layers, width, ffn_width, cross_attention=not joint, checkpointing=checkpointing)

    @classmethod
    def of_plain(cls, config: Mapping[str, Any], *, cross_attention: bool) -> TransformerFlops:
        """Reads a configuration of blocks that are all alike, whose feed-forward's middle is four tokens wide."""
        width = config["num_attention_heads"] * config["attention_head_dim"]
        return cls(config["num_layers"], width, 4 * width, cross_attention)

    @classmethod
    def of_module(cls, module: nn.Module, numel: Callable[[Tensor], int] = Tensor.numel) -> TransformerFlops:
        """Reads the configuration of the one transformer of diffusers that is trained in a module.

        A frozen copy of it, such as a moving average, does not count, nor does what another one is made of, as a
        compiled or adapted transformer is.

        Args:
            module: The module.
            numel: Counts the elements of a parameter, of which a rank may hold a part.

        Raises:
            ValueError: If there is none, or more than one, or its configuration lacks a size.
        """
        found: dict[str, Mapping[str, Any]] = {}
        for path, child in module.named_modules():
            config = getattr(child, "config", None)
            if not isinstance(config, Mapping):
                continue
            if "num_attention_heads" not in config and known("FLOPS", type(child)) is None:
                continue
            is_within = any(outer == "" or path.startswith(f"{outer}.") for outer in found)
            if not is_within and any(p.requires_grad for p in child.parameters()):
                found[path] = config
        if len(found) != 1:
            raise ValueError(
                f"expected one trained transformer with a diffusers config in {type(module).__name__}, found "
                f"{', '.join(sorted(found)) or 'none'}."
            )
        ((path, config),) = found.items()
        transformer, sizes = module.get_submodule(path), Counter[bool]()
        readers = (known("FLOPS", type(inner)) for inner in transformer.modules())  # of a wrapper too
        read: Callable[[Mapping[str, Any]], TransformerFlops] = next(filter(None, readers), cls.from_config)
        for parameter in transformer.parameters():
            sizes[parameter.requires_grad] += numel(parameter)
        return replace(read(config), frozen=sizes[False] / max(sizes.total(), 1))

    @property
    def per_token(self) -> float:
        """FLOPs of the linear layers per token."""
        projections = 12 if self.cross_attention else 8
        forward = self.layers * (projections * self.width**2 + 4 * self.width * self.ffn_width)
        return float(forward * (self._passes - self.frozen))

    @property
    def per_pair(self) -> float:
        """FLOPs of self-attention per pair of tokens."""
        return float(4 * self.layers * self.width * self._passes)

    @property
    def _passes(self) -> int:
        return _TRAINING + self.checkpointing


def training_flops(
    transformer: TransformerFlops, batch_size: int, sequence_length: int, sequence_parallel_size: int = 1
) -> float:
    """Returns the model FLOPs of one device for one micro-batch, nothing computed twice.

    Args:
        transformer: The model's sizes; its ``checkpointing`` is left out of account.
        batch_size: B, samples.
        sequence_length: S, tokens of one whole sample.
        sequence_parallel_size: Ranks that share the micro-batch.
    """
    once = replace(transformer, checkpointing=False)
    flops = batch_size * (once.per_token * sequence_length + once.per_pair * sequence_length**2)
    return flops / sequence_parallel_size


TRANSFORMERS = AllFamilies[TransformerFlops]("TRANSFORMERS")
"""Sizes of the published models, with activation checkpointing."""
