"""Row operations in every variant, and an oracle of them written once more, for autograd in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.kernels import gate_residual, gate_residual_norm_modulate, norm_modulate

Tensors = dict[str, Tensor | None]


@dataclass(frozen=True)
class Case:
    """A call of one of the three operations.

    Attributes:
        operation: "norm_modulate", "gate_residual" or both in one.
        rows: R: 1 per sample, S per token; with ``indexed`` the entries per sample of the index.
        modulated: "both", "scale" or "none".
        tables: Whether gate, scale and shift have tables, or the name of the one that has.
        branch_bias: Whether the gradient of the branch's bias is asked for.
        branch_dtype: By default that of the residual.
        table_dtype: Of the tables.
        affine_dtype: Of weight and bias, by default that of the modulation, as the branch's bias.
        bias_dtype: Of the branch's bias.
    """

    operation: str = "gate_residual_norm_modulate"
    b: int = 2
    s: int = 6
    d: int = 64
    rows: int = 1
    indexed: bool = False
    norm: str = "layer"
    affine: bool = False
    modulated: str = "both"
    gated: bool = True
    tables: bool | str = False
    activation: str = "identity"
    branch_norm: bool = False
    branch_bias: bool = False
    dtype: torch.dtype = torch.float32
    modulation_dtype: torch.dtype = torch.float32
    branch_dtype: torch.dtype | None = None
    table_dtype: torch.dtype = torch.float32
    affine_dtype: torch.dtype | None = None
    bias_dtype: torch.dtype | None = None
    rounding: str = "fp32_once"
    seed: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        norm = {} if self.operation == "gate_residual" else {"norm": self.norm}
        gate = {"gate_activation": self.activation, "branch_norm": self.branch_norm}
        return {"eps": 1e-6, "rounding": self.rounding} | norm | ({} if self.operation == "norm_modulate" else gate)

    def tensors(self, device: str = "cpu") -> Tensors:
        """The arguments by name, leaves that require gradients (but the index)."""
        rng = torch.Generator(device).manual_seed(self.seed)

        def draw(*size: int, dtype: torch.dtype) -> Tensor:
            drawn = torch.randn(*size, generator=rng, dtype=torch.float64, device=device)
            return drawn.to(dtype).requires_grad_()

        x, modulation = (self.b, self.s, self.d), (self.b, self.rows, self.d)
        index = None
        if self.indexed:
            modulation = (5, self.d)  # entry 4 belongs to nobody
            index = torch.randint(4, (self.b, self.rows), generator=rng, device=device)
        has_norm, has_branch = self.operation != "gate_residual", self.operation != "norm_modulate"
        wanted = {
            "gate": has_branch and self.gated,
            "scale": has_norm and self.modulated != "none",
            "shift": has_norm and self.modulated == "both",
        }
        tensors: Tensors = {"residual" if has_branch else "x": draw(*x, dtype=self.dtype)}
        if has_branch:
            tensors["branch"] = draw(*x, dtype=self.branch_dtype or self.dtype)
            bias_dtype = self.bias_dtype or self.modulation_dtype
            tensors["branch_bias"] = draw(self.d, dtype=bias_dtype) if self.branch_bias else None
        for name, there in wanted.items():
            tensors[name] = draw(*modulation, dtype=self.modulation_dtype) if there else None
            has_table = there and self.tables in (True, name)
            tensors[f"{name}_table"] = draw(self.d, dtype=self.table_dtype) if has_table else None
        if has_norm and self.affine:
            affine_dtype = self.affine_dtype or self.modulation_dtype
            tensors["weight"] = draw(self.d, dtype=affine_dtype)
            tensors["bias"] = draw(self.d, dtype=affine_dtype) if self.norm == "layer" else None
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return given | ({"index": index} if any(wanted.values()) and index is not None else {})

    def run(self, tensors: Tensors, backend: str = "auto") -> tuple[Tensor, ...]:
        """The operation's outputs."""
        functions = {f.__name__: f for f in (norm_modulate, gate_residual, gate_residual_norm_modulate)}
        result = functions[self.operation](**tensors, **self.settings, backend=backend)
        return result if isinstance(result, tuple) else (result,)

    def oracle(
        self, tensors: Tensors, dtype: torch.dtype = torch.float64, h: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The outputs in plain PyTorch, everything in ``dtype``, rounded nowhere in between unless by ``dtype``.

        The norm's statistics are those of the h that is given, if one is, as of one that was rounded.
        """
        t = {name: x if name == "index" or x is None else x.to(dtype) for name, x in tensors.items()}
        x = t["x"] if "x" in t else t["residual"]
        assert x is not None

        def rows_of(name: str) -> Tensor:
            values, table, index = t[name], t.get(f"{name}_table"), t.get("index")
            assert values is not None
            values = values if table is None else values + table
            values = values if index is None else values[index]
            return values.repeat_interleave(self.s // values.shape[1], dim=1)

        def rms(x: Tensor) -> Tensor:
            return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

        outputs = []
        if (branch := t.get("branch")) is not None:
            if (bias := t.get("branch_bias")) is not None:
                branch = branch + (bias - bias.detach())  # it is in the branch already
            branch = rms(branch) if self.branch_norm else branch
            if "gate" in t:
                branch = branch * (rows_of("gate").tanh() if self.activation == "tanh" else rows_of("gate"))
            x = x + branch
            outputs.append(x)
            x = x if h is None else x + (h.to(dtype) - x).detach()
        if self.operation != "gate_residual":
            if self.norm == "layer":
                x = torch.nn.functional.layer_norm(x, (self.d,), t.get("weight"), t.get("bias"), 1e-6)
            else:
                x = rms(x) if t.get("weight") is None else rms(x) * t["weight"]  # type: ignore[operator]
            x = x * (1 + rows_of("scale")) if "scale" in t else x
            outputs.append(x + rows_of("shift") if "shift" in t else x)
        return tuple(outputs)


def all_variants() -> list[Case]:
    """Every variant once, the row maps in turn."""
    maps = itertools.cycle([(1, False), (2, False), (6, False), (3, True), (6, True)])

    def mapped(case: Case) -> Case:
        rows, indexed = next(maps)
        return replace(case, rows=rows, indexed=indexed)

    cases = []
    for norm, affine, tables in itertools.product(("layer", "rms"), (False, True), (False, True)):
        for modulated in ("both", "scale", "none"):
            cases.append(Case("norm_modulate", norm=norm, affine=affine, tables=tables, modulated=modulated))
        for gated, activation, branch_norm in GATES:
            gate: dict[str, Any] = {"gated": gated, "activation": activation, "branch_norm": branch_norm}
            cases.append(Case(norm=norm, affine=affine, tables=tables, branch_bias=affine == tables, **gate))
    for tables, (gated, activation, branch_norm) in itertools.product((False, True), GATES):
        if gated:
            gate = {"activation": activation, "branch_norm": branch_norm}
            cases.append(Case("gate_residual", tables=tables, branch_bias=tables, **gate))
    return [mapped(case) for case in cases]


GATES = [(False, "identity", False), (True, "identity", False), (True, "tanh", False), (True, "tanh", True)]


def gradients(outputs: tuple[Tensor, ...], tensors: Tensors, seed: int = 1) -> list[Tensor]:
    """The gradients of every argument for one random cotangent."""
    device = outputs[0].device
    rng = torch.Generator(device).manual_seed(seed)
    cotangents = [
        torch.randn(o.shape, generator=rng, dtype=torch.float64, device=device).to(torch.bfloat16).to(o.dtype)
        for o in outputs
    ]
    leaves = [t for t in tensors.values() if t is not None and t.is_floating_point()]
    return list(torch.autograd.grad(outputs, leaves, cotangents))


def in_float64(tensors: Tensors) -> Tensors:
    """Copies of the arguments, as leaves."""
    return {
        name: t if t is None or not t.is_floating_point() else t.detach().double().requires_grad_()
        for name, t in tensors.items()
    }


def relative_error(x: Tensor, expected: Tensor) -> float:
    """Relative L2 error."""
    return float((x.detach().double() - expected.detach()).norm() / expected.detach().norm().clamp_min(1e-300))


def assert_close_to_oracle(case: Case, backend: str, device: str = "cpu") -> None:
    """fp32 within 1e-6 of float64; less than fp32: at most 1.05 times eager's own error, per tensor."""
    tensors = case.tensors(device)
    exact = in_float64(tensors)
    outputs, expected = case.run(tensors, backend), case.oracle(exact)
    results = [*outputs, *gradients(outputs, tensors)]
    truths = [*expected, *gradients(expected, exact)]
    if case.dtype is torch.float32:
        bounds = [1e-6] * len(truths)
    else:
        plain = case.oracle(tensors, case.dtype)
        own = [*plain, *gradients(plain, tensors)]
        bounds = [1.05 * relative_error(x, truth) + 1e-7 for x, truth in zip(own, truths, strict=True)]
    for result, truth, bound in zip(results, truths, bounds, strict=True):
        error = relative_error(result, truth)
        assert error <= bound, f"{case} on {backend}: {error:.2e} > {bound:.2e} for shape {tuple(truth.shape)}"
