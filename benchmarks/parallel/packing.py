"""How fast Ulysses' messages are packed and unpacked on one GPU, beside plain torch and a copy of as many bytes.

    python benchmarks/parallel/packing.py

`pack`     query, key and value, (B, s, H, D), to the heads of each rank
`unpack`   the other way round, as their gradients come back

``plain`` is the same by one call of torch, `stack` or `reshape`, number by number. Variants take turns in rounds;
``gigabytes_per_second`` counts what is read and written, of the median. ``of_copy`` is over a copy of the message, of
which values above one are noise. ``--tiny`` tries the script on whatever device there is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.timing import alternate
from lightning_videoscale.parallel.ulysses import HeadShares, assign_heads, pack, unpack

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DIM = 128
Row = dict[str, Any]


class Message(NamedTuple):
    """Of a rank: B samples of s tokens with H heads, for so many ranks."""

    samples: int
    tokens: int
    heads: int
    ranks: int

    @property
    def shares(self) -> HeadShares:
        """Of query, key and value."""
        lengths = (self.tokens,) * self.ranks
        shares = assign_heads(0, lengths, lengths, self.heads, self.heads).qkv
        assert shares is not None
        return shares


def variants(message: Message) -> Iterator[tuple[str, dict[str, Callable[[], object]], int]]:
    """Packing and unpacking: each variant by name, and the bytes that it reads and writes."""
    b, s, h, w = message
    shape, shares = (b, s, h, DIM), message.shares
    qkv = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    packed = pack(qkv, shares)
    target = torch.empty_like(packed)
    moved = 2 * packed.nbytes

    def plain_pack() -> Tensor:
        return torch.stack([x.view(b, s, w, h // w, DIM).permute(2, 1, 0, 3, 4) for x in qkv], 3)

    def plain_unpack() -> Tensor:
        return packed.view(w, s, b, 3, h // w, DIM).permute(3, 2, 1, 0, 4, 5).reshape(3, *shape)

    assert torch.equal(plain_pack().flatten(), packed)
    assert all(map(torch.equal, unpack(packed, b, DIM, shares), qkv))
    copy = {"copy": lambda: target.copy_(packed)}
    yield "pack", copy | {"plain": plain_pack, "words": lambda: pack(qkv, shares)}, moved
    yield "unpack", copy | {"plain": plain_unpack, "words": lambda: unpack(packed, b, DIM, shares)}, moved


def measure(message: Message, rounds: int, repeats: int) -> Iterator[Row]:
    for direction, runs, moved in variants(message):
        times = alternate(runs, device=DEVICE, warm_up=3, repeats=repeats, rounds=rounds)
        for name, time in times.items():
            yield message._asdict() | {
                "direction": direction,
                "variant": name,
                "median_ms": round(time.median, 4),
                "rounds_ms": [round(each, 4) for each in time.rounds],
                "gigabytes_per_second": round(moved / time.median / 1e6, 1),
                "of_copy": round(1 / time.over(times["copy"]), 3),
            }


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--heads", type=int, nargs="+", default=[12, 24, 40])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2_048, 8_192, 32_768], help="of a rank")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="try the script with small messages")
    options = parser.parse_args()
    commit = options.commit or provenance.commit()
    if options.tiny:
        options.heads, options.tokens, options.rounds, options.repeats = [4], [4_096], 2, 2
    output = options.output or provenance.path("parallel", "packing")
    settings = {"dtype": "bfloat16", "head_dim": DIM, "ranks": 2, "rounds": options.rounds, "repeats": options.repeats}
    rows: list[Row] = []
    for heads, tokens, samples in product(options.heads, options.tokens, options.samples):
        for row in measure(Message(samples, tokens // samples, heads, 2), options.rounds, options.repeats):
            rows.append(row)
            print({name: value for name, value in row.items() if name != "rounds_ms"}, flush=True)
        provenance.write(output, "parallel/packing", commit, settings, rows)
    print(f"written to {output}")


if __name__ == "__main__":
    main()
