"""What families say of their projections is what their attention is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_videoscale.families import known
from lightning_videoscale.models.hidden_exchange.across_heads import norm_across
from lightning_videoscale.models.wan.hidden_exchange import OF_SELF
from lightning_videoscale.parallel import Projection, find_plan
from lightning_videoscale.parallel.plan import matching_modules
from tests.distributed.families.harness import Case, lifted_casts
from tests.distributed.families.test_parity import FAMILIES
from tests.models import tiny_wan

UNDESCRIBED = ("own_model", "helios", "motif_video")
"""The last two have several streams in one argument, of which Helios also scales the keys of one."""

OF_DIFFUSERS = [name for name in FAMILIES if name not in UNDESCRIBED]
TEXT = 7
VARIANTS = [(name, variant) for name in OF_DIFFUSERS for variant in FAMILIES[name].variants]

Triple = tuple[Tensor | None, Tensor | None, Tensor | None]


class Attended(TorchFunctionMode):
    """Notes query, key and value, (B, s, H, D), of the module that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.path, self.arguments, self.seen = "", {}, list[tuple[str, Mapping[str, Any], list[Tensor]]]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and self.path:
            given = [*args, *(kwargs[name] for name in ("query", "key", "value") if kwargs and name in kwargs)][:3]
            self.seen.append((self.path, self.arguments, [x.transpose(1, 2).clone() for x in given]))
        return func(*args, **(kwargs or {}))

    def enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        others = {name: x for value in bound.values() if isinstance(value, dict) for name, x in value.items()}
        self.path, self.arguments = path, {**bound, **others}

    def leave(self, *_: Any) -> None:
        self.path = ""


def rotated(x: Tensor, tables: Any, projection: Projection) -> Tensor:
    """Of (B, s, H, D)."""
    if projection.layout == "dict":
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * tables["query"].transpose(1, 2)).flatten(-2)
    if projection.layout == "axes":
        thirds = zip(x.chunk(3, dim=-1), *tables, strict=True)
        at = [(part, (cos[place[0]], sin[place[0]])) for part, (cos, sin), place in thirds]
        return torch.cat([rotated(part, own, replace(projection, layout="sd")) for part, own in at], -1)
    if projection.layout == "matrices":
        return (tables @ x.unflatten(-1, (-1, 2))[..., None])[..., 0].flatten(-2)
    if projection.layout == "sd":
        if (width := tables[0].shape[1]) < x.shape[3]:
            return torch.cat([rotated(x[..., :width], tables, projection), x[..., width:]], -1)
        pairs = slice(x.shape[3] // 2) if projection.halves else slice(None, None, 2)
        cos, sin = (table[None, :, None, pairs] for table in tables)
    elif projection.layout == "shd":
        cos, sin = tables
    elif projection.layout == "bshd":
        cos, sin = tables[0][..., ::2], tables[1][..., 1::2]
    elif projection.layout == "bsc":
        cos, sin = (table.unflatten(-1, (x.shape[2], -1))[..., ::2] for table in tables)
    elif projection.layout == "complex":
        cos, sin = (table.unsqueeze(-2) for table in (tables.real, tables.imag))
    else:
        cos, sin = (table.transpose(1, 2) for table in tables)
    first, second = x.chunk(2, dim=-1) if projection.halves else (x[..., ::2], x[..., 1::2])
    pair = first * cos - second * sin, first * sin + second * cos
    return torch.cat(pair, -1) if projection.halves else torch.stack(pair, -1).flatten(-2)


def own_rows(x: Tensor, dim: int, stream: str, streams: tuple[str, ...]) -> Tensor:
    """Of text and video, one behind the other, what is a stream's."""
    counts = {"text": TEXT, "video": x.shape[dim] - TEXT}
    rows = dict(zip(streams, x.split([counts[each] for each in streams], dim), strict=True))
    return rows[stream]


def tables_of(stream: str, projection: Projection, arguments: Mapping[str, Any]) -> Any:
    tables = None if projection.rotary is None else arguments.get(projection.rotary)
    if tables is None:
        return None
    tables = tables if projection.rotary_part is None else tables[projection.rotary_part]
    return [own_rows(x, 0, stream, projection.rotary_of) for x in tables] if projection.rotary_of else tables


def recomputed(module: Any, stream: str, projection: Projection, arguments: Mapping[str, Any]) -> Triple:
    """Query, key and value as the description has them."""
    made: list[Tensor | None] = []
    tables, tokens = tables_of(stream, projection, arguments), arguments[projection.tokens]
    if projection.tokens_of:
        tokens = own_rows(tokens, 1, stream, projection.tokens_of)
    for position, (linear, norm) in enumerate(zip(projection.linears, (*projection.norms, None), strict=True)):
        if linear is None:
            made.append(None)
            continue
        x = module.get_submodule(linear)(tokens)
        if projection.packed:
            x = x.split(module.inner_dim, -1)[position]
        norm_of = (norm and getattr(module, norm)) or nn.Identity()
        heads = (module.heads if hasattr(module, "heads") else module.num_heads, -1)
        x = norm_of(x).unflatten(-1, heads) if projection.across_heads else norm_of(x.unflatten(-1, heads))
        made.append(x if norm is None or tables is None else rotated(x, tables, projection))
    return made[0], made[1], made[2]


@pytest.mark.parametrize(("family", "variant"), VARIANTS, ids=str)
def test_queries_keys_and_values_are_those_that_are_described(family: str, variant: dict[str, Any]) -> None:
    case = Case(family, settings={"batch": 1, "text": TEXT, "frames": 2, "side": 2} | variant)
    model = FAMILIES[family].model(case).eval()
    attended, described = Attended(), {}
    for pattern, streams in known("PROJECTIONS", type(model))(model).items():  # type: ignore[misc]
        for path, module in matching_modules(model, pattern).items():
            described[path] = module, streams
            module.register_forward_pre_hook(
                partial(lambda p, m, a, k: attended.enter(p, m, a, k), path), with_kwargs=True
            )
            module.register_forward_hook(attended.leave)
    with lifted_casts(), attended, torch.no_grad():
        model(**FAMILIES[family].inputs(case, 0))
    assert {path for path, *_ in attended.seen} == described.keys()
    for path, arguments, given in attended.seen:
        module, streams = described[path]
        with lifted_casts(), torch.no_grad():
            triples = [recomputed(module, *stream, arguments) for stream in streams.items()]
        for got, parts in zip(given, zip(*triples, strict=True), strict=True):
            expected = torch.cat([part for part in parts if part is not None], dim=1)
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", OF_DIFFUSERS)
def test_each_attention_over_split_streams_is_described(family: str) -> None:
    model = FAMILIES[family].model(Case(family))
    described, plan = known("PROJECTIONS", type(model))(model), find_plan(model)  # type: ignore[misc]
    assert plan is not None
    if not isinstance(plan.attention, Mapping):
        assert {path.rpartition(".")[2] for path in described} == {"attn1"}
        return
    assert {path for path in described if matching_modules(model, path)} == plan.attention.keys()
    for path, rule in plan.attention.items():
        sides = [[s for s, each in described[path].items() if each.linears[i] is not None] for i in range(3)]
        assert sides == [[*rule.queries], [*rule.key_streams], [*rule.key_streams]]


def test_norms_over_all_heads_have_weights_of_one_dtype() -> None:
    """Kernels read both as one of them says."""
    attn = tiny_wan().blocks[0].attn1
    attn.norm_k.to(torch.bfloat16)
    place: Any = SimpleNamespace(mine=range(1), heads=attn.heads)
    norm = norm_across(attn, OF_SELF, None, "video", place, torch.empty(1, 3, attn.inner_dim))
    assert [w.dtype for w in norm.tensors.weights] == [torch.float32] * 2
