"""Plans with one mistake: an entry of a plan left out, or a stream of it given another name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from lightning_videoscale.parallel import Refused, SplitPlan, Whole

UNKNOWN = "streem"

_STREAMS = ("streams", "queries", "keys")
_Mistakes = Iterator[tuple[str, Any]]


def plans_without_an_entry(plan: SplitPlan) -> dict[str, SplitPlan]:
    """By what they lack."""
    return {what: replace(wrong, exact=False) for what, wrong in _without(plan)}


def plans_with_another_stream(plan: SplitPlan) -> dict[str, SplitPlan]:
    """By what is changed, to another stream of the plan's or to one that it does not have."""
    names = {*_names(plan), UNKNOWN}
    return {what: replace(wrong, exact=False) for what, wrong in _renamed(plan, names)}


def _without(value: Any) -> _Mistakes:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(inner, Refused):  # of what these inputs do not have
                continue
            rest = {other: each for other, each in value.items() if other != key}
            if not isinstance(inner, Mapping):
                yield str(key), rest
            if isinstance(inner, Mapping | Whole):
                for what, changed in _without(inner):
                    yield f"{key} {what}", {**value, key: changed} if changed else rest
    elif is_dataclass(value):
        yield from _of_fields(value, _without)


def _renamed(value: Any, names: set[str]) -> _Mistakes:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            for what, changed in _renamed(inner, names):
                yield f"{key} {what}", {**value, key: changed}
    elif is_dataclass(value):
        for name in _STREAMS:
            streams = getattr(value, name, None) or ()
            for position, old in enumerate(streams):
                for new in sorted(names - {old}):
                    changed = (*streams[:position], new, *streams[position + 1 :])
                    yield f"{name} {changed}", replace(value, **{name: changed})  # type: ignore[type-var]
        yield from _of_fields(value, lambda inner: _renamed(inner, names))


def _of_fields(value: Any, mistakes: Any) -> _Mistakes:
    for each in fields(value):
        for what, changed in mistakes(getattr(value, each.name)):
            yield f"{each.name} {what}", replace(value, **{each.name: changed})


def _names(value: Any) -> set[str]:
    if isinstance(value, Mapping):
        return set().union(*map(_names, value.values()))
    if is_dataclass(value):
        inner = set().union(*(_names(getattr(value, each.name)) for each in fields(value)))
        return inner.union(*(getattr(value, name, None) or () for name in _STREAMS))
    return set()
