"""Precisions under `ulysses_fsdp2`: which are sent, which compute, which are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_videoscale.strategies import SequenceParallelFSDP2Strategy
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Record, RectifiedFlow
from tests.models import gradient_error
from tests.strategies.fsdp2.training import clips, ddp, fsdp2, message, trainer

Ranks = Callable[[int], ProcessPool]


def fit_in(
    strategy: Callable[..., Strategy], precision: str, module_class: type[pl.LightningModule] = RectifiedFlow
) -> tuple[list[float], list[dict[str, Tensor]]]:
    record = Record()
    torch.manual_seed(3)
    # One step: AdamW turns the rounding of near-zero gradients into whole steps of the weights.
    runner = trainer(strategy(ulysses_size=1), precision=precision, callbacks=[record], max_steps=1)
    runner.fit(module_class(), clips())
    return record.losses, record.gradients


def test_mixed_precision_is_that_of_ddp(ranks: Ranks) -> None:
    expected = ranks(2).run(fit_in, ddp, "bf16-mixed")
    for (losses, [gradients]), (expected_losses, [expected_gradients]) in zip(
        ranks(2).run(fit_in, fsdp2, "bf16-mixed"), expected, strict=True
    ):
        assert losses == expected_losses, "rounded before it is sent or after: the same bits enter every product"
        assert gradient_error(gradients, expected_gradients) <= 1e-2
        different = {name for name, x in expected_gradients.items() if not torch.equal(gradients[name], x)}
        # The blocks' gradients with respect to the text are added up in another order, in bfloat16 either way.
        assert all(name.startswith("transformer.condition_embedder.text_embedder.") for name in different)


def test_bf16_true_and_32_true(ranks: Ranks) -> None:
    for precision, tolerance in (("bf16-true", 1e-2), ("32-true", 1e-6)):
        losses, gradients = ranks(2).run(fit_in, fsdp2, precision)[0]
        expected_losses, expected_gradients = ranks(2).run(fit_in, ddp, precision)[0]
        assert losses == expected_losses
        assert (
            gradient_error(
                {name: x.float() for name, x in gradients[0].items()},
                {name: x.float() for name, x in expected_gradients[0].items()},
            )
            <= tolerance
        )


class Modulated(nn.Module):
    """A block with products of torch's layers beside parameters that it adds or multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, 16))
        self.positions = nn.Embedding(5, 16)
        self.mixing = nn.Conv1d(16, 16, 1)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.positions.weight) * self.table[0] + self.table[1]
        mixed = self.mixing(x.mT).mT
        attended: Tensor = self.attention(mixed, mixed, mixed)[0]
        return x + attended


class Modulations(nn.Sequential):
    _no_split_modules = ("Modulated",)


class OwnModel(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = Modulations(Modulated(), Modulated())
        self.dtypes: dict[str, torch.dtype] = {}
        self.network[0].register_forward_hook(self.note)

    def note(self, block: nn.Module, *_: Any) -> None:
        self.dtypes = {name: parameter.dtype for name, parameter in block.named_parameters()}

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.network(batch["text"]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def dtypes_of_own_model() -> dict[str, torch.dtype]:
    module = OwnModel()
    trainer(fsdp2(ulysses_size=1), precision="bf16-mixed", max_steps=1).fit(module, clips())
    return module.dtypes


def test_of_a_model_of_your_own_only_weights_of_products_are_rounded(ranks: Ranks) -> None:
    expected = ranks(2).run(fit_in, ddp, "bf16-mixed", OwnModel)
    for (losses, [gradients]), (expected_losses, [expected_gradients]) in zip(
        ranks(2).run(fit_in, fsdp2, "bf16-mixed", OwnModel), expected, strict=True
    ):
        assert losses == expected_losses
        assert gradient_error(gradients, expected_gradients) <= 1e-6
    dtypes = ranks(2).run(dtypes_of_own_model)[0]
    full = {name for name, dtype in dtypes.items() if dtype is torch.float32}
    assert full == {"table", "positions.weight"}


class DtypesInForward(RectifiedFlow):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, torch.dtype] = {}
        for block in self.transformer.blocks:
            block.register_forward_hook(self.note)

    def note(self, block: nn.Module, *_: Any) -> None:
        assert not any(isinstance(p, DTensor) for p in block.parameters())
        self.seen |= {name: p.dtype for name, p in block.named_parameters()}


def gathered_dtypes() -> tuple[dict[str, torch.dtype], set[torch.dtype]]:
    module = DtypesInForward()
    trainer(fsdp2(), precision="bf16-mixed", max_steps=1).fit(module, clips())
    return module.seen, {p.dtype for p in module.parameters()}


def test_matrices_travel_in_bfloat16_and_what_is_added_in_float32_in_float32(ranks: Ranks) -> None:
    seen, stored = ranks(2).run(gathered_dtypes)[0]
    assert stored == {torch.float32}
    full = {name for name, dtype in seen.items() if dtype is torch.float32}
    assert full == {
        "scale_shift_table",
        "norm2.weight",
        "norm2.bias",
        *(f"attn{i}.norm_{x}.weight" for i in (1, 2) for x in "qk"),
    }
    assert {seen[name] for name in seen.keys() - full} == {torch.bfloat16}


class OwnAutocast(RectifiedFlow):
    """Opens autocast by itself, to another dtype than the Trainer does, or closes it."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.own_dtype = dtype

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", self.own_dtype or torch.bfloat16, enabled=self.own_dtype is not None):
            return super().loss(batch)


def autocast_by_user(dtype: torch.dtype | None, precision: str = "bf16-mixed") -> str:
    try:
        trainer(fsdp2(), precision=precision, max_steps=1).fit(OwnAutocast(dtype), clips())
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_what_autocast_would_not_round_is_refused_where_weights_are_gathered_so(ranks: Ranks) -> None:
    assert ranks(2).run(autocast_by_user, torch.bfloat16) == ["no error"] * 2
    for said in ranks(2).run(autocast_by_user, None):
        assert "transformer.blocks.0 is called outside of autocast" in said and "32-true" in said
    for said in ranks(2).run(autocast_by_user, torch.float16):
        assert "transformer.blocks.0 is called under autocast to torch.float16" in said
    assert ranks(2).run(autocast_by_user, torch.float16, "32-true") == ["no error"] * 2


def test_the_names_are_registered() -> None:
    for name, ring_size in (("ulysses_fsdp2", None), ("usp_fsdp2", 2)):
        selected = pl.Trainer(strategy=name, accelerator="cpu").strategy
        assert isinstance(selected, SequenceParallelFSDP2Strategy)
        assert selected._settings.ring_size == ring_size


def refused_precisions() -> list[str]:
    return [
        message(fsdp2(), RectifiedFlow(), plugins=[pl.plugins.HalfPrecision("16-true")]),
        message(fsdp2(), RectifiedFlow(), plugins=[pl.plugins.MixedPrecision("16-mixed", "cpu")]),
    ]


def test_other_precisions_are_refused(ranks: Ranks) -> None:
    true, mixed = ranks(2).run(refused_precisions)[0]
    assert "precision='16-true'" in true and "32-true, bf16-mixed, bf16-true, 64-true" in true
    assert "precision='16-mixed'" in mixed
    assert "bf16-mixed" in mixed
