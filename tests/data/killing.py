"""Processes that train together, any of which may be killed, and a parent that waits for them."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.data.chains import Chain, newest, train
from tests.distributed.forking import forking


def _work(chain: Chain, run: int, start: Path | None, folder: Path, rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    # As in any script; a child of a fork server would start servers of its own for its workers.
    torch.multiprocessing.set_start_method("fork", force=True)
    leg = chain.legs[run]
    if leg.strategy != "auto":
        places = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": leg.ranks,
            "LOCAL_WORLD_SIZE": leg.ranks,
            "GROUP_RANK": 0,
        }
        os.environ |= {name: str(value) for name, value in places.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "tests"}
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=leg.ranks)
    train(chain, run, start, folder, rank)


class Processes:
    """Starts the runs of chains."""

    def train(self, chain: Chain, run: int, folder: Path, timeout: float = 100.0) -> bool:
        """Trains until the end of a run (True), or until any rank is dead, and then kills the others (False)."""
        meeting = str(Path(tempfile.mkdtemp(prefix="ranks-")) / "store")
        start, leg = newest(folder / "runs"), chain.legs[run]
        ranks = [
            forking().Process(target=_work, args=(chain, run, start, folder, rank, meeting))
            for rank in range(leg.ranks)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout
        while any(process.is_alive() for process in ranks) and all(p.exitcode in (None, 0) for p in ranks):
            assert time.monotonic() < deadline, f"{leg} hangs"
            time.sleep(0.01)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
            process.join()
        assert all(code in (None, 0, -signal.SIGKILL) for code in codes), f"{leg} failed: exit codes {codes}"
        return codes == [0] * leg.ranks
