"""What runs the kernels is decided once: by the device's facts, by all ranks alike, and said."""

from __future__ import annotations

import logging

import pytest
import torch

from lightning_videoscale.kernels import backend, norm_modulate
from lightning_videoscale.kernels.backend import KernelBackends, choose, common, settle
from lightning_videoscale.kernels.row_types import RowOp, RowVariant

FAST = KernelBackends(("cuda", "triton", "reference"), ("cuda", "triton", "reference"), ("cuda", "triton", "reference"))
NO_NVRTC = KernelBackends(
    ("triton", "reference"),
    ("triton", "reference"),
    ("triton", "reference"),
    ("cuda: the cache folder cannot be written",),
)


def test_on_a_cpu_everything_runs_on_the_reference() -> None:
    setting, meaning = settle("auto", torch.device("cpu"))
    assert setting == "rows=reference gelu=reference heads=reference"
    assert "qk_norm_rope on reference" in meaning
    x = torch.randn(1, 4, 8)
    assert torch.equal(norm_modulate(x, backend=setting), norm_modulate(x))  # type: ignore[arg-type]


def test_what_is_not_known_yet_stays_open_and_a_name_stays_a_name() -> None:
    assert settle("auto")[0] == "auto"
    assert settle("cuda")[0] == "cuda"
    with pytest.raises(ValueError, match="tritn"):
        settle("tritn")  # type: ignore[arg-type]


def test_ranks_agree_on_what_all_have() -> None:
    agreed = common([FAST, NO_NVRTC, FAST])
    assert agreed == NO_NVRTC and common([FAST, FAST]) == FAST
    assert "cuda: the cache folder cannot be written" in str(agreed)


def test_a_call_beyond_the_limits_runs_on_the_next_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    backend._log_once.cache_clear()
    choose.cache_clear()
    variant = RowVariant(RowOp("layer"), 7, torch.float64)
    with caplog.at_level(logging.INFO, logger=backend.__name__):
        for _ in range(2):
            module = choose("rows", FAST.setting, "norm_modulate", variant, -1)
    assert module.__name__.endswith("reference.rows")
    assert len(caplog.records) == 1 and "norm_modulate runs on reference" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would do")
def test_triton_is_tried_out_before_it_is_chosen() -> None:
    pytest.importorskip("triton")
    reason = backend.unusable("triton", "rows", 0)
    assert reason is not None and "first kernel failed" in reason
