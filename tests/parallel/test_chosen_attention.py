"""A network that is not split asks for its kernels too; what users chose by diffusers or torch comes first."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import attention_backend
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lightning_videoscale.attention import AttentionChoices
from lightning_videoscale.attention.case import AttentionKey, length_class
from lightning_videoscale.attention.records import AttentionRecord, RecordFile
from lightning_videoscale.attention.trial import Timing
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.injection.branch_bias import last_linear
from lightning_videoscale.parallel import SequenceMesh, find_plan, parallelize
from lightning_videoscale.parallel.chosen_attention import choose_attention
from lightning_videoscale.strategies.compilation import compile_blocks
from lightning_videoscale.undo import Undo
from tests.attention.cases import calls_of_math
from tests.distributed.families.harness import Case, run
from tests.distributed.families.models.ltx import FAMILIES
from tests.distributed.pool import ProcessPool
from tests.models import gradient_error, tiny_wan

Ranks = Callable[[int], ProcessPool]
INPUTS = (torch.randn(1, 4, 3, 8, 8), torch.tensor([7.0]), torch.randn(1, 3, 16))


def results(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    out = model(*INPUTS).sample
    out.square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def unlike(found: list[Tensor], others: list[Tensor]) -> bool:
    return not all(torch.equal(a, b) for a, b in zip(found, others, strict=True))


def choose(model: nn.Module, backend: Any) -> Any:
    plan = find_plan(model)
    assert plan is not None
    return choose_attention(model, plan, AttentionChoices(backend))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return calls_of_math(monkeypatch)


@pytest.mark.parametrize("fused", [False, True])
def test_attention_of_a_whole_network_runs_on_the_kernel_asked_for(fused: bool, calls: list[int]) -> None:
    model = tiny_wan()
    if fused:
        inject_fused_kernels(model)
    before = results(model)
    undo = choose(model, "math")
    if fused:  # what is put around attention takes nothing away from the fused block
        assert isinstance(last_linear(model.blocks[0].attn1), nn.Linear)
    after = results(model)
    assert len(calls) == 2 * len(model.blocks)  # self- and cross-attention
    for mine, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    undo()
    assert all(torch.equal(a, b) for a, b in zip(results(model), before, strict=True))


def test_a_forward_of_users_between_the_kernels_and_ours_has_the_gradients_of_its_last_bias() -> None:
    """A fused block leaves no bias to whoever scales what an attention returns."""
    eager, fused = (FAMILIES["ltx"].model(Case("ltx", float32=True)) for _ in range(2))
    inject_fused_kernels(fused)
    gradients = []
    for model in (eager, fused):
        attention: Any = model.transformer_blocks[0].attn1  # type: ignore[union-attr]
        attention.forward = partial(twice, attention.forward)
        choose(model, "math" if model is fused else "sdpa")
        run(model, FAMILIES["ltx"].inputs(Case("ltx", float32=True), 0))[1].backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradient_error(gradients[1], gradients[0]) < 1e-4


def twice(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    return 2 * forward(*args, **kwargs)


def test_a_network_that_asks_for_its_kernels_says_that_it_cannot_be_pickled() -> None:
    model = tiny_wan()
    undo = choose(model, "math")
    with pytest.raises(pickle.PicklingError, match=r"WanTransformer3DModel.*state_dict"):
        pickle.dumps(model)
    undo()
    pickle.dumps(model)


def test_auto_changes_no_bit_on_a_cpu_and_no_module_where_nothing_can_be_chosen() -> None:
    model = tiny_wan()
    before = results(model)
    undo = choose(model, "auto")
    assert all(torch.equal(a, b) for a, b in zip(results(model), before, strict=True))
    undo()
    choices = AttentionChoices("auto")
    choices.prepare(torch.device("cpu"))
    plan = find_plan(model)
    assert plan is not None
    choose_attention(model, plan, choices)
    assert not any("forward" in vars(module) for module in model.modules())


def test_checkpoints_and_compiled_blocks_call_it_too(calls: list[int]) -> None:
    model = tiny_wan()
    before = results(model)
    choose(model, "math")
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda *a, forward=forward: checkpoint(forward, *a, use_reentrant=False)
    after = results(model)
    assert len(calls) == 4 * len(model.blocks)  # once more in backward
    for mine, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_compiled_blocks_call_it_too(calls: list[int]) -> None:
    model = tiny_wan()
    inject_fused_kernels(model)
    before = results(model)
    choose(model, "math")
    compile_blocks(model, {"backend": "aot_eager", "fullgraph": True})
    after = results(model)
    assert len(calls) == 2 * len(model.blocks)
    for mine, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def measured(folder: Path, backend: Any) -> AttentionChoices:
    """Choices that take `math` at every length, by name or since it was measured to be the fastest."""
    choices = AttentionChoices(backend, candidates=["math"], folder=folder)
    choices.shortest = 1
    if backend == "auto":
        fast = AttentionRecord({"sdpa": Timing(1.0, 0.0), "math": Timing(0.1, 0.0)}, {})
        lengths = length_class(48)
        key = AttentionKey("cpu", "float32", 12, 2, lengths, lengths, False, False, False)
        RecordFile("cpu", folder).add({key: fast})
    choices.prepare(torch.device("cpu"))
    return choices


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_what_users_chose_by_diffusers_or_torch_comes_first_to_the_bit(
    tmp_path: Path, backend: Any, calls: list[int]
) -> None:
    with attention_backend("native"):  # diffusers makes a model's backend that of all models; the context ends that
        model = tiny_wan()
        before = results(model)
        plan = find_plan(model)
        assert plan is not None
        choose_attention(model, plan, measured(tmp_path, backend))
        assert unlike(results(model), before) and calls
        calls.clear()
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            assert not unlike(results(model), before)
        model.set_attention_backend("native")
        assert not unlike(results(model), before)
        assert calls == []
        model.reset_attention_backend()
        results(model)
        assert calls


def of_backends_on_a_split_network(folder: Path) -> dict[str, bool]:
    """Whether outputs are those of torch's own pick to the bit: by the choice alone, and with what users say."""
    same: dict[str, bool] = {}
    model = tiny_wan()
    model.load_state_dict({name: x * 1.5 for name, x in model.state_dict().items()})

    def run() -> Tensor:
        with torch.no_grad():
            out: Tensor = model(*INPUTS).sample
        return out

    def split(choices: Any) -> Undo:
        return parallelize(model, mesh, verify_plan=False, attention_backend=choices)

    with attention_backend("native"), SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()) as mesh:
        undo = split("sdpa")
        expected = run()
        undo()
        undo = split(measured(folder, "auto"))
        same["chosen"] = torch.equal(run(), expected)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            same["sdpa_kernel"] = torch.equal(run(), expected)
        model.set_attention_backend("native")
        same["native"] = torch.equal(run(), expected)
        model.reset_attention_backend()
        same["reset"] = torch.equal(run(), expected)
        try:
            model.blocks[0].attn1.processor._attention_backend = "flex"
        except ValueError as error:
            same["refused"] = "'flex'" in str(error) and "native" in str(error)
        undo()
        model.set_attention_backend("native")  # before the split
        split(measured(folder, "auto"))
        same["before"] = torch.equal(run(), expected)
    return same


def test_what_users_chose_comes_first_on_split_networks_too(ranks: Ranks, tmp_path: Path) -> None:
    for same in ranks(2).run(of_backends_on_a_split_network, tmp_path):
        assert not same.pop("chosen") and not same.pop("reset")
        assert all(same.values()) and len(same) == 4, same
