"""From measured peaks to M_mem."""

from __future__ import annotations

import pytest

from lightning_videoscale.cost import Measurement, MemoryModel

GIB = 2**30


def test_m_mem_is_what_fits() -> None:
    peaks = [Measurement(b, s, 1.0, 10 * GIB + 400_000 * b * s) for b, s in ((1, 5000), (2, 5000), (1, 40_000))]
    model = MemoryModel.fit([*peaks, Measurement(1, 10, 1.0)])
    assert model.fixed == pytest.approx(10 * GIB) and model.per_token == pytest.approx(400_000)
    tokens = model.m_mem(80 * GIB, reserve=0.1)
    assert tokens == pytest.approx((72 - 10) * GIB / 400_000, abs=1)
    assert model.predict(1, tokens) <= 72 * GIB < model.predict(1, tokens + 2)


def test_a_fit_that_falls_short_keeps_its_excess_free() -> None:
    peaks = [
        Measurement(1, s, 1.0, 10 * GIB + 400_000 * s + (GIB if s == 20_000 else 0)) for s in (5000, 20_000, 40_000)
    ]
    model = MemoryModel.fit(peaks)
    assert model.worst_excess > 0.01
    for peak in peaks:
        assert peak.peak_bytes is not None
        assert model.predict(1, peak.sequence_length) * (1 + model.worst_excess) >= peak.peak_bytes * (1 - 1e-9)
    assert model.m_mem(80 * GIB, reserve=0) < (80 * GIB - model.fixed) / model.per_token


def test_what_cannot_be_fitted_or_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match="3 measured peaks"):
        MemoryModel.fit([Measurement(1, 10, 1.0, 5.0)])
    with pytest.raises(ValueError, match="do not grow"):
        MemoryModel.fit([Measurement(1, s, 1.0, 1e9 / s) for s in (10, 20, 30)])
    model = MemoryModel(fixed=90 * GIB, per_token=1e5, worst_excess=0.0)
    with pytest.raises(ValueError, match=r"80\.0 GiB, 90\.0"):
        model.m_mem(80 * GIB)
    assert model.fits(80 * GIB) == 0
