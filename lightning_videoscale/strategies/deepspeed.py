"""Sequence parallelism under ZeRO: `SequenceParallelDeepSpeedStrategy`. DeepSpeed is imported when one is created."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_videoscale.attention import AttentionBackend
from lightning_videoscale.compat.deepspeed import changed_beside_copies, data_parallel_group, forget_gradients
from lightning_videoscale.compat.lightning import SettledDeepSpeedStrategy, set_up_deepspeed_processes, timeout_of
from lightning_videoscale.compat.lightning.training_loop import accumulates
from lightning_videoscale.compat.torch.distributed import set_timeout
from lightning_videoscale.graphs import GraphMode, GraphOptions, no_graphs
from lightning_videoscale.parallel import SplitPlan
from lightning_videoscale.parallel.layout import Size, SizeOfGroup
from lightning_videoscale.parallel.schedules import ScheduleSetting
from lightning_videoscale.parallel.transport import TransportName
from lightning_videoscale.ranks import gather_over_ranks
from lightning_videoscale.strategies.checkpoints.zero import ZeroCheckpoints
from lightning_videoscale.strategies.compilation import CompileOptions
from lightning_videoscale.strategies.lightning_messages import first_names
from lightning_videoscale.strategies.mixin import SequenceParallelMixin
from lightning_videoscale.strategies.parity import ParityReport
from lightning_videoscale.strategies.settings import SequenceParallelSettings
from lightning_videoscale.strategies.weight_averaging import check_weight_averaging
from lightning_videoscale.strategies.whole_parameters import check_pruning
from lightning_videoscale.strategies.zero.precision import ZeroPrecision
from lightning_videoscale.strategies.zero.steps import ZeroSteps


class SequenceParallelDeepSpeedStrategy(ZeroCheckpoints, SequenceParallelMixin, SettledDeepSpeedStrategy):
    """DeepSpeed's ZeRO whose ranks also share sequences: groups of ranks work on one batch together.

    ZeRO partitions optimizer states (stage 1), gradients (2) and parameters (3) over all ranks, dp × sp, which is also
    what gradients are averaged over; DeepSpeed's own sequence parallelism stays off. Registered as
    ``"ulysses_deepspeed_stage_1"``, ``"ulysses_deepspeed_stage_2"`` and ``"ulysses_deepspeed_stage_3"``.

    Runs on CUDA devices, and on CPUs over gloo where the environment says ``DS_ACCELERATOR=cpu`` before DeepSpeed is
    imported.

    In DeepSpeed's configuration the world is all ranks, so its ``train_batch_size`` is micro-batch size × accumulated
    micro-batches × dp × sp, although a group of sp ranks reads one micro-batch. DeepSpeed uses the sizes for its
    printed throughput only; ``train_micro_batch_size_per_gpu`` is 1 unless given.

    Args:
        stage: 1, 2 or 3.
        graphs: As for `SequenceParallelDDPStrategy`, under stages 1 and 2. Stage 3 gathers parameters to other memory
            in every step: there ``"auto"`` is off.
        timeout: How long a collective may wait for a rank that does not come.
        **kwargs: As for Lightning's ``DeepSpeedStrategy``: offloading, bucket sizes, or a whole ``config``, which then
            says the stage.

    Other arguments are as for `SequenceParallelDDPStrategy`.

    Raises:
        ModuleNotFoundError: If DeepSpeed is not installed.
        ValueError: If ``config`` asks for DeepSpeed's own sequence parallelism, or ``graphs`` is True under stage 3.
            At the start of ``fit``, as `SequenceParallelDDPStrategy` does, or if DeepSpeed runs on another kind of
            device than the Trainer.
    """

    def __init__(
        self,
        stage: int = 2,
        ulysses_size: Size = None,
        ring_size: Size = None,
        modules: list[str] | None = None,
        plan: SplitPlan | None = None,
        activation_checkpointing: bool | float = False,
        compile: CompileOptions = False,
        transport: TransportName = "collective",
        schedule: ScheduleSetting = "serial",
        sp_size: SizeOfGroup = None,
        verify_plan: bool = True,
        save_frozen: bool | None = None,
        attention_backend: AttentionBackend = "auto",
        graphs: GraphMode = False,
        graphs_max_memory: float = 0.05,
        timeout: timedelta | None = default_pg_timeout,
        **kwargs: Any,
    ) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise ModuleNotFoundError(
                f"{type(self).__name__} needs DeepSpeed, which is not installed: "
                'pip install "lightning-videoscale[zero]".'
            )
        super().__init__(stage=stage, timeout=timeout, **kwargs)
        if "sequence_parallel_size" in (self.config or {}):
            raise ValueError(
                "The DeepSpeed config sets sequence_parallel_size, DeepSpeed's own sequence parallelism. Leave it out: "
                "the strategy's ulysses_size and ring_size say how sequences are split."
            )
        self._backward_before_step = -1  # of how many steps, when backward ran last
        self._steps = ZeroSteps(None, torch.device("cpu"))  # of no optimizer yet
        self._init_sequence_parallel(
            SequenceParallelSettings(
                ulysses_size,
                ring_size,
                modules,
                plan,
                activation_checkpointing,
                compile=compile,
                transport=transport,
                schedule=schedule,
                sp_size=sp_size,
                verify_plan=verify_plan,
                save_frozen=save_frozen,
                attention_backend=attention_backend,
                graphs=(
                    no_graphs(graphs, "ZeRO stage 3") if self.zero_stage_3 else GraphOptions(graphs, graphs_max_memory)
                ),
            )
        )

    @override
    def setup_environment(self) -> None:
        from deepspeed.accelerator import get_accelerator

        check_weight_averaging(self._module.trainer, type(self).__name__)
        check_pruning(self._module.trainer, type(self).__name__, allow_masks=not self.zero_stage_3)
        self._refuse_search()
        if get_accelerator().device_name() != self.root_device.type:
            raise ValueError(
                f"The Trainer runs on {self.root_device.type!r} and DeepSpeed on {get_accelerator().device_name()!r}: "
                f"set the environment variable DS_ACCELERATOR={self.root_device.type} before DeepSpeed is imported, or "
                "the Trainer's accelerator."
            )
        if isinstance(self.accelerator, CPUAccelerator):
            # DeepSpeed asks for an index of the device, and the parent for another kind of device.
            self.parallel_devices = [torch.device("cpu", 0)] * self.num_processes
            super(DeepSpeedStrategy, self).setup_environment()
        else:
            super().setup_environment()
        self._create_mesh(self.num_processes, timeout_of(self))

    def _refuse_search(self) -> None:
        """A search for a learning rate puts schedulers around optimizers of torch, and ZeRO's are none."""
        trainer = self._module.trainer
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        if trainer.state.fn == TrainerFn.FITTING and any(isinstance(each, LearningRateFinder) for each in callbacks):
            raise ValueError(
                f"LearningRateFinder and Tuner.lr_find cannot set the learning rate of {type(self).__name__}'s "
                "optimizer. Search under ulysses_fsdp2 or ulysses_ddp, with as many ranks and micro-batches, and train "
                "here with the learning rate that it finds."
            )

    @override
    def setup_distributed(self) -> None:
        if isinstance(self.accelerator, CPUAccelerator):
            super(DeepSpeedStrategy, self).setup_distributed()
            set_up_deepspeed_processes(self)
        else:
            super().setup_distributed()
        timeout = timeout_of(self)
        if timeout is not None:
            # ZeRO's reductions run in a group that DeepSpeed makes for itself, with torch's default timeout.
            set_timeout(data_parallel_group(), timeout)

    @override
    def init_deepspeed(self) -> None:
        super().init_deepspeed()
        if self._module.trainer.training:
            self._steps.close()
            self._steps = ZeroSteps(self.deepspeed_engine.optimizer, self.root_device)
        precision, engine = self.precision_plugin, self.deepspeed_engine
        assert isinstance(precision, DeepSpeedPrecision)
        self.precision_plugin = ZeroPrecision(precision.precision, engine.gradient_clipping())
        if engine.bfloat16_enabled():
            # DeepSpeed has called `bfloat16()`, by which Lightning's `module.dtype` does not change.
            self._module.to(torch.bfloat16)

    @override
    def initialize_inference(self, model: nn.Module) -> None:
        # The parent starts with removing all hooks, which an earlier engine may have left behind.
        assert self._undo_changes is not None
        self._undo_changes()
        super().initialize_inference(model)
        self._undo_changes = self._change_networks(model)

    @property
    @override
    def _gathers_in_forward(self) -> bool:
        return self.zero_stage_3

    @override
    def _shares_parameters(self, network: nn.Module) -> bool:
        return self.zero_stage_3 or super()._shares_parameters(network)

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        # DeepSpeed would count micro-batches across the end of an epoch, where Lightning starts to count anew.
        return False

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        yield  # ZeRO reduces when it must, and the boundary that `backward` sets is all it needs to know

    @override
    def verify_parity(self, module: pl.LightningModule, batch: Any) -> ParityReport:
        """Not available: DeepSpeed's engine gives gradients to its optimizer only.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "verify_parity needs gradients that DeepSpeed's engine does not give away between steps: run it once under "
            "ulysses_ddp or ulysses_fsdp2, which split the sequence in the same way."
        )

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.deepspeed_engine.global_steps == self._backward_before_step:
            self._refuse_manual_accumulation(self._module)
        else:
            self._steps.begin()
        self._backward_before_step = self.deepspeed_engine.global_steps
        is_due = not accumulates(self._module.trainer)
        self.deepspeed_engine.set_gradient_accumulation_boundary(is_due)
        forget_gradients(self.deepspeed_engine.optimizer)
        # Lightning has divided the loss by the number of accumulated micro-batches, and DeepSpeed would do so again.
        loss = super().backward(closure_loss, *args, **({"scale_wrt_gas": False} | kwargs))
        if is_due:
            self._steps.agree()
            self._refuse_changes(self.deepspeed_engine.global_steps)  # here ranks have waited for each other anyway
        return loss

    def _refuse_manual_accumulation(self, module: pl.LightningModule) -> None:
        """ZeRO-1 and 2 have to know before a backward whether a step follows, which only the user's code does."""
        stage = self.deepspeed_engine.zero_optimization_stage()
        if not module.automatic_optimization and stage < 3:
            raise ValueError(
                f"Manual optimization ran backward twice before an optimizer step, and ZeRO stage {stage} would drop "
                "the gradients of the first: add the losses up and run backward once, or use stage 3, ulysses_fsdp2 or "
                "ulysses_ddp."
            )

    def _refuse_changes(self, step: int) -> None:
        """Weights that hooks change are not what ZeRO trains: its next step, or gathering, would write over them."""
        if step & (step - 1):  # 0, 1, 2, 4, 8 and so on
            return
        changed = set(changed_beside_copies(self._module.parameters(), self.deepspeed_engine.optimizer))
        own = [name for name, parameter in self._module.named_parameters() if parameter in changed]
        names = list(dict.fromkeys(chain.from_iterable(gather_over_ranks(own))))  # each rank compares its parts
        if names:
            where = (
                "within deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)"
                if self.zero_stage_3
                else "on all ranks"
            )
            raise ValueError(
                f"{first_names(names)} were changed by something else than the optimizer. ZeRO keeps copies, which it "
                "trains and saves, and would undo that. Load weights in __init__ or configure_model. In hooks, set "
                f"parameter.data {where}, and of what trains also the copy, by "
                "deepspeed.utils.safe_set_full_fp32_param(parameter, value) on all ranks. Or take ulysses_ddp or "
                "ulysses_fsdp2."
            )

    @override
    def connect(self, model: pl.LightningModule) -> None:
        if self.model is not None and self.model is not self.lightning_module:
            self.deepspeed_engine.destroy()  # or its hooks would go on to act on the model
        self._backward_before_step = -1
        super().connect(model)
