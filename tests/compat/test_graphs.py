"""The memory of CUDA graphs, as torch owns it."""

from __future__ import annotations

import pytest
import torch

from lightning_videoscale.compat.names import MissingNameError
from lightning_videoscale.compat.torch import graphs


def test_of_nothing_there_is_no_memory_to_share() -> None:
    x = torch.empty(0, 3, dtype=torch.bfloat16, requires_grad=True)
    alias = graphs.alias(x)
    assert (alias.shape, alias.dtype, alias.requires_grad) == (x.shape, x.dtype, False)


def test_a_name_that_torch_lacks_is_not_taken_for_an_allocation_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
    with pytest.raises(MissingNameError):
        graphs.end_allocation(torch.device("cuda", 0), (0, 1))
