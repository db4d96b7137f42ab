"""Sequence parallelism over replicated parameters: `SequenceParallelDDPStrategy`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import timedelta
from difflib import get_close_matches
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_videoscale.attention import AttentionBackend
from lightning_videoscale.compat.lightning import WrappingDDPStrategy, comm_state_of, ddp_arguments, timeout_of
from lightning_videoscale.compat.torch.data_parallel import has_new_buckets, leave_to_caller
from lightning_videoscale.graphs import GraphMode, GraphOptions
from lightning_videoscale.parallel import SplitPlan
from lightning_videoscale.parallel.layout import Size, SizeOfGroup
from lightning_videoscale.parallel.schedules import ScheduleSetting
from lightning_videoscale.parallel.transport import TransportName
from lightning_videoscale.strategies.compilation import CompileOptions
from lightning_videoscale.strategies.first_buckets import await_release
from lightning_videoscale.strategies.gradient_hooks import refuse_before_averaging, refuse_local_averages
from lightning_videoscale.strategies.mixin import SequenceParallelMixin
from lightning_videoscale.strategies.settings import SequenceParallelSettings
from lightning_videoscale.strategies.sharded.earlier import refuse_zero
from lightning_videoscale.strategies.units import broadcast_from_first, is_quantized, materialize

_DEFAULTS = {"gradient_as_bucket_view": True, "bucket_cap_mb": 100}
"""Of DDP's arguments. NCCL's kernels hold multiprocessors from when a rank has a bucket until the others have it."""


class SequenceParallelDDPStrategy(SequenceParallelMixin, WrappingDDPStrategy):
    """DistributedDataParallel whose ranks also share sequences: groups of ranks work on one batch together.

    The devices form a mesh dp × ring × ulysses. The ranks of a group receive the same batch and the same random
    numbers, each computes its slice of the sequence, and self-attention exchanges slices for heads (Ulysses), passes
    keys and values around (ring attention), or both (USP). Gradients are averaged over all ranks and equal those of
    one device with the group's batch. Registered as ``"ulysses_ddp"``, and with ``ring_size=2`` as ``"usp_ddp"``; with
    ``find_unused_parameters=True`` the names end in ``"_find_unused_parameters_true"``, and with
    ``start_method="fork"``, for notebooks, in ``"_notebook"``.

    Args:
        ulysses_size: Ranks that trade sequence slices for heads. Left out or ``"auto"``: what ``sp_size`` leaves. If
            both are left out, the layout that is predicted to be the fastest is taken, see
            `parallel.choose_layout`: one Ulysses group, unless rings gain more than 3 %. The log says which, and why.
        ring_size: Ranks that pass keys and values around, each a Ulysses group of its own (USP). Left out: 1 if only
            ``ulysses_size`` is named, else as for it. A ring has no second derivative, as a penalty on gradients of
            inputs needs it: name ``ring_size=1`` there.
        modules: Paths, within the LightningModule, of the networks whose sequence is split. Left out, the one network
            that has a plan.
        plan: What is split where in the one network that ``modules`` names. Left out, the plan registered for its
            class.
        activation_checkpointing: Keep only the inputs of every transformer block and compute the rest again in
            backward. A number such as 0.5 does so with this share of the blocks, the first ones: as much time saved as
            there is memory for.
        compile: Compile every transformer block: True, or keyword arguments of ``torch.compile``.
        transport: How Ulysses exchanges run: ``"collective"`` (gloo, NCCL) or ``"symmetric"`` (by the GPUs' copy
            engines, within a host).
        schedule: When they run: ``"serial"``, after the projections; ``"overlap"`` or ``"sliced"``, beside them, which
            most families can; ``"auto"``, whichever was measured to be faster for a layer of its kind. See
            docs/schedules.md.
        sp_size: Ranks that work on one batch together, ``ulysses_size * ring_size``. Left out: their product where it
            is named, else the devices of a node. ``"auto"``: as few as hold the longest clip, by the tokens that a
            device holds (``budget`` of `VideoDataModule`: ``m_mem`` of a `BucketBudget`, which then is that of one
            device, or a measured matrix). More data-parallel ranks then make a larger global batch, which the log
            names.
        verify_plan: Compare the network split and whole when it is first called, unless tests hold its plan to one
            device, as Wan's; a difference is an error. See ``parallel.verify_plan``.
        save_frozen: Whether checkpoints hold frozen parameters too. If not, they hold what trains, buffers, and what
            of the frozen was changed since the start of ``fit``; they continue with a model that is built from the
            same weights, which is checked. Left out, it is not if adapters of peft are all that trains in the networks
            that have them.
        attention_backend: Which kernel computes attention, also of networks that are not split. ``"auto"`` measures
            those that are installed after steps 1, 2, 4, 8 and so on, checks them against float64, and takes the
            fastest on all ranks; until then, and on CPUs, it is torch's own pick. By name: ``"sdpa"`` (torch's own
            pick), ``"cudnn"``, ``"flash"``, ``"efficient"``, ``"math"``, ``"flash_attn_2"``,
            ``"flash_attn_3"``, ``"flash_attn_4"``; one that cannot run is an error with the reason.
            ``torch.nn.attention.sdpa_kernel`` and diffusers' ``set_attention_backend`` override it.
        graphs: Run forward and backward of the networks by CUDA graphs, shape by shape, from the third call of a shape
            on: True where that is possible, ``"auto"`` for those of them that wait for the host, unless blocks are
            compiled. See docs/graphs.md.
        graphs_max_memory: Share of a device's memory that graphs may take.
        timeout: How long a collective may wait for a rank that does not come.
        **kwargs: As for Lightning's ``DDPStrategy`` and torch's ``DistributedDataParallel``, with three other defaults:
            rank 0's buffers are broadcast at the start, before validation and when training ends, and not in every
            forward pass (``broadcast_buffers=True`` asks for it, ``False`` leaves each rank its own); gradients are
            views of DDP's buckets (``gradient_as_bucket_view=True``) rather than kept twice; and a bucket holds 100 MiB
            rather than 25 (``bucket_cap_mb=100``), as ranks a few percent apart slow each other down at every one.

    Raises:
        TypeError: If an argument is unknown or of another type.
        ValueError: At the start of ``fit``, if the devices do not form whole groups, no network has a plan, a network
            has fewer attention heads than ``ulysses_size``, or ``sp_size="auto"`` cannot be told from the data.
        NotImplementedError: At the start of ``fit`` or in the first step, if the attention backend asked for cannot
            run, with the reason.
        RuntimeError: At the start of ``fit``, if the transport asked for is not available, with the reason.
    """

    def __init__(
        self,
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
        graphs: GraphMode = "auto",
        graphs_max_memory: float = 0.05,
        timeout: timedelta | None = default_pg_timeout,
        **kwargs: Any,
    ) -> None:
        super().__init__(timeout=timeout, **(_DEFAULTS | kwargs))
        _check_arguments(type(self), ddp_arguments(self))
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
                graphs=GraphOptions(
                    graphs,
                    graphs_max_memory,
                    gradients_are_copied=bool(ddp_arguments(self)["gradient_as_bucket_view"]),
                ),
            )
        )
        self._wrapped: set[Parameter] = set()
        self._has_stepped = False

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        refuse_zero(self._module, type(self).__name__, hooks=self.world_size > 1)
        # DDP sends rank 0's values to all; of what is on the meta device there are none that Lightning could move.
        if undefined := materialize(self._module, self.root_device):
            raise ValueError(
                f"{undefined} were built on the meta device and nothing defines their values. Give their modules a "
                "reset_parameters(), or build them on a real device. ulysses_fsdp2 also takes values from ckpt_path=."
            )
        super().setup(trainer)

    @override
    def wrap(self, model: Module) -> DistributedDataParallel:
        first = self.global_rank - self.local_rank
        refuse_local_averages(comm_state_of(self), self.mesh.sp.ranks, range(first, first + self.num_processes))
        quantized = {name: p for name, p in model.named_parameters(remove_duplicate=False) if is_quantized(p)}
        leave_to_caller(model, quantized)
        broadcast_from_first(dict.fromkeys(quantized.values()), self.root_device)
        wrapped = super().wrap(model)
        self._wrapped, self._has_stepped = set(model.parameters()), False
        if not {"broadcast_buffers", "forward_sync_buffers"} & ddp_arguments(self).keys():
            # Rotary tables are buffers: broadcasting them in every forward would make each wait for the slowest rank.
            wrapped.broadcast_buffers = False
        return wrapped

    @override
    def _share_buffers(self) -> None:
        if ddp_arguments(self).get("broadcast_buffers", True):
            super()._share_buffers()

    @property
    @override
    def _averages_what_was_called(self) -> bool:
        # Else DDP itself learns what no rank has called, and averages the rest with zeros.
        assert isinstance(self.model, DistributedDataParallel)
        return self.model.require_backward_grad_sync and not ddp_arguments(self).get("find_unused_parameters", False)

    @property
    @override
    def _averages_now(self) -> bool:
        assert isinstance(self.model, DistributedDataParallel)
        return self.model.require_backward_grad_sync

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self.world_size > 1:
            refuse_before_averaging(self._module)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self._refuse_late()
        super().pre_backward(closure_loss)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, *args, **kwargs)
        if (
            not self._has_stepped
            and isinstance(self.model, DistributedDataParallel)
            and not has_new_buckets(self.model)
        ):
            await_release(self.root_device)
        self._has_stepped = True
        return result

    def _refuse_late(self) -> None:
        """DDP averages the gradients of what the model had when it was wrapped, and of nothing else.

        What is no parameter of the model may be a copy, whose gradients its owner sets.
        """
        held = (p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"])
        late = {p for p in held if p.requires_grad and p not in self._wrapped}
        names = [name for name, p in self._module.named_parameters() if p in late] if late else []
        if names and self.world_size > 1:
            raise ValueError(
                f"{names} came to the LightningModule after DDP was set up, so nobody would average their gradients "
                "over the ranks. Make what an optimizer trains, such as adapters, before that: in __init__ or in "
                "configure_model."
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._create_mesh(self.num_processes, timeout_of(self))


def _check_arguments(strategy: type, given: Mapping[str, Any]) -> None:
    """Raises a ``TypeError`` that names what DistributedDataParallel would refuse later, in the middle of ``fit``."""
    own, theirs = (set(inspect.signature(each).parameters) for each in (strategy, DistributedDataParallel))
    for name in sorted(given.keys() - theirs):
        close = get_close_matches(name, own | theirs, n=1)
        hint = f" Did you mean {close[0]}=?" if close else ""
        raise TypeError(f"{strategy.__name__} has no argument {name}={given[name]!r}.{hint}")
