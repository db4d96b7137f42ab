"""The error where a private name is gone, and how a method of one object is replaced."""

from __future__ import annotations

import collections
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version
from torch import nn

from lightning_videoscale.compat.names import MissingNameError, Package, installed_version
from lightning_videoscale.compat.patching import patch

TORCH = Package("torch", "2.11")


def test_what_is_there_is_returned() -> None:
    assert TORCH.get("torch.nn", "Linear") is nn.Linear
    assert TORCH.get(nn.Linear, "forward") is nn.Linear.forward
    assert TORCH.function("torch.nn.functional", "relu") is nn.functional.relu


@pytest.mark.parametrize(
    ("owner", "what"), [("torch.nn", "torch.nn"), ("torch.none", "torch.none"), (nn.Identity(), "Identity")]
)
def test_what_is_gone_is_an_error_with_the_versions(owner: object, what: str) -> None:
    with pytest.raises(MissingNameError) as raised:
        TORCH.get(owner, "_gone")
    for said in (what, "_gone", f"torch {version('torch')}", "2.11"):
        assert said in str(raised.value)


def test_a_function_that_is_gone_fails_when_it_is_called() -> None:
    gone = TORCH.function("torch.nn.functional", "_gone")
    with pytest.raises(MissingNameError, match="_gone"):
        gone(1, x=2)


def test_only_what_is_there_is_set() -> None:
    counter = collections.Counter()
    with pytest.raises(MissingNameError):
        TORCH.put(counter, "_gone", 1)
    module = nn.Linear(1, 1)
    TORCH.put(module, "in_features", 7)
    assert module.in_features == 7
    assert not hasattr(counter, "_gone")


def test_patches_are_taken_back_in_the_other_order() -> None:
    module, other = nn.Identity(), nn.Identity()
    undo_first = patch(module, "forward", lambda x: x + 1)
    undo_second = patch(module, "forward", lambda x: x + 10)
    assert (module(0), other(0)) == (10, 0)
    undo_second()
    assert module(0) == 1
    undo_first()
    assert module(0) == 0
    assert "forward" not in vars(module)


def test_the_installed_version() -> None:
    assert Version(installed_version("torch") or "0").public == Version(torch.__version__).public
    assert installed_version("no-such-package-is-installed") is None
