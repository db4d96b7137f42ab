"""The job of docs/cluster.md, with two nodes of two processes on this machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.strategies.failures.clustered_training import train
from tests.strategies.failures.jobs import Job

PAGE = (Path(__file__).parents[3] / "docs" / "cluster.md").read_text()
SMALLER = {
    "num_nodes=8, devices=8": 'num_nodes=2, devices=2, accelerator="cpu", logger=False, enable_checkpointing=False',
    "ulysses_size=8, replicas=8": "ulysses_size=2, replicas=2",
    "max_steps=100_000": "max_steps=2",
}


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    return str(found)


def test_groups_lie_inside_nodes(tmp_path: Path) -> None:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", block("bash"), flags=re.MULTILINE))
    assert options["nodes"] == options["ntasks-per-node"] == options["gpus-per-node"] == "8", "as the script has it"
    script = block("python").replace("/shared/runs/wan", str(tmp_path / "runs"))
    for large, small in SMALLER.items():
        assert large in script
        script = script.replace(large, small)
    slurm = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": options["job-name"],
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "2",
        "SLURM_PROCID": "{rank}",
        "SLURM_LOCALID": "{local}",
        "SLURM_NODEID": "{node}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    job = Job(tmp_path / "logs", 4, train, script, tmp_path, environment=slurm)
    assert job.wait(150) == [0] * 4, job.output()
    for rank in range(4):
        node, local = divmod(rank, 2)
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == {
            "sp": [2 * node, 2 * node + 1],
            "dp": [local, local + 2],
            "node": node,
            "local": local,
            "steps": 2,
        }
