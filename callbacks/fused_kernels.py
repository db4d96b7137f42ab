"""Injects the fused kernels at the right moment under any strategy."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_videoscale.compat.patching import patch
from lightning_videoscale.injection import FusedBlock, InjectionReport, inject_fused_kernels
from lightning_videoscale.kernels.backend import BackendName


class FusedKernels(pl.Callback):
    """Calls `inject_fused_kernels` on the LightningModule once it is built and before it is wrapped.

    Our strategies offer ``add_model_transform`` and inject before they split the model. Under any other strategy the
    injection follows the module's ``configure_model``. Build the network there or in ``__init__`` or ``setup``, and
    leave ``torch.compile`` and ``fully_shard`` to the strategy or to later: a compiled block is an error, a sharded one
    is skipped with a warning.

    The kernels stay in the model after the run; ``report.undo()`` takes them out.

    Attributes:
        report: What was replaced and what was skipped; None until the model was built. Of several
            models, the last one's.
    """

    def __init__(
        self,
        backend: BackendName = "auto",
        extra_blocks: Sequence[FusedBlock] = (),
        *,
        recompute_norms: bool = False,
    ) -> None:
        """Creates the callback.

        Args:
            backend: What runs the kernels: "auto", or "cuda", "triton" or "reference", which then runs or raises.
            extra_blocks: Blocks of your own, see `lightning_videoscale.injection`.
            recompute_norms: Compute the outputs of the norms again in backward instead of keeping them for it.
        """
        self.backend: BackendName = backend
        self.extra_blocks = tuple(extra_blocks)
        self.recompute_norms = recompute_norms
        self.report: InjectionReport | None = None
        self._injected: weakref.ref[nn.Module] | None = None  # the model of the report
        self._device: torch.device | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Registers the injection; the model may not exist yet."""
        self._device = trainer.strategy.root_device
        add_model_transform = getattr(trainer.strategy, "add_model_transform", None)
        if add_model_transform is not None:
            add_model_transform(self._inject)
        else:
            self._inject_after_configure_model(pl_module)

    def _inject_after_configure_model(self, pl_module: pl.LightningModule) -> None:
        def configure_model() -> None:
            undo()
            pl_module.configure_model()
            self._inject(pl_module)

        # No later hook comes before wrapping, and this one also covers modules that only have the inherited method.
        undo = patch(pl_module, "configure_model", configure_model)

    def _inject(self, model: nn.Module) -> None:
        report = inject_fused_kernels(
            model, self.backend, self.extra_blocks, recompute_norms=self.recompute_norms, device=self._device
        )
        if not report.replaced and self._injected is not None and self._injected() is model:
            return  # a further run
        self.report, self._injected = report, weakref.ref(model)
        say = rank_zero_info if report.replaced else rank_zero_warn
        say(str(report))
