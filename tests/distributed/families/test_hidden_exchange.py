"""Every family whose plan can hide its exchange computes by such a schedule what one device does."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers.models.attention_processor import AttnProcessor2_0
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.parallel import SequenceMesh, find_plan, parallelize
from lightning_videoscale.parallel.schedules import HIDING, ScheduleName
from tests.distributed.families.harness import Case, errors_of, lifted_casts, run
from tests.distributed.families.test_parity import FAMILIES, FUSED, LENGTHS, one_of_each_kind
from tests.distributed.pool import ProcessPool
from tests.distributed.summing import sum_over_ranks
from tests.models import gradient_error

Ranks = Callable[[int], ProcessPool]

UNSLICED = ("flux2", "ltx2", "helios", "motif_video", "own_model")
"""One layer makes more than queries, keys and values; keys of another stream; and what has no description."""

REASONS = {
    "flux2": "single blocks",
    "ltx2": "ask each other",
    "helios": "the history",
    "motif_video": "text and video in one argument",
    "own_model": "('serial',)",
}

SLICED = [name for name in FAMILIES if name not in UNSLICED]


def errors(cases: list[Case]) -> list[dict[str, float]]:
    return [errors_of(case, FAMILIES[case.family]) for case in cases]


def check(ranks: Ranks, case: Case, *others: Case) -> None:
    cases = [case, *others]
    for of_rank in ranks(case.ranks).run(errors, cases):
        for each, found in zip(cases, of_rank, strict=True):
            assert found["norm"] > 1e-3, each
            assert {name: e for name, e in found.items() if name != "norm" and not e <= 1e-12} == {}, each


def random_case(family: str, seed: int, mesh: tuple[int, int, int]) -> Case:
    """Texts of fewer tokens than ranks, uneven lengths, several samples, with and without checkpointing."""
    shape = random.Random(f"{family} {seed}")
    settings = {
        "text": shape.randint(1, 9),
        "frames": shape.choice([1, 2, 3]),
        "side": shape.choice([3, 4]),
        "batch": shape.randint(1, 3),
    }
    variant = shape.choice(FAMILIES[family].variants)
    fused = family in FUSED and shape.random() < 0.5
    schedule = shape.choice(HIDING)
    return Case(family, mesh, settings | variant, shape.random() < 0.4, fused=fused, schedule=schedule)


@pytest.mark.parametrize("family", one_of_each_kind(SLICED))
def test_a_family_is_exact(ranks: Ranks, family: str) -> None:
    place = SLICED.index(family)
    check(ranks, Case(family, (1, 1, 2 + place % 2), LENGTHS[0], checkpointing=place % 3 == 0, schedule="sliced"))


@pytest.mark.parametrize("family", ["hunyuan_video", "ltx", "cogvideox", "skyreels_v2"])
def test_a_family_with_fused_kernels_is_exact(ranks: Ranks, family: str) -> None:
    check(ranks, Case(family, (1, 1, 2), LENGTHS[0], fused=True, schedule="sliced"))


@pytest.mark.parametrize(
    ("family", "mesh", "fused"),
    [
        ("mochi", (1, 1, 2), False),
        ("hunyuan_video_15", (1, 2, 2), False),
        ("easyanimate", (1, 1, 3), False),
        ("ltx", (1, 1, 2), True),
    ],
)
def test_a_family_is_exact_by_overlap(ranks: Ranks, family: str, mesh: tuple[int, int, int], fused: bool) -> None:
    settings = LENGTHS[2 if mesh[1] > 1 else 0]
    check(ranks, Case(family, mesh, settings, checkpointing=fused, fused=fused, schedule="overlap"))


def test_text_that_goes_through_the_videos_layers_and_no_output(ranks: Ranks) -> None:
    """EasyAnimate's blocks that share weights leave out the output of the text."""
    settings = [LENGTHS[0] | {"own": own} for own in (0, 1)]
    check(ranks, *(Case("easyanimate", (1, 1, 2), each, schedule=schedule) for each in settings for schedule in HIDING))


@pytest.mark.parametrize("family", ["flux", "hunyuan_video_15"])
def test_rings_of_groups_with_text_of_fewer_tokens_than_ranks(ranks: Ranks, family: str) -> None:
    check(ranks, Case(family, (1, 2, 2), LENGTHS[2], schedule="sliced"))


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mesh", [(1, 1, 2), (1, 1, 3), (1, 1, 4), (1, 2, 2), (2, 1, 2)])
@pytest.mark.parametrize("family", SLICED)
def test_a_family_is_exact_in_random_settings(ranks: Ranks, family: str, mesh: tuple[int, int, int]) -> None:
    for seed in range(8):
        check(ranks, random_case(family, seed, mesh))


def test_the_others_say_so(ranks: Ranks) -> None:
    for found in ranks(2).run(refusals):
        assert found.keys() == {*UNSLICED}
        assert all(message.startswith("schedule='sliced' cannot run ") for message in found.values())
        for family, reason in REASONS.items():
            assert reason in found[family] and found[family].endswith("Use schedule='serial'.")


def refusals() -> dict[str, str]:
    found = {}
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        for family in FAMILIES:
            model = FAMILIES[family].model(Case(family))
            plan = find_plan(model)
            if plan is None or "sliced" not in plan.schedules:
                with pytest.raises(ValueError) as error:
                    parallelize(model, mesh, schedule="sliced")
                found[family] = str(error.value)
    return found


# -- a model as users have it --------------------------------------------------------------------------------------

HABITS = (
    ("flux", "lora"),
    ("cogvideox", "projections fused"),
    ("hunyuan_video", "frozen"),
    ("qwen_image", "fused, recomputed"),
    ("cogvideox", "no biases"),
    ("wan", "wrapped projections"),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in (
            ("flux", "projections fused"),
            ("ltx", "projections fused"),
            ("hunyuan_video", "hooks on one rank"),  # of Wan: test_schedules.py
            ("ltx", "lora"),
            ("ltx", "fused, recomputed"),
            ("hunyuan_video", "wrapped projections"),
            ("wan", "compiled blocks"),  # as those of test_compiled_schedules.py
        )
    ),
)


class Wrapped(nn.Module):
    """Around a Linear, without telling how many channels it makes."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """Returns what the Linear does."""
        return self.linear(x)  # type: ignore[no-any-return]


def prepare(model: Any, habit: str) -> None:
    """What a user does to a model before it is split, not always on all ranks."""
    attentions = [m for m in model.modules() if hasattr(m, "to_q") and hasattr(m, "processor")]
    if habit == "lora":
        targets = ["to_q", "to_v", "add_k_proj", "to_out.0", "to_add_out"]
        there = [t for t in targets if any(path.endswith(t) for path, _ in model.named_modules())]
        torch.manual_seed(1)
        inject_adapter_in_model(LoraConfig(r=2, target_modules=there, init_lora_weights=False), model)
        model.double()
    if habit == "projections fused":
        for attention in attentions:
            attention.fuse_projections()
    if habit == "hooks on one rank" and dist.get_rank() == 1:
        for path, module in model.named_modules():
            if path.endswith(("to_k", "add_v_proj", "to_out.0", "norm_q")):
                module.register_forward_hook(lambda *_: None)
    if habit == "frozen":
        model.requires_grad_(False)
        attentions[-2].norm_k.requires_grad_(True)
        attentions[-1].to_v.bias.requires_grad_(True)
    if habit == "no biases":
        for attention in attentions:
            attention.to_k.bias = attention.to_out[0].bias = None
    if habit == "wrapped projections":
        for attention in attentions:
            for name in ("to_q", "to_k", "to_v", "add_k_proj"):
                if isinstance(linear := getattr(attention, name, None), nn.Linear):
                    setattr(attention, name, Wrapped(linear))
    if habit == "compiled blocks":
        for block in model.blocks:
            block.compile(backend="eager")  # ops of compiled code are differentiated in its other tests
    if habit.startswith("fused,"):
        inject_fused_kernels(model, backend="reference", recompute_norms=True)


def outputs_and_gradients(family: str, habit: str, schedule: ScheduleName) -> dict[str, Tensor]:
    case = Case(family, settings=LENGTHS[0] | {"layered": False})
    model = FAMILIES[family].model(case)
    prepare(model, habit)
    with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()) as mesh:
        undo = parallelize(model, mesh, schedule=schedule)
        outputs, loss = run(model, FAMILIES[family].inputs(case, 0))
        loss.backward()
        undo()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    sum_over_ranks(gradients.values())
    return {f"output {n}": x for n, x in enumerate(outputs)} | gradients


def difference(family: str, habit: str) -> float:
    with lifted_casts():
        serial, *others = (outputs_and_gradients(family, habit, schedule) for schedule in get_args(ScheduleName))
    return max(gradient_error(other, serial) for other in others)


@pytest.mark.parametrize(("family", "habit"), HABITS)
def test_a_model_as_users_have_it(ranks: Ranks, family: str, habit: str) -> None:
    assert max(ranks(2 if habit == "compiled blocks" else 3).run(difference, family, habit)) < 1e-12


def under_autocast(family: str) -> float:
    """How far apart the outputs of a copy of a split model are by both schedules, without gradients."""
    found = []
    for schedule in ("serial", "sliced"):
        case = Case(family, settings=LENGTHS[0], float32=True)
        model = FAMILIES[family].model(case)
        with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()) as mesh, torch.autocast("cpu"):
            undo = parallelize(model, mesh, schedule=schedule)  # type: ignore[arg-type]
            outputs, loss = run(model, FAMILIES[family].inputs(case, 0))
            loss.backward()
            with torch.no_grad():
                again, _ = run(copy.deepcopy(model), FAMILIES[family].inputs(case, 0))
            undo()
        assert all(torch.equal(x, y) for x, y in zip(outputs, again, strict=True))
        found.append(outputs[0])
    return float((found[0] - found[1]).norm() / found[0].norm())


@pytest.mark.parametrize("family", ["hunyuan_video", "ltx"])
def test_a_copy_under_autocast(ranks: Ranks, family: str) -> None:
    assert max(ranks(2).run(under_autocast, family)) < 2e-2


# -- what it cannot ------------------------------------------------------------------------------------------------


class OwnProcessor(AttnProcessor2_0):
    """Of a user."""


class Doubling:
    """As if of a later diffusers: it computes between attention and output."""

    __module__ = "diffusers.later"

    def __call__(self, attn: Any, hidden_states: Tensor, **_: Any) -> Tensor:
        heads = (linear(hidden_states).unflatten(2, (attn.heads, -1)) for linear in (attn.to_q, attn.to_k, attn.to_v))
        attended = 2 * F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in heads))
        out: Tensor = attn.to_out[0](attended.transpose(1, 2).flatten(2))
        return out


def objections() -> dict[str, str]:
    found = {}

    def note(family: str, change: Callable[[Any], Any]) -> None:
        case = Case(family, settings=LENGTHS[0])
        model = FAMILIES[family].model(case)
        try:
            change(model)
            undo = parallelize(model, mesh, schedule="sliced")
            try:
                run(model, FAMILIES[family].inputs(case, 0))
            finally:
                undo()
        except ValueError as error:
            found[family] = str(error)

    with SequenceMesh.create("cpu", ulysses_size=2) as mesh, lifted_casts():
        note("ltx", lambda m: m.transformer_blocks[1].attn1.norm_q.register_forward_hook(lambda *_: None))
        note("allegro", lambda m: m.transformer_blocks[0].attn1.set_processor(OwnProcessor()))
        note("hunyuan_video", lambda m: m.transformer_blocks[0].register_forward_pre_hook(with_a_third_stream))
        note("flux", lambda m: m.transformer_blocks[0].register_forward_pre_hook(with_pairs))
        note("chroma", lambda m: m.transformer_blocks[0].register_forward_pre_hook(with_pairs))
        note("pixart", lambda m: m.transformer_blocks[0].attn1.set_processor(Doubling()))
        note("cogvideox", lambda m: m.fuse_qkv_projections())
    return found


def with_a_third_stream(block: nn.Module, args: Any) -> None:
    block.attn.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"image_states": torch.ones(1)}), with_kwargs=True
    )


def with_pairs(block: nn.Module, args: Any) -> None:
    """Each token attends to those before it."""

    def masked(attn: nn.Module, args: Any, kwargs: Any) -> Any:
        tokens = kwargs["hidden_states"].shape[1] + kwargs["encoder_hidden_states"].shape[1]
        return args, kwargs | {"attention_mask": torch.ones(2, 1, tokens, tokens, dtype=torch.bool).tril()}

    block.attn.register_forward_pre_hook(masked, with_kwargs=True)


def test_what_it_cannot_is_said(ranks: Ranks) -> None:
    for found in ranks(2).run(objections):
        assert "norm_q" in found["ltx"] and "schedule='serial'" in found["ltx"]
        assert "OwnProcessor" in found["allegro"] and "schedule='serial'" in found["allegro"]
        assert "'image_states'" in found["hunyuan_video"]
        assert "has a dim of queries" in found["flux"] and "differs between queries" in found["chroma"]
        assert "computes" in found["pixart"] and "schedule='serial'" in found["pixart"]
        assert "fuse_qkv_projections" in found["cogvideox"] and "schedule='serial'" in found["cogvideox"]
