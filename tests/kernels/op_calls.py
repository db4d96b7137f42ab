"""Every operation, called once with all the tensors that it takes: where what holds for all of them is tested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_videoscale import kernels
from lightning_videoscale.kernels.backend import BackendName
from tests.kernels.gelu_cases import draw

B, S, D, HEADS = 2, 6, 64, 4


class Call(NamedTuple):
    """One call.

    Attributes:
        function: Takes the tensors by name, and settings.
        shapes: Of the tensors.
        settings: Those that are names, and one value of each.
    """

    function: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]
    settings: dict[str, str]

    def tensors(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Leaves that require gradients, but for the rotation's."""
        return {
            name: draw(*shape, device=device, dtype=dtype, seed=i, spread=1.0).requires_grad_(
                name not in ("cos", "sin")
            )
            for i, (name, shape) in enumerate(self.shapes.items())
        }

    def run(self, tensors: dict[str, Tensor], **settings: str) -> tuple[Tensor, ...]:
        outputs = self.function(**tensors, **settings)
        return outputs if isinstance(outputs, tuple) else (outputs,)


def _qkv_linear(x: Tensor, backend: BackendName = "auto", **parameters: Tensor) -> Any:
    weights, biases = (tuple(parameters[f"{name}_{kind}"] for name in "qkv") for kind in ("weight", "bias"))
    return kernels.qkv_linear(x, weights, biases)  # type: ignore[arg-type]


def _qk_norm_rope(cos: Tensor, sin: Tensor, **given: Any) -> Any:
    return kernels.qk_norm_rope(rope=(cos, sin), **given)


_X, _VALUES, _CHANNELS, _WEIGHT, _HEADS, _ANGLES = (B, S, D), (B, 1, D), (D,), (D, D), (B, S, HEADS, D // HEADS), (S, 8)
_NORM = {"weight": _CHANNELS, "bias": _CHANNELS, "scale": _VALUES, "shift": _VALUES}
_NORM |= {"scale_table": _CHANNELS, "shift_table": _CHANNELS}
_GATE = {"residual": _X, "branch": _X, "gate": _VALUES, "gate_table": _CHANNELS, "branch_bias": _CHANNELS}
_QK = {"q": _HEADS, "k": _HEADS, "q_weight": _CHANNELS, "k_weight": _CHANNELS, "cos": _ANGLES, "sin": _ANGLES}
_ROUNDING, _LAYOUT = {"rounding": "eager"}, {"rope_layout": "half"}
CALLS = {
    "norm_modulate": Call(kernels.norm_modulate, {"x": _X} | _NORM, _ROUNDING | {"norm": "layer"}),
    "fork_norm_modulate": Call(kernels.fork_norm_modulate, {"x": _X} | _NORM, _ROUNDING | {"norm": "layer"}),
    "gate_residual": Call(kernels.gate_residual, _GATE, _ROUNDING | {"gate_activation": "tanh"}),
    "gate_residual_norm_modulate": Call(
        kernels.gate_residual_norm_modulate, _GATE | _NORM, _ROUNDING | {"norm": "layer", "gate_activation": "tanh"}
    ),
    "gelu": Call(kernels.gelu, {"x": _X, "bias": _CHANNELS}, {}),
    "gelu_linear": Call(kernels.gelu_linear, {"x": _X, "weight": _WEIGHT, "bias": _CHANNELS, "x_bias": _CHANNELS}, {}),
    "qkv_linear": Call(
        _qkv_linear, {"x": _X} | {f"{n}_weight": _WEIGHT for n in "qkv"} | {f"{n}_bias": _CHANNELS for n in "qkv"}, {}
    ),
    "qk_norm_rope": Call(
        _qk_norm_rope, _QK | {"q_proj_bias": _CHANNELS, "k_proj_bias": _CHANNELS}, _ROUNDING | _LAYOUT | {"norm": "rms"}
    ),
}


def gradients(call: Call, tensors: dict[str, Tensor], under_autocast: bool = False, **settings: str) -> list[Tensor]:
    """Of all tensors that require any, backward alone inside an autocast context or in none."""
    outputs = call.run(tensors, **settings)
    cotangents = [draw(*y.shape, device=str(y.device), dtype=y.dtype, seed=i) for i, y in enumerate(outputs)]
    leaves = [t for t in tensors.values() if t.requires_grad]
    with torch.autocast(outputs[0].device.type, dtype=torch.bfloat16, enabled=under_autocast):
        return list(torch.autograd.grad(outputs, leaves, cotangents))


def assert_no_graph_break(function: Callable[..., Tensor], leaves: Sequence[Tensor]) -> None:
    """Compiled whole, a function computes the same bits, and so do its gradients."""
    results = function(*leaves), torch.compile(function, backend="aot_eager", fullgraph=True)(*leaves)
    assert torch.equal(*results)
    pairs = zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in results), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
