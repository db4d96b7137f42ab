"""Two checkouts of this repository in turns on one GPU: has a change made a step slower?

    git worktree add /tmp/before COMMIT
    python benchmarks/paired.py --before /tmp/before

Each checkout runs in a process of its own with the same model: blocks of Wan-1.3B with fused kernels, forward, backward
and the optimizer's step, in bfloat16. They take turns, in every round from another one on. The checkout before the
change has two processes, so that its second over its first shows the spread of the measurement itself: a difference
below it is none. Host time is the time until a step's last launch. Where a step waits for the host, other work on the
machine shows in single steps: there the lower quartiles of all steps say more than the medians of rounds.

``--tiny`` runs a small model on whatever device there is, to try the script.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TURNS = ("before", "before, again", "after")
FRAMES = {4_680: 3, 14_040: 9, 32_760: 21}  # by tokens: 1560 of them a frame of 480 x 832 pixels
Row = dict[str, Any]


class Checkout:
    """A process that runs steps with the package of one checkout when it is told to.

    Args:
        folder: The checkout.
        options: Those of the command line.
        cores: What the process may run on: its own, so that none is moved to a core that another has just left.
    """

    def __init__(self, folder: Path, options: argparse.Namespace, cores: set[int]) -> None:
        command = [sys.executable, __file__, "--serve", "--layers", str(options.layers)]
        command += ["--tiny"] if options.tiny else []
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(
            command, env=environment, cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        os.sched_setaffinity(self._process.pid, cores)
        package = Path(self.ask())
        if package != folder.resolve() / "lightning_videoscale":
            raise RuntimeError(f"{folder} was to be measured, and {package} was imported.")

    def ask(self, request: Any = None) -> Any:
        """Sends a request, if there is one, and returns the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if request is not None:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"A process that measures ended with exit code {self._process.wait()}.")
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def serve(options: argparse.Namespace) -> None:
    """Answers requests of frames and repeats with the milliseconds of each step."""
    import torch
    from diffusers import WanTransformer3DModel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import lightning_videoscale

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attention = SDPBackend.CUDNN_ATTENTION if device.type == "cuda" else SDPBackend.MATH
    size = {"num_attention_heads": 12, "ffn_dim": 8960}
    if options.tiny:
        size = {"num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 128}
    torch.manual_seed(0)
    with device:
        model = WanTransformer3DModel(
            qk_norm="rms_norm_across_heads", cross_attn_norm=True, num_layers=options.layers, **size
        )
    model.to(torch.bfloat16)
    model.rope.float()
    for block in model.blocks:
        block.scale_shift_table.data = block.scale_shift_table.data.float()
    lightning_videoscale.inject_fused_kernels(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def step(*inputs: Any) -> tuple[float, float]:
        synchronize()
        begin = time.perf_counter()
        with sdpa_kernel(attention):
            model(*inputs, return_dict=False)[0].float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        launched = time.perf_counter()
        synchronize()
        return 1e3 * (time.perf_counter() - begin), 1e3 * (launched - begin)

    say(str(Path(lightning_videoscale.__file__).parent))
    for line in sys.stdin:
        frames, repeats = json.loads(line)
        height, width = (4, 6) if options.tiny else (60, 104)
        latents = torch.randn(1, 16, frames, height, width, device=device, dtype=torch.bfloat16)
        text = torch.randn(1, 512, 4096, device=device, dtype=torch.bfloat16)
        inputs = latents, torch.tensor([500], device=device), text
        step(*inputs)  # as this process left its caches, whatever the others did
        taken = [step(*inputs) for _ in range(repeats)]
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the others need the memory
        say(taken)


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def compare(checkouts: dict[str, Checkout], tokens: int, rounds: int, repeats: int) -> Row:
    """The medians of each, and the ratios round by round."""
    steps: dict[str, list[float]] = {name: [] for name in checkouts}
    hosts: dict[str, list[float]] = {name: [] for name in checkouts}
    single: dict[str, list[float]] = {name: [] for name in checkouts}
    for number in range(-1, rounds):  # the first compiles and fills caches
        names = [*checkouts][number % 3 :] + [*checkouts][: number % 3]
        for name in names:
            whole, host = zip(*checkouts[name].ask([FRAMES[tokens], repeats]), strict=True)
            if number >= 0:
                steps[name].append(statistics.median(whole))
                hosts[name].append(statistics.median(host))
                single[name] += whole
    row: Row = {"tokens": tokens}
    row["step_lower_quartile_ms"] = {name: round(statistics.quantiles(ms, n=4)[0], 2) for name, ms in single.items()}
    for what, times in (("step", steps), ("host", hosts)):
        row[f"{what}_median_ms"] = {name: round(statistics.median(mine), 2) for name, mine in times.items()}
        for name in TURNS[1:]:
            ratios = sorted(ours / theirs for ours, theirs in zip(times[name], times["before"], strict=True))
            quartiles = statistics.quantiles(ratios, n=4)
            row[f"{what}, {name} over before"] = [round(ratio, 4) for ratio in quartiles]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, default=ROOT, help="the checkout to compare with")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(FRAMES), choices=list(FRAMES))
    parser.add_argument("--layers", type=int, default=10, help="blocks of Wan-1.3B")
    parser.add_argument("--rounds", type=int, default=20, help="turns of every checkout")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps in a turn, after one that is not")
    parser.add_argument("--output", type=Path, help="JSON file to write; left out, only the table is printed")
    parser.add_argument("--commit", help="the commit that is measured, where the folder is no git checkout")
    parser.add_argument("--tiny", action="store_true", help="try the script with a small model")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    checkouts: dict[str, Checkout] = {}
    rows = []
    try:
        cores = sorted(os.sched_getaffinity(0))
        each = len(cores) // len(TURNS)
        for number, name in enumerate(TURNS):
            own = set(cores[number * each :][:each] if each else cores)
            checkouts[name] = Checkout(ROOT if name == "after" else options.before.resolve(), options, own)
        for tokens in options.tokens:
            rows.append(compare(checkouts, tokens, options.rounds, options.repeats))
            print(json.dumps(rows[-1], indent=2), flush=True)
    finally:
        for checkout in checkouts.values():
            checkout.close()
    if options.output:
        sys.path.insert(0, str(ROOT))  # not sooner: a process that measures takes the package of its own checkout
        from benchmarks import provenance

        settings = {name: getattr(options, name) for name in ("layers", "rounds", "repeats", "tiny")}
        provenance.write(options.output, "paired", options.commit or provenance.commit(), settings, rows)


if __name__ == "__main__":
    main()
