"""Jobs of docs/cluster.md on two nodes with TCP between them: their start, their groups, and a node that is lost."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.nodes.namespaces import Nodes, why_not
from tests.distributed.nodes.training import launch, train

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

PAGE = (Path(__file__).parents[3] / "docs" / "cluster.md").read_text()
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "wan",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "node[0-1]",
}
TIMEOUT = 12.0  # s that a collective may wait
MARGIN = 25.0  # s beyond that in which ranks have ended, on a machine that has other things to do
START = 200.0  # s to import everything, where these tests are the first, and to start


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with Nodes(tmp_path / "nodes") as two:
        yield two


def torchrun(nodes: int, ranks: int) -> str:
    """The command of the page, for a smaller job."""
    (command,) = re.findall(r"^torchrun .*", PAGE, flags=re.MULTILINE)
    for large, small in {"--nnodes=8": f"--nnodes={nodes}", "--nproc-per-node=8": f"--nproc-per-node={ranks}"}.items():
        assert large in command
        command = command.replace(large, small)
    return command.replace("$SLURM_JOB_ID", "4711")


def slurm(nodes: Nodes, *args: Any, cyclic: bool = False, **settings: Any) -> None:
    """Starts a task for each rank, block by block, or one on each node in turn."""
    for rank in range(4):
        local, node = divmod(rank, 2) if cyclic else divmod(rank, 2)[::-1]
        place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
        nodes.start(f"rank{rank}", node, _train, args, settings, **SLURM, **place)


def _train(args: tuple[Any, ...], settings: dict[str, Any]) -> None:
    train(*args, **settings)


def read(folder: Path, name: str) -> list[Any]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob(f"{name}*.json"))]


def await_pause(nodes: Nodes, folder: Path) -> None:
    deadline = time.monotonic() + START
    while len(list(folder.glob("paused*"))) < 4:
        assert time.monotonic() < deadline, nodes.output()
        time.sleep(0.05)


def lose(nodes: Nodes, folder: Path, node: int, how: str) -> list[str]:
    """Loses a node while the ranks compute, and lets those go on that are left; returns what these printed."""
    (nodes.kill if how == "killed" else lambda _: nodes.cut())(node)
    (folder / "go").touch()
    left = [f"rank{rank}" for rank in range(4) if how == "cut" or rank // 2 != node]
    # A process that is killed closes its connections, and nobody has to wait for the timeout.
    codes = nodes.wait((TIMEOUT if how == "cut" else 0) + MARGIN, *left)
    assert all(codes.values()), nodes.output()
    return [nodes.output(name) for name in left]


@pytest.mark.full  # the other tests take the default run's seconds
def test_torchrun_with_a_ring_across_nodes_goes_on_with_one(nodes: Nodes, tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    two.mkdir(), one.mkdir()
    for node in range(2):
        settings = {"ulysses_size": 2, "ring_size": 2}
        nodes.start(f"agent{node}", node, launch, torchrun(2, 2), two, "ddp", settings)
    assert nodes.wait(START) == {"agent0": 0, "agent1": 0}, nodes.output()
    assert read(two, "place") == [
        {
            "dp": [rank],
            "ring": [rank % 2, rank % 2 + 2],
            "ulysses": [rank // 2 * 2, rank // 2 * 2 + 1],
            "host": f"node{rank // 2}",
            "node": rank // 2,
            "local": rank % 2,
        }
        for rank in range(4)
    ]
    last = two / "checkpoints" / "step=2.ckpt"
    nodes.start("alone", 1, launch, torchrun(1, 2).replace("node0", "node1"), one, "ddp", {"ulysses_size": 2}, 1, last)
    assert nodes.wait(START, "alone") == {"alone": 0}, nodes.output("alone")
    whole, rest = read(two, "losses")[0], read(one, "losses")[0]
    assert len(whole) == 4
    assert rest == pytest.approx(whole[2:], rel=1e-5)


def test_slurm_with_batches_across_nodes_ends_when_one_is_killed(nodes: Nodes, tmp_path: Path) -> None:
    slurm(nodes, tmp_path, "ddp", {"ulysses_size": 2}, pause=2, timeout=TIMEOUT)
    await_pause(nodes, tmp_path)
    assert [(place["dp"], place["ulysses"], place["host"]) for place in read(tmp_path, "place")] == [
        ([0, 2], [0, 1], "node0"),
        ([1, 3], [0, 1], "node0"),
        ([0, 2], [2, 3], "node1"),
        ([1, 3], [2, 3], "node1"),
    ]
    for output in lose(nodes, tmp_path, 1, "killed"):
        assert "The first error of the job was on ranks [2, 3] of node1: nothing was heard of them" in output


@pytest.mark.full
def test_the_node_of_rank_0_is_killed(nodes: Nodes, tmp_path: Path) -> None:
    slurm(nodes, tmp_path, "fsdp2", {"ulysses_size": 2, "replicas": 2}, pause=2, timeout=TIMEOUT)
    await_pause(nodes, tmp_path)
    for output in lose(nodes, tmp_path, 0, "killed"):
        assert "The first error of the job was on rank 0: it does not answer" in output
        assert "node0 with ranks [0, 1]" in output


@pytest.mark.full
def test_each_side_of_a_cut_cable_names_the_other(nodes: Nodes, tmp_path: Path) -> None:
    slurm(nodes, tmp_path, "ddp", {"ulysses_size": 2, "ring_size": 2}, pause=2, timeout=TIMEOUT)
    await_pause(nodes, tmp_path)
    *first, second, third = lose(nodes, tmp_path, 0, "cut")
    for output in first:
        assert re.search(r"Missing in a collective of ranks .*: rank 2 \(train, .*\), rank 3 \(train, ", output)
    for output in second, third:
        assert "node0 with ranks [0, 1] is lost, or the network to it" in output


@pytest.mark.full
def test_torchrun_ends_when_a_node_is_killed(nodes: Nodes, tmp_path: Path) -> None:
    for node in range(2):
        arguments = (tmp_path, "ddp", {"ulysses_size": 2}, 2, None, 2, TIMEOUT)
        nodes.start(f"agent{node}", node, launch, torchrun(2, 2), *arguments)
    await_pause(nodes, tmp_path)
    nodes.kill(1)
    (tmp_path / "go").touch()
    assert nodes.wait(MARGIN, "agent0")["agent0"] not in (0, None)
    assert "The first error of the job was on ranks [2, 3] of node1: nothing was heard of them" in nodes.output()


@pytest.mark.full
def test_ranks_that_are_not_numbered_node_by_node_are_named(nodes: Nodes, tmp_path: Path) -> None:
    slurm(nodes, tmp_path, "ddp", {"ulysses_size": 2}, cyclic=True)
    assert set(nodes.wait(START).values()) == {0}, nodes.output()
    assert "Rank 1 is rank 0 of node 1" in nodes.output("rank1")
