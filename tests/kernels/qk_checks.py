"""What every backend of qk_norm_rope has to show, on whatever device it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_videoscale.kernels import qk_norm_rope_ops as ops
from lightning_videoscale.kernels.qk_norm_rope import qk_norm_rope
from tests.kernels.qk_oracle import Arguments, Case, oracle


def gradients(
    function: Callable[..., tuple[Tensor, Tensor]], arguments: Arguments, seed: int = 1
) -> tuple[Tensor, ...]:
    """Of all tensors, for a random gradient of the outputs."""
    outputs = function(*arguments.tensors, **arguments.options)
    return torch.autograd.grad(outputs, arguments.leaves, random_like(outputs, seed))


def random_like(outputs: Sequence[Tensor], seed: int = 1) -> list[Tensor]:
    """Gradients that bfloat16 holds, hence the same ones for outputs of any dtype."""
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(y.shape, generator=rng, dtype=torch.float64).bfloat16().to(y.device, y.dtype) for y in outputs]


def relative(value: Tensor, exact: Tensor) -> float:
    """The relative error in the L2 norm."""
    return float((value.detach().double() - exact.detach()).norm() / exact.detach().norm().clamp(min=1e-30))


def check_accuracy(case: Case, dtype: torch.dtype, backend: str, device: str = "cpu", seed: int = 0) -> None:
    """Errors against float64 are those of the reference, which is bitwise diffusers' eager code."""
    arguments = case.arguments(dtype, seed=seed, device=device)
    mine = Arguments(arguments.tensors, arguments.options | {"backend": backend})
    plain = Arguments(arguments.tensors, arguments.options | {"backend": "reference"})
    double = arguments.double()

    def compare(
        ours: Sequence[Tensor], reference: Sequence[Tensor], exact: Sequence[Tensor], incoming: float = 0.0
    ) -> None:
        """What comes in may cancel: then the error is relative to that."""
        for value, eager, expected in zip(ours, reference, exact, strict=True):
            assert value.dtype is eager.dtype and value.shape == eager.shape
            floor = 1e-6 * max(1.0, incoming / float(expected.detach().norm().clamp(min=1e-30)))
            assert relative(value, expected) <= max(1.05 * relative(eager, expected), floor), (case, value, expected)

    outputs = [f(*a.tensors, **a.options) for f, a in ((qk_norm_rope, mine), (qk_norm_rope, plain), (oracle, double))]
    compare(*outputs)
    incoming = sum(float(x.norm()) for x in random_like(outputs[-1]))
    compare(gradients(qk_norm_rope, mine), gradients(qk_norm_rope, plain), gradients(oracle, double), incoming)


def check_repeats(case: Case, dtype: torch.dtype, backend: str, device: str = "cpu", times: int = 2) -> None:
    """Bitwise the same, forward and backward."""
    arguments = case.arguments(dtype, device=device)
    arguments.options["backend"] = backend
    first = gradients(qk_norm_rope, arguments)
    outputs = qk_norm_rope(*arguments.tensors, **arguments.options)
    for _ in range(times - 1):
        assert all(torch.equal(a, b) for a, b in zip(gradients(qk_norm_rope, arguments), first, strict=True))
        again = qk_norm_rope(*arguments.tensors, **arguments.options)
        assert all(torch.equal(a, b) for a, b in zip(again, outputs, strict=True))


def check_parts(case: Case, dtype: torch.dtype, backend: str, device: str = "cpu") -> None:
    """The ops for heads spread over ranks: sums, and forward and backward with statistics from outside."""
    arguments = case.arguments(dtype, device=device)
    q, k, q_weight, k_weight, *_ = (None if t is None else t.detach() for t in arguments.tensors)
    assert q is not None and k is not None
    cos, sin = arguments.options["rope"] or (None, None)
    rng = torch.Generator().manual_seed(2)
    rstds, means = ([torch.rand(x.shape[:2], generator=rng).to(device) + 0.5 for x in (q, k)] for _ in range(2))
    dq, dk = (torch.randn(x.shape, generator=rng).to(device, dtype) for x in (q, k))
    none = torch.empty(0, device=device)

    def run(name: str) -> list[Tensor]:
        variant = ("rms", False, case.layout, case.start, False, True, name)
        affine = (q_weight, k_weight, None, None, cos, sin)
        return [
            *ops.square_sums(q, k, name),
            *ops.gradient_sums(dq, dk, q, k, q_weight, k_weight, cos, sin, *rstds, case.layout, case.start, name),
            *ops.forward(q, k, *affine, *rstds, None, None, 1e-6, *variant)[:2],
            *ops.backward(dq, dk, q, k, *affine, none, none, *rstds, *means, *variant, None, None)[:4],
        ]

    for value, expected in zip(run(backend), run("reference"), strict=True):
        assert value.dtype is expected.dtype and value.shape == expected.shape
        bound = 2e-6 if value.dtype is torch.float32 else torch.finfo(dtype).eps
        assert relative(value, expected.double()) <= bound or not expected.numel()


def check_projection_biases(case: Case, dtype: torch.dtype, backend: str, device: str = "cpu") -> None:
    """The gradients of q and k summed over all tokens: at most 1.05 times the error of summing what is rounded."""
    arguments = case.arguments(dtype, device=device)
    q, k = arguments.tensors[:2]
    assert q is not None and k is not None
    biases = [torch.randn(x.shape[2] * x.shape[3]).to(device, dtype).requires_grad_() for x in (q, k)]
    proj = dict(zip(("q_proj_bias", "k_proj_bias"), biases, strict=True))
    options = arguments.options | {"backend": backend}
    outputs = qk_norm_rope(*arguments.tensors, **options, **proj)
    cotangents = random_like(outputs)
    dq, dk, *sums = torch.autograd.grad(outputs, [q, k, *biases], cotangents, retain_graph=True)
    again = torch.autograd.grad(outputs, biases, cotangents)
    double = arguments.double()
    exact = torch.autograd.grad(
        oracle(*double.tensors, **double.options), double.leaves[:2], [y.double() for y in cotangents]
    )
    for mine, repeated, dx, true in zip(sums, again, (dq, dk), exact, strict=True):
        truth, eager = true.sum((0, 1)).flatten(), dx.sum((0, 1)).flatten()
        assert mine.dtype is dtype and torch.equal(mine, repeated)
        floor = 1e-6 * float(true.norm() * true.shape[1] ** 0.5 / truth.norm().clamp(min=1e-30))
        assert relative(mine, truth) <= 1.05 * relative(eager, truth) + floor, case


def check_tables_of_channels(case: Case, dtype: torch.dtype, backend: str, device: str = "cpu") -> None:
    """Every second channel of a model's tables, wherever they are in memory, is read as tables per pair are.

    To the bit, but for Triton on GPUs, where the layout of a load may change the order in which a row is summed.
    """
    arguments = case.arguments(dtype, device=device)
    rope = arguments.options["rope"]

    def strided(table: Tensor, phase: int, padding: int) -> Tensor:
        channels = table.repeat_interleave(2, -1)
        wider = torch.nn.functional.pad(channels, (0, padding))
        return wider[..., phase : phase + channels.shape[-1] - phase : 2]

    layouts = [
        (strided(rope[0], 0, 0), strided(rope[1], 1, 0)),
        (strided(rope[0], 1, 4), strided(rope[1], 1, 4)),
        (strided(rope[0], 0, 3), strided(rope[1], 0, 3)),
        (strided(rope[0], 0, 0), rope[1]),
        tuple(table.transpose(1, -1).contiguous().transpose(1, -1) for table in rope),
    ]
    expected, *others = (
        gradients(qk_norm_rope, Arguments(arguments.tensors, arguments.options | {"backend": backend, "rope": tables}))
        for tables in [rope, *layouts]
    )
    bound = torch.finfo(dtype).eps if backend == "triton" and device != "cpu" else 0.0
    for layout, other in zip(layouts, others, strict=True):
        errors = [relative(a, b.double()) for a, b in zip(other, expected, strict=True)]
        assert max(errors) <= bound, [table.stride() for table in layout]
