"""What every sequence-parallel strategy adds to its parent: the mesh, the split model, one batch and one noise.

The user's LightningModule contains no line about any of it.
"""

from __future__ import annotations

import atexit
import inspect
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_videoscale.compat.lightning import (
    end_observation,
    launched_processes,
    layer_sync_of,
    timeout_of,
    transferred,
)
from lightning_videoscale.compat.lightning.training_loop import batches_begun
from lightning_videoscale.compat.torch.allocator import expand_segments
from lightning_videoscale.graphs import EAGER_CALLS, GraphMode
from lightning_videoscale.parallel import check_loss
from lightning_videoscale.strategies.batches.group_batches import GroupBatches
from lightning_videoscale.strategies.buffers import SharedBuffers
from lightning_videoscale.strategies.call_agreement import CallAgreement
from lightning_videoscale.strategies.checkpoints.portable import PortableCheckpoints
from lightning_videoscale.strategies.choices import ChoosesByMeasuring
from lightning_videoscale.strategies.failures.answering_store import AnsweringStore
from lightning_videoscale.strategies.failures.backward_counts import BackwardCounts, CountsBackwards
from lightning_videoscale.strategies.failures.detector import FailureDetector
from lightning_videoscale.strategies.failures.ended_jobs import note_end, refuse_to_go_on
from lightning_videoscale.strategies.failures.endings import end_by_alarm, end_processes
from lightning_videoscale.strategies.failures.epoch_ends import EpochEnds
from lightning_videoscale.strategies.failures.stopping import StopsOnSignals
from lightning_videoscale.strategies.garbage import CollectsTogether
from lightning_videoscale.strategies.generators import seed_generators
from lightning_videoscale.strategies.graphs import describe_graphs
from lightning_videoscale.strategies.lightning_messages import OwnMessages, first_names
from lightning_videoscale.strategies.mesh.of_run import HasMesh
from lightning_videoscale.strategies.network_changes import ModelTransform, change_networks, split_plans, transform
from lightning_videoscale.strategies.parity import ParityReport, compare, loss_and_gradients
from lightning_videoscale.strategies.settings import SequenceParallelSettings
from lightning_videoscale.strategies.sharded.earlier import refuse_sharded
from lightning_videoscale.strategies.units import sharded_modules
from lightning_videoscale.strategies.weight_averaging import PortableWeights
from lightning_videoscale.strategies.whole_parameters import WholeParameters
from lightning_videoscale.trained_weights import TrainedWeights
from lightning_videoscale.undo import Undo

_EXIT = 60.0  # s in which a process that has failed, and that nobody watches any more, ends


class SequenceParallelMixin(
    HasMesh,
    GroupBatches,
    SharedBuffers,
    PortableCheckpoints,
    WholeParameters,
    CollectsTogether,
    ChoosesByMeasuring,
    CountsBackwards,
    StopsOnSignals,
    OwnMessages,  # last: it is one of Lightning's strategies, and what comes behind it would come behind all of them
):
    """Goes before a Lightning strategy in the bases of a class; see `SequenceParallelDDPStrategy` for the arguments."""

    def _init_sequence_parallel(self, settings: SequenceParallelSettings) -> None:
        timeout: Any = timeout_of(self)
        if timeout is not None and not isinstance(timeout, timedelta):
            raise TypeError(f"timeout={timeout!r} must be a timedelta, such as datetime.timedelta(seconds=600).")
        self._init_mesh(settings)
        self._init_choices(settings)
        self._init_collections()
        self._transforms: list[ModelTransform] = []
        self._undo_changes: Undo | None = None
        self._watch: FailureDetector | None = None
        self._saves_after_exceptions = Undo()
        self._uncount_calls = Undo()
        self._calls: CallAgreement | None = None
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._averaged = []
        self._seed = self._micro_batch = self._stream = 0
        self._loss_weight, self._transferred_weight, self._said_nested = 1.0, None, False
        self._backwards, self._stepped = 0, {}
        self._failed = False
        self._built = None
        self._left_out = {}
        self._saves = None

    # -- who am I ------------------------------------------------------------------------------------------------

    @property
    def applies_loss_weight(self) -> bool:
        """True: `backward` multiplies the loss by the batch's ``meta.loss_weight``."""
        return True

    def describe(self) -> dict[str, Any]:
        """What all ranks agreed to run, for reports; from the strategy's setup on."""
        assert self.transport is not None
        return {
            "data-parallel ranks": self.mesh.dp.size,
            "ulysses": self.mesh.ulysses.size,
            "ring": self.mesh.ring.size,
            "transport": self.transport.name,
            "schedule": self.schedule_choices.schedule,
            "attention": self.attention_choices.backend,
            "activation checkpointing": self._settings.activation_checkpointing,
            "compile": bool(self._settings.compile),
            "graphs": self.graph_mode,
        }

    @property
    def graph_mode(self) -> GraphMode:
        """Whether networks run by CUDA graphs, see `RunsByGraphs`."""
        return self._settings.graphs_on(self.root_device).mode

    @property
    def steps_until_graphs(self) -> int:
        """How many steps of a shape run eagerly before one is captured, see `RunsByGraphs`."""
        return 0 if self.graph_mode is False else EAGER_CALLS

    def describe_graphs(self) -> dict[str, int]:
        """How many forward passes so far ran by CUDA graphs, and how many did not; see `GraphedNetwork.counts`.

        With them, under ``"bytes"``, the memory that the graphs keep; empty where no network runs by graphs.
        """
        return describe_graphs(self._module.modules())

    # -- setting up ----------------------------------------------------------------------------------------------

    def add_model_transform(self, transform: ModelTransform) -> None:
        """Registers a change to the model, such as an injection of kernels.

        Transforms run in the order of their registration, once, after ``configure_model`` and before the sequence is
        split and the model wrapped.

        Args:
            transform: Receives the LightningModule and changes it in place.

        Raises:
            RuntimeError: If the model has been transformed already.
        """
        if self._undo_changes is not None:
            raise RuntimeError(
                "The model is set up already: register transforms before the Trainer sets the strategy up."
            )
        self._transforms.append(transform)

    def _create_mesh(self, devices_per_node: int, timeout: timedelta | None) -> None:
        """To be called at the end of a strategy's ``setup_environment``; collective over all ranks."""
        assert self.cluster_environment is not None
        trainer = self._module.trainer
        refuse_to_go_on()
        self._listen(trainer)
        if self.world_size > 1:
            self._ends = EpochEnds(self.global_rank, self.world_size, partial(batches_begun, trainer))
            self._counts = BackwardCounts(self.global_rank, self.world_size)
            self._watch = FailureDetector(
                self.cluster_environment.main_address, self._place, self._look, lambda: self._end_processes(0.0)
            )
        self._settings.check_agreement()
        if self.root_device.type == "cuda" and expand_segments():
            rank_zero_info(
                "CUDA's memory is allocated in expandable segments, as micro-batches differ in size. Setting "
                "PYTORCH_ALLOC_CONF leaves it as it is."
            )
        self._failed = False
        self._make_mesh(devices_per_node, timeout)

    def _look(self, store: AnsweringStore) -> None:
        self._stop.look(store)
        self._ends.look(store)
        self._look_at_counts(store)

    @override
    def _wait_at_end_of_epoch(self) -> None:
        if self._watch is not None and self._counts is not None:
            self._counts.tell_end(self._watch.store)
            self._ends.wait_for_all(self._watch.store, timeout_of(self) or default_pg_timeout)
            self._counts.check_end(self._watch.store)

    def _place(self) -> str:
        """Where this rank is in the run, for messages to other ranks."""
        trainer = self._module.trainer
        stage = trainer.state.stage
        return f"{stage.value if stage else 'set-up'}, micro-batch {self._micro_batch}, step {trainer.global_step}"

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        refuse_sharded(self._module, type(self).__name__)
        self._change_model()
        self._note_averaged(self._module)
        super().setup(trainer)
        self._save_together(self._module)
        self._count_calls()
        self._agree_on_calls()
        self._note_frozen()
        if self.world_size > 1:
            self._frozen = [(name, p) for name, p in self._module.named_parameters() if not p.requires_grad]

    def _change_model(self) -> None:
        """What comes before wrapping; for strategies whose ``setup`` does not go through their parent's."""
        self._prepare_saving(self._module.trainer)
        self._prepare_choices(by_graphs=self.graph_mode is not False)
        self._seed = self._agree_on_seed()
        if self._undo_changes is None:
            self._sync_layers(self._module)
            self._undo_changes = self._change_networks(self._module)

    def _sync_layers(self, module: pl.LightningModule) -> None:
        """Does what ``Trainer(sync_batchnorm=True)`` asks for in ``fit``, which the parents of some strategies do not.

        It puts other modules in the place of BatchNorms: before anybody hooks them, and not once they are sharded, as
        FSDP2 would go on to gather for those that are gone.
        """
        layer_sync = layer_sync_of(self)
        is_fitting = module.trainer.state.fn == TrainerFn.FITTING
        if layer_sync is not None and is_fitting and not sharded_modules(module):
            layer_sync.apply(module)

    def _count_calls(self) -> None:
        """Watches the networks that ranks call together; to be called when the model is wrapped."""
        if self._watch is None:
            return
        networks = {
            path: self._module.get_submodule(path) for path in split_plans(self._module, self.mesh, self._settings)
        }
        together = {path: (network, self._ranks_that_call(network)) for path, network in networks.items()}
        if any(len(ranks) > 1 for _, ranks in together.values()):
            timeout = timeout_of(self) or default_pg_timeout
            self._uncount_calls = self._watch.count_calls(together, timeout)

    def _ranks_that_call(self, network: nn.Module) -> list[int]:
        """The ranks that wait for this one in a network: of its group, and of the next ones where that is sharded.

        There all ranks wait for each other, and a group that is apart is so from its neighbours too.
        """
        ranks, shared = set(self.mesh.sp.ranks), self._ranks_that_gather
        if shared and self._shares_parameters(network):
            own = self.global_rank - shared.start
            ranks |= {shared[(own + step) % len(shared)] for step in (-self.mesh.sp.size, self.mesh.sp.size)}
        return sorted(ranks)

    @property
    def _ranks_that_gather(self) -> range:
        """Those among which parameters are gathered in a forward pass."""
        return range(self.world_size if self._gathers_in_forward else 0)

    def _agree_on_calls(self) -> None:
        """To be called once the model is wrapped: the ranks tell each other what they call before they wait."""
        module = self._module
        if self.mesh.sp.size > 1:  # what hooks draw before the first step: noise for a sample, a split of the data
            seed_generators(self._seed, "setup")  # on all ranks the same, as `seed_everything` leaves them
        networks = {path: module.get_submodule(path) for path in split_plans(module, self.mesh, self._settings)}
        shared = {path: network for path, network in networks.items() if self._shares_parameters(network)}
        if self.mesh.dp.size > 1 and len(shared) > 1 and self._calls is None:
            timeout = timeout_of(self) or default_pg_timeout
            self._calls = CallAgreement(shared, before_calls=self._gathers_in_forward, timeout=timeout)

    def _shares_parameters(self, network: nn.Module) -> bool:
        """Whether ranks wait for each other when they call the network or go backward through it."""
        return any(parameter.requires_grad for parameter in network.parameters())

    @property
    def _averages_what_was_called(self) -> bool:
        """Whether the next backward needs all ranks to have called the same networks."""
        return True

    def _change_networks(self, module: nn.Module) -> Undo:
        transforms, self._transforms = self._transforms, []
        transform(module, transforms)
        self._complete_mesh(module)
        settings = replace(self._settings, graphs=self._settings.graphs_on(self.root_device))
        return change_networks(
            module, self.mesh, self.transport, settings, self.attention_choices, self.schedule_choices
        )

    def trained_weights(self) -> TrainedWeights:
        """What is trained, as this rank holds it, for averages; see `HasTrainedWeights`."""
        return PortableWeights(self._module)

    def verify_parity(self, module: pl.LightningModule, batch: Any) -> ParityReport:
        """Compares loss and gradients of a batch with its sequence split (sp = n) and whole (sp = 1).

        To be called once the model is set up and no gradients are under way, such as in ``on_fit_start``; collective
        over all ranks. Each rank must be able to hold the whole sequence once: take a small batch.

        Args:
            module: The LightningModule in training.
            batch: What its ``training_step`` receives, on any device; the first rank's of each group is used.

        Raises:
            RuntimeError: If the model is not set up, or has gradients.
        """
        if self._undo_changes is None or any(parameter.grad is not None for parameter in module.parameters()):
            raise RuntimeError(
                "verify_parity compares gradients: call it after the strategy's setup and before the first backward or "
                "right after an optimizer step, such as in on_fit_start."
            )
        shared = self.share_batch(transferred(module, batch, self.root_device))

        def step() -> Tensor:
            seed_generators(self._seed, "verify_parity", self.data_parallel_rank)
            with self.precision_plugin.train_step_context():
                output = module.training_step(*(shared, 0)[: len(inspect.signature(module.training_step).parameters)])
            loss = output["loss"] if isinstance(output, Mapping) else output
            assert isinstance(loss, Tensor)
            return loss

        split = loss_and_gradients(module, step)
        self._undo_changes()
        try:
            whole = loss_and_gradients(module, step)
        finally:
            self._undo_changes = self._change_networks(module)
        return compare(split, whole)

    def _agree_on_seed(self) -> int:
        """Rank 0's seed: the one given to ``seed_everything``, or whatever torch drew at its start."""
        seed = torch.tensor([torch.initial_seed() >> 1], dtype=torch.int64, device=self.root_device)
        dist.broadcast(seed, 0)
        return int(seed.item())

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._losses is not None:
            check_loss(closure_loss)
            self._losses.check_loss(closure_loss)
        self._refuse_unfrozen()
        if self._calls is not None:
            (self._calls.check_backward if self._averages_what_was_called else self._calls.forget)()
        super().pre_backward(closure_loss)

    def _refuse_unfrozen(self) -> None:
        """DDP and ZeRO average what trains when they wrap the model, and nothing that comes later.

        FSDP2 has its own way to tell, before a step: between forward and backward some of its parameters are whole too.
        """
        unfrozen = [name for name, parameter in self._frozen if parameter.requires_grad]
        if unfrozen:
            raise ValueError(
                f"{first_names(unfrozen)} were frozen when the model was set up, so nobody would average their "
                "gradients, and train now. Let them require gradients before fit, and freeze them in on_fit_start if "
                "they are to train later (Lightning's BaseFinetuning does so in setup, which is too early); DDP then "
                "needs find_unused_parameters=True."
            )

    @override
    def teardown(self) -> None:
        self._uncount_calls()
        try:
            try:
                self._finish_saving()
            finally:
                super().teardown()
                if self._undo_changes is not None:
                    self._undo_changes()
                    self._undo_changes = None
        finally:
            if self._calls is not None:
                self._calls.close()
                self._calls = None
            if self._watch is not None:  # it counts the collectives of the groups that are now closed
                self._watch.close()
                self._watch = None
            self._close_mesh(after_failure=self._failed)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = not self._is_stopping
        super().on_exception(exception)
        if end_observation(self.launcher):  # this process ends the others, says why, and ends with its own status
            atexit.register(partial(end_by_alarm, _EXIT))
        if self._is_stopping:  # every rank alike
            return
        if launched_processes(self.launcher):
            note_end(exception)
        if isinstance(exception, KeyboardInterrupt):  # every rank receives it, and Lightning ends the processes
            return
        if self.transport is not None and self.transport.failure is not None:
            exception.add_note(self.transport.failure)  # the exception itself only says that the device failed
        if self._watch is not None:
            self._watch.report(exception)
        self._end_processes(grace=5.0)  # peers say that they end because of this error, or of the same

    def _end_processes(self, grace: float) -> None:
        end_processes(launched_processes(self.launcher), grace)
