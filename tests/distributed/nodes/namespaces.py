"""Two "nodes" of one machine: each has a network, a host name and processes of its own, and a cable joins them.

`Nodes` makes them of Linux's namespaces, without being root. What runs on one reaches the other over TCP alone, cannot
see its processes, and dies with its node. Files are shared, as on a cluster.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import torch

from tests.distributed.forking import forking

INTERFACE = "cable0"
_MADE_OF = "--net --uts --ipc --pid --mount --fork --kill-child --mount-proc"
# As Debian has it, a node takes its own name for an address that no other node reaches.
_SET_UP = f"""
hold() {{
    printf '127.0.0.1 localhost\\n127.0.1.1 node%s\\n10.77.0.%s node%s\\n' $1 $2 $2 > "$0/hosts$1"
    exec unshare {_MADE_OF} sh -c "mount --bind '$0/hosts$1' /etc/hosts && hostname node$1 && exec sleep 1000000"
}}
of() {{
    until pid=$(pgrep -x -P $1 sleep); do kill -0 $1 && sleep 0.01; done
    echo $pid
}}
hold 0 1 & first=$!
hold 1 0 & second=$!
trap 'kill -9 $first $second' EXIT
trap exit HUP INT TERM
zero=$(of $first) one=$(of $second)
nsenter -t $zero -n ip link add {INTERFACE} type veth peer name {INTERFACE} netns $one
for node in "$zero 0" "$one 1"; do
    set -- $node
    nsenter -t $1 -n sh -c "ip addr add 10.77.0.$2/24 dev {INTERFACE}; ip link set lo up; ip link set {INTERFACE} up"
done
echo $zero $one
read -r until_the_test_ends || true
"""
_CLONE_ALL = 0x7C020000  # of linux/sched.h: NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET


def why_not() -> str | None:
    """Why there can be no nodes on this machine, or None."""
    lacking = [name for name in ("unshare", "nsenter", "ip", "hostname", "mount", "pgrep") if not shutil.which(name)]
    if sys.platform != "linux" or lacking:
        return f"nodes are made of Linux's namespaces, and {lacking or sys.platform} lacks"
    command = ["unshare", "--user", "--map-root-user", *_MADE_OF.split(), "ip", "link", "add", "type", "veth"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return f"namespaces are forbidden here: {tried.stderr.strip()}" if tried.returncode else None


class Nodes:
    """Two nodes, "node0" with the address 10.77.0.0 and "node1" with 10.77.0.1; ends all on leaving.

    Args:
        folder: Takes what the processes print, and what the nodes need.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._tasks: dict[str, BaseProcess] = {}

    def __enter__(self) -> Self:
        command = ["unshare", "--user", "--map-root-user", "sh", "-euc", _SET_UP, str(self._folder)]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        first, second = self._holder.stdout.readline().split()
        self._pids = [int(first), int(second)]
        # A network ends with its last process, and then no peer would hear that connections were closed.
        self._networks = [os.open(f"/proc/{pid}/ns/net", os.O_RDONLY) for pid in self._pids]
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.communicate()
        for network in self._networks:
            os.close(network)
        for task in self._tasks.values():
            task.join()

    def start(self, name: str, node: int, work: Callable[..., Any], *args: Any, **environment: str) -> None:
        """Starts a process on a node, forked from one that has all modules imported.

        Args:
            name: For `wait` and `output`.
            node: 0 or 1.
            work: At the top level of a module.
            *args: Its arguments.
            **environment: Set in the process, beside what docs/cluster.md has users set.
        """
        arguments = (self._pids[node], self._log(name), environment, partial(work, *args))
        self._tasks[name] = forking().Process(target=_run_on, args=arguments)
        self._tasks[name].start()

    def wait(self, seconds: float, *names: str) -> dict[str, int | None]:
        """Returns the exit codes of processes, or of all; fails if one runs after so many seconds."""
        tasks = {name: self._tasks[name] for name in names or self._tasks}
        deadline = time.monotonic() + seconds
        while running := [name for name, task in tasks.items() if task.is_alive()]:
            assert time.monotonic() < deadline, f"{running} still run after {seconds} s:\n{self.output(*tasks)}"
            time.sleep(0.02)
        return {name: task.exitcode for name, task in tasks.items()}

    def output(self, *names: str) -> str:
        """What processes have printed, or all of them."""
        logs = [self._log(name) for name in names or self._tasks]
        return "".join(log.read_text() for log in logs if log.exists())

    def kill(self, node: int) -> None:
        """Kills all processes of a node at once; its operating system closes their connections."""
        os.kill(self._pids[node], signal.SIGKILL)

    def cut(self) -> None:
        """Pulls the cable: nobody hears of anything any more."""
        command = ["nsenter", "-t", str(self._pids[0]), "-U", "-n", "ip", "link", "set", INTERFACE, "down"]
        subprocess.run(command, check=True)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


def _run_on(pid: int, log: Path, environment: Mapping[str, str], work: Callable[[], Any]) -> None:
    with log.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    _move_to(pid)
    torch.multiprocessing.set_start_method("fork", force=True)  # as in any script
    torch.set_num_threads(1)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ |= {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"} | environment
    work()


def _move_to(pid: int) -> None:
    """Moves this process to the node of another, in which a child of it goes on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.pidfd_open(pid), _CLONE_ALL):
        raise OSError(ctypes.get_errno(), "setns")
    child = os.fork()  # which is the first to have a number on the node
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) % 256)
