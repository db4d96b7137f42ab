"""Code of users in the region where a known network's sequence is split: exact token by token, else an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.parallel import SequenceMesh, gather_sequence, parallelize, split_sequence
from lightning_videoscale.strategies import SequenceParallelFSDP2Strategy
from tests.distributed.families.harness import Case, lifted_casts, run
from tests.distributed.families.models.flux import FAMILIES
from tests.distributed.families.models.ltx import FAMILIES as LTX
from tests.distributed.pool import ProcessPool
from tests.distributed.summing import sum_over_ranks
from tests.distributed.wan_training import Clips, RectifiedFlow
from tests.models import gradient_error, lifted_float_casts, tiny_wan
from tests.strategies.fsdp2.training import trainer

Ranks = Callable[[int], ProcessPool]
FRAMES, SHAPE = 4, (4, 6, 4)  # 24 tokens: both ranks have a number that the frames divide
CHANNELS = 48


class MotionModule(nn.Module):
    """Attends over the frames, as AnimateDiff's does; its last layer begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(CHANNELS, 4, batch_first=True)
        nn.init.zeros_(self.attention.out_proj.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        places = hidden.unflatten(1, (FRAMES, -1)).transpose(1, 2)
        x = places.flatten(0, 1)
        out = self.attention(x, x, x, need_weights=False)[0].view_as(places)
        return hidden + out.transpose(1, 2).flatten(1, 2)


class Adapted(RectifiedFlow):
    """A stock Wan with something of a user's added to its blocks."""

    def __init__(self, habit: Callable[[Adapted, nn.Module], None], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.camera = nn.Parameter(torch.randn(FRAMES, CHANNELS, generator=torch.Generator().manual_seed(3)))
        torch.manual_seed(4)
        self.motion = MotionModule()
        self.adapter = nn.Sequential(nn.Linear(CHANNELS, 4), nn.GELU(), nn.Linear(4, CHANNELS))
        habit(self, self.transformer.blocks[0])

    def with_camera(self, hidden: Tensor) -> Tensor:
        return (hidden.unflatten(1, (FRAMES, -1)) + self.camera[:, None]).flatten(1, 2)


def camera_by_hook(module: Adapted, block: nn.Module) -> None:
    block.register_forward_hook(lambda _, __, hidden: module.with_camera(hidden))


def camera_by_forward(module: Adapted, block: Any) -> None:
    forward = block.forward
    block.forward = lambda hidden, *args: forward(module.with_camera(hidden), *args)


def motion_by_hook(module: Adapted, block: nn.Module) -> None:
    block.register_forward_hook(lambda _, __, hidden: module.motion(hidden))


def motion_inside(_: Adapted, block: Any) -> None:
    block.ffn = nn.Sequential(block.ffn, MotionModule())


def mean_by_hook(_: Adapted, block: nn.Module) -> None:
    block.register_forward_hook(lambda _, __, hidden: hidden + hidden.mean(1, keepdim=True))


def camera_in_the_networks_forward(module: Adapted, _: nn.Module) -> None:
    """Between the blocks, in a forward that takes the place of the network's own."""

    def forward(network: Any, latents: Tensor, time: Tensor, text: Tensor) -> tuple[Tensor]:
        rotary, hidden = network.rope(latents), network.patch_embedding(latents).flatten(2).transpose(1, 2)
        _, modulation, text, _ = network.condition_embedder(time, text, None, timestep_seq_len=None)
        for block in network.blocks:
            hidden = module.with_camera(block(hidden, text, modulation.unflatten(1, (6, -1)), rotary))
        return (network.proj_out(hidden),)

    module.transformer.forward = MethodType(forward, module.transformer)


WRONG: dict[Callable[[Adapted, nn.Module], None], str] = {
    camera_by_hook: "blocks.0: ",
    camera_by_forward: "blocks.0: ",
    motion_by_hook: "blocks.0: ",
    motion_inside: "blocks.0.ffn.1: ",
    mean_by_hook: "blocks.0: ",
    camera_in_the_networks_forward: "the network: ",
}


def token_by_token(module: Adapted, block: nn.Module) -> None:
    block.register_forward_hook(lambda _, __, hidden: hidden + module.adapter(hidden))


def mean_of_all(module: Adapted, block: nn.Module) -> None:
    network = module.transformer
    block.register_forward_hook(
        lambda _, __, hidden: hidden + gather_sequence(hidden, 1, network).mean(1, keepdim=True)
    )


def motion_of_all(module: Adapted, block: nn.Module) -> None:
    """What is gathered and split again: gradients of each rank are of its own tokens only."""
    network = module.transformer
    block.register_forward_hook(
        lambda _, __, hidden: split_sequence(module.motion(gather_sequence(hidden, 1, network)), 1, network)
    )


EXACT = [token_by_token, mean_of_all, motion_of_all]


def batch(dtype: torch.dtype) -> Any:
    return next(iter(DataLoader(Clips(SHAPE, dtype), batch_size=2)))


def said(habits: list[Any]) -> list[str]:
    found = []
    with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()) as mesh:
        for habit in habits:
            module, clips = Adapted(habit), batch(torch.float32)
            parallelize(module.transformer, mesh)
            try:
                module.transformer(clips["latents"], 1000 * clips["time"], clips["text"])
                found.append("nothing")
            except ValueError as error:
                found.append(" ".join([str(error), *error.__notes__]))
            assert not module.motion.attention.out_proj.weight.any(), "put back"
    return found


def test_code_that_takes_a_slice_for_the_whole_is_an_error_that_names_it(ranks: Ranks) -> None:
    for messages in ranks(2).run(said, [*WRONG]):
        for message, (habit, where) in zip(messages, WRONG.items(), strict=True):
            assert "computes something else" in message and "gather_sequence" in message, habit
            assert where in message, (habit, message)


def loss_and_gradients(habit: Any, split: bool) -> tuple[float, dict[str, Tensor]]:
    with lifted_float_casts():
        module = Adapted(habit).double()
        nn.init.ones_(module.motion.attention.out_proj.weight)
        if split:
            parallelize(module.transformer, SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()))
        loss = module.loss(batch(torch.float64))
        loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    sum_over_ranks(gradients.values(), mean=True)
    return loss.item(), gradients


@pytest.mark.parametrize("habit", EXACT)
def test_code_that_works_token_by_token_or_gathers_is_exact(ranks: Ranks, habit: Any) -> None:
    whole_loss, whole = ranks(2).run(loss_and_gradients, habit, False)[0]
    for loss, gradients in ranks(2).run(loss_and_gradients, habit, True):
        assert loss == pytest.approx(whole_loss, rel=1e-12)
        assert gradient_error(gradients, whole) < 1e-10


def fit_sharded(habit: Any) -> list[float]:
    """What a hook uses beside the network is in FSDP2's outermost unit, which a comparison frees."""
    losses: list[float] = []
    runner = trainer(SequenceParallelFSDP2Strategy(dist.get_world_size()))
    module = Adapted(habit)
    module.on_train_batch_end = lambda *_: losses.append(float(runner.callback_metrics["loss"]))  # type: ignore[method-assign]
    runner.fit(module, DataLoader(Clips(SHAPE, torch.float32), batch_size=1))
    return losses


def test_a_sharded_network_with_an_adapter_beside_it_is_compared_and_trains(ranks: Ranks) -> None:
    (alone,) = ranks(1).run(fit_sharded, motion_of_all)
    for losses in ranks(2).run(fit_sharded, motion_of_all):
        assert losses == pytest.approx(alone, rel=1e-5)


def brighter(x: Tensor, _: nn.Module) -> Tensor:
    return 2 * x


def mean_of_a_slice(x: Tensor, _: nn.Module) -> Tensor:
    return x + x.mean(1, keepdim=True)


def mean_of_a_gathered_slice(x: Tensor, network: nn.Module) -> Tensor:
    return x + gather_sequence(x, 1, network).mean(1, keepdim=True)


def said_of_hooks_on_flux(habits: list[tuple[Any, bool]]) -> list[str | float]:
    """Hooks in front of a network whose inputs are split there; what is said, or how far it is from one device."""
    found: list[str | float] = []
    family, case = FAMILIES["flux"], Case("flux", float32=True)
    inputs = family.inputs(case, 0)

    def added(network: nn.Module, habit: Any) -> None:
        def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, kwargs | {"hidden_states": habit(kwargs["hidden_states"], network)}

        network.register_forward_pre_hook(hook, with_kwargs=True)

    with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()) as mesh:
        for habit, before in habits:
            whole, split = family.model(case), family.model(case)
            added(whole, mean_of_a_slice if habit is mean_of_a_gathered_slice else habit)
            if before:
                added(split, habit)
            parallelize(split, mesh)
            if not before:
                added(split, habit)
            try:
                output = split(**inputs).sample.detach()
            except ValueError as error:
                found.append(" ".join([str(error), *error.__notes__]))
            else:
                expected = whole(**inputs).sample.detach()
                found.append(float((output - expected).norm() / expected.norm()))
    return found


def test_a_hook_that_is_given_inputs_which_are_split_already_is_compared(ranks: Ranks) -> None:
    exact = [(brighter, False), (mean_of_a_gathered_slice, False), (mean_of_a_slice, True)]
    for *errors, message in ranks(2).run(said_of_hooks_on_flux, [*exact, (mean_of_a_slice, False)]):
        assert all(isinstance(error, float) and error < 1e-5 for error in errors), errors
        assert "computes something else" in message and "the network: " in message
        assert "said_of_hooks_on_flux" in message and "before the split" in message


def with_mean(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    out = function(*args, **kwargs)
    return out + out.mean(1, keepdim=True)


class MeanProcessor(LTXVideoAttnProcessor):
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return with_mean(super().__call__, *args, **kwargs)


def mean_by_a_hook_on_attention(block: Any) -> None:
    block.attn1.register_forward_hook(lambda _, __, out: out + out.mean(1, keepdim=True))


def mean_by_a_hook_behind_attention(block: Any) -> None:
    block.attn1.to_out[0].register_forward_hook(lambda _, __, out: out + out.mean(1, keepdim=True))


def mean_by_a_forward_of_attention(block: Any) -> None:
    block.attn1.forward = partial(with_mean, block.attn1.forward)


def mean_by_a_processor(block: Any) -> None:
    block.attn1.set_processor(MeanProcessor())


def mean_in_disguise(block: Any) -> None:
    """functools.wraps gives a function the names of what it wraps, and of its module."""
    forward = block.forward
    block.forward = wraps(forward)(lambda *args, **kwargs: with_mean(forward, *args, **kwargs))


AT_ATTENTION = {
    mean_by_a_hook_on_attention: "transformer_blocks.0.attn1: ",
    mean_by_a_hook_behind_attention: "transformer_blocks.0.attn1.to_out.0: ",
    mean_by_a_forward_of_attention: "transformer_blocks.0.attn1: ",
    mean_by_a_processor: "MeanProcessor",
    mean_in_disguise: "transformer_blocks.0: ",
}


def said_of_attention(habits: list[Any], patched: bool) -> list[str]:
    """Of code in and around an attention whose tokens come from all ranks; or in place of its processor's call."""
    found, case, processor = [], Case("ltx", float32=True), LTXVideoAttnProcessor
    with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()) as mesh, pytest.MonkeyPatch.context() as patch:
        if patched:
            call = processor.__call__
            patch.setattr(processor, "__call__", lambda *args, **kwargs: with_mean(call, *args, **kwargs))
        for habit in habits:
            network: Any = LTX["ltx"].model(case)
            habit(network.transformer_blocks[0])
            parallelize(network, mesh)
            with pytest.raises(ValueError, match="computes something else") as error:
                network(**LTX["ltx"].inputs(case, 0))
            found.append(" ".join(error.value.__notes__))
    return found


def test_code_in_and_around_attention_is_compared(ranks: Ranks) -> None:
    for messages in ranks(2).run(said_of_attention, [*AT_ATTENTION], False):
        for message, where in zip(messages, AT_ATTENTION.values(), strict=True):
            assert where in message
    for (message,) in ranks(2).run(said_of_attention, [nothing], True):
        assert "attn1: tests.distributed" in message


def nothing(_: nn.Module) -> None:
    """All is done by a patch."""


def without_the_first_block(network: Any) -> None:
    network.blocks = nn.ModuleList([*network.blocks][1:])


def adapted_to_the_end(network: Any) -> None:
    network.add_adapter(LoraConfig(r=2, target_modules=["proj_out"]))


def said_of_other_modules() -> list[str]:
    found, clips = [], batch(torch.float32)
    with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()) as mesh:
        for change in (without_the_first_block, adapted_to_the_end):
            network = tiny_wan()
            parallelize(network, mesh)
            change(network)
            with pytest.raises(RuntimeError, match="size of tensor") as error:
                network(clips["latents"], 1000 * clips["time"], clips["text"])
            found.append(" ".join(error.value.__notes__))
    return found


def test_modules_that_were_replaced_after_the_split_are_named(ranks: Ranks) -> None:
    for messages in ranks(2).run(said_of_other_modules):
        for message, where in zip(messages, ("blocks.0 of Wan", "proj_out of Wan"), strict=True):
            assert where in message and "before the split" in message


def shared_attention(network: Any) -> None:
    network.transformer_blocks[1].attn1 = network.transformer_blocks[0].attn1


def shared_block(network: Any) -> None:
    network.transformer_blocks[1] = network.transformer_blocks[0]


def gradients_of_shared(change: Callable[[Any], None]) -> tuple[str, float]:
    case, found = Case("ltx"), []
    networks: list[Any] = [LTX["ltx"].model(case) for _ in range(2)]
    with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()) as mesh, lifted_casts():
        for network in networks:
            change(network)
        parallelize(networks[1], mesh)
        for network in networks:
            try:
                run(network, LTX["ltx"].inputs(case, 0))[1].backward()
            except ValueError as error:
                return str(error), 0.0
            found.append({name: p.grad for name, p in network.named_parameters()})
        sum_over_ranks(found[1].values(), mean=True)
    return "", gradient_error(found[1], found[0])


def test_blocks_may_share_an_attention_and_not_the_block_that_splits(ranks: Ranks) -> None:
    for message, error in ranks(2).run(gradients_of_shared, shared_attention):
        assert message == ""
        assert error < 1e-10
    for message, _ in ranks(2).run(gradients_of_shared, shared_block):
        assert "It is split already" in message and "a.weight = b.weight" in message
