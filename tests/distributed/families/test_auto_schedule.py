"""``schedule="auto"`` in every family that can hide its exchange: chosen by all ranks alike, and exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from lightning_videoscale.parallel import CollectiveTransport, SequenceMesh, parallelize
from lightning_videoscale.parallel.schedules import ScheduleName
from lightning_videoscale.parallel.schedules.choices import ScheduleChoices
from tests.distributed.families.harness import Case, lifted_casts, run
from tests.distributed.families.test_hidden_exchange import Doubling, OwnProcessor, prepare, with_a_third_stream
from tests.distributed.families.test_parity import FAMILIES, LENGTHS
from tests.distributed.pool import ProcessPool
from tests.distributed.schedules.trial_clock import clock_of
from tests.distributed.summing import sum_over_ranks
from tests.models import gradient_error

Ranks = Callable[[int], ProcessPool]

KINDS = {"hunyuan_video": 2, "flux": 2, "cogvideox": 1, "ltx": 1, "cosmos": 1}
"""Of layers. Those in which text has weights of its own are another kind than those in which it has not."""


class Counting(CollectiveTransport):
    """Counts messages that leave in pieces, as no serial layer sends any."""

    opened = 0

    def open(self, *args: Any, **kwargs: Any) -> Any:
        self.opened += 1
        return super().open(*args, **kwargs)


def clock(fastest: ScheduleName) -> Callable[[], float]:
    """By rank 1's, alone, the contrary would be the fastest."""
    names: tuple[ScheduleName, ...] = get_args(ScheduleName)
    by_rank = {0: (0.06, 0.04), 1: (0.03, 0.05)}.get(dist.get_rank(), (0.06, 0.04))
    serial, overlap, sliced = (by_rank[name == fastest] for name in names)
    return clock_of(*[(serial, overlap, sliced)] * 4)


def auto(family: str, fastest: ScheduleName, habit: str, folder: Path) -> dict[str, Any]:
    """Two passes of a model with a settling between them, the second of which is compared with one device."""
    case = Case(family, settings=LENGTHS[0], checkpointing=habit == "checkpointed")
    whole, split = FAMILIES[family].model(case), FAMILIES[family].model(case)
    for model in (whole, split):
        prepare(model, habit)
    inputs, transport, lines = FAMILIES[family].inputs(case, 0), Counting(), list[str]()
    schedules = ScheduleChoices(folder=folder, clock=clock(fastest), log=lines.append)
    with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()) as mesh, lifted_casts():
        undo = parallelize(split, mesh, schedule=schedules, transport=transport)
        run(split, inputs)
        before, by_pieces = {*schedules.chosen.values()}, transport.opened
        schedules.settle()
        transport.opened = 0
        (outputs, loss), (expected, its_loss) = run(split, inputs), run(whole, inputs)
        loss.backward()
        its_loss.backward()
        undo()
    gradients = {name: p.grad for name, p in split.named_parameters() if p.grad is not None}
    sum_over_ranks(gradients.values(), mean=True)
    return {
        "before": (before, by_pieces),
        "chosen": [*schedules.chosen.values()],
        "biases": {"no biases" not in kind for kind in schedules.chosen},
        "pieces": transport.opened,
        "lines": lines,
        "outputs": max(float((x - y).norm() / y.norm()) for x, y in zip(outputs, expected, strict=True)),
        "gradients": gradient_error(gradients, gradients_of(whole)),
    }


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "fastest", "habit"),
    [
        ("hunyuan_video", "sliced", "checkpointed"),
        ("flux", "overlap", "projections fused"),
        pytest.param("flux", "serial", "plain", marks=pytest.mark.full),
        ("cogvideox", "sliced", "hooks on one rank"),
        pytest.param("ltx", "sliced", "lora", marks=pytest.mark.full),
        ("cosmos", "overlap", "plain"),
    ],
)
def test_ranks_choose_alike_and_compute_what_one_device_does(
    ranks: Ranks, tmp_path: Path, family: str, fastest: ScheduleName, habit: str
) -> None:
    first, *others = ranks(2 if family != "ltx" else 3).run(auto, family, fastest, habit, tmp_path)
    for found in (first, *others):
        assert found["before"] == ({"serial"}, 0)
        assert found["chosen"] == [fastest] * KINDS[family]
        assert found["biases"] == {family != "cosmos"}
        assert (found["pieces"] > 0) == (fastest != "serial")
        assert found["outputs"] < 1e-12 and found["gradients"] < 1e-12
    assert sum(f"{fastest}" in line and "ms" in line for line in first["lines"]) == KINDS[family]
    assert all(found["lines"] == [] for found in others)


# -- what stands against it ----------------------------------------------------------------------------------------


def objected(folder: Path) -> dict[str, tuple[list[ScheduleName], str]]:
    """What was chosen in each of three passes, and what was said; a settling is between them."""
    found = {}

    def note(family: str, change: Callable[[Any], Any]) -> None:
        lines, ran = list[str](), []
        case = Case(family, settings=LENGTHS[0])
        model = FAMILIES[family].model(case)
        change(model)
        schedules = ScheduleChoices(folder=folder / family, clock=clock("sliced"), log=lines.append)
        undo = parallelize(model, mesh, schedule=schedules, log=lines.append)
        try:
            for _ in range(3):
                run(model, FAMILIES[family].inputs(case, 0))
                ran += [*schedules.chosen.values()][:1]
                schedules.settle()
        except ValueError as error:
            lines.append(str(error))
        undo()
        found[family] = ran, " ".join(lines)

    def hooked_on_one_rank(model: Any) -> None:
        if dist.get_rank() == 1:
            model.transformer_blocks[1].attn1.norm_q.register_forward_hook(lambda *_: None)

    with SequenceMesh.create("cpu", ulysses_size=2) as mesh, lifted_casts():
        note("ltx", hooked_on_one_rank)
        note("allegro", lambda m: m.transformer_blocks[0].attn1.set_processor(OwnProcessor()))
        note("hunyuan_video", lambda m: m.transformer_blocks[0].register_forward_pre_hook(with_a_third_stream))
        note("pixart", lambda m: m.transformer_blocks[0].attn1.set_processor(Doubling()))
        note("flux2", lambda m: None)
    return found


def test_what_only_serial_can_run_is_serial_on_all_ranks_and_said(ranks: Ranks, tmp_path: Path) -> None:
    """Only what computes behind attention is an error, in the first pass that would be wrong."""
    first, second = ranks(2).run(objected, tmp_path)
    for family in ("ltx", "allegro"):
        assert first[family][0] == second[family][0] == ["serial"] * 3
    assert "norm_q has hooks" in first["ltx"][1] and "OwnProcessor" in first["allegro"][1]
    assert first["hunyuan_video"][0] == second["hunyuan_video"][0] == ["serial"] * 3
    assert "'image_states'" in first["hunyuan_video"][1]
    assert first["pixart"][0] == second["pixart"][0] == ["serial"]
    assert all("computes" in said and "schedule='serial'" in said for _, said in (first["pixart"], second["pixart"]))
    assert first["flux2"][0] == [] and "single blocks" in first["flux2"][1]
