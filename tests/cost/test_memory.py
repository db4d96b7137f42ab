"""From measured peaks to M_mem."""

from __future__ import annotations

import math

import pytest

from lightning_videoscale.cost import BucketBudget, Measurement, MemoryLine, MemoryModel

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


def peak(samples: int, length: int, per_sample: float = 80e6) -> Measurement:
    return Measurement(samples, length, 1.0, 10 * GIB + 400_000 * samples * length + per_sample * samples)


def test_what_a_sample_takes_beside_its_tokens_is_told_from_them() -> None:
    """As its text does: a line over tokens alone would be too steep, and the longest sample too short."""
    model = MemoryModel.fit([peak(*size) for size in ((1, 1000), (1, 4000), (16, 1000), (4, 4000), (1, 16_000))])
    assert (model.per_token, model.per_sample) == (pytest.approx(400_000), pytest.approx(80e6))
    assert model.overhead_tokens(80 * GIB) == pytest.approx(200)
    longest = model.longest(80 * GIB, reserve=0)
    assert model.predict(1, longest) <= 80 * GIB < model.predict(1, longest + 2)
    budget = BucketBudget(model.m_mem(80 * GIB, reserve=0), math.inf, overhead_tokens=model.overhead_tokens(80 * GIB))
    for length in (50, 1000, 4000, 16_000, longest):
        size = budget.batch_size(length)
        assert model.predict(size, length) <= 80 * GIB < model.predict(size + 1, length)


@pytest.mark.parametrize(
    "sizes",
    [
        [(1, 1000), (1, 4000), (1, 16_000), (1, 60_000)],  # one batch size
        [(1, 4000), (2, 4000), (4, 4000), (8, 4000)],  # one length
        [(1, 4032), (4, 4032), (1, 4096), (4, 4096)],  # nearly one
        [(1, 1000), (4, 1000), (1, 4000)],  # three peaks
    ],
)
def test_where_batch_sizes_do_not_tell_samples_from_tokens_it_is_all_tokens(sizes: list[tuple[int, int]]) -> None:
    model = MemoryModel.fit([peak(*size) for size in sizes])
    assert model.per_sample == 0 and model.overhead_tokens(80 * GIB) == 0
    for samples, length in sizes:
        excess = 1 + model.worst_excess
        assert model.predict(samples, length) * excess >= peak(samples, length).peak_bytes * (1 - 1e-9)  # type: ignore[operator]


def test_of_two_lines_the_larger_overhead_counts() -> None:
    model = MemoryModel(10 * GIB, 2e5, 0.0, at_start=MemoryLine(8 * GIB, 4e5, 80e6), per_sample=20e6)
    assert model.overhead_tokens(80 * GIB) == 200
    longest = model.longest(80 * GIB, reserve=0)
    assert model.predict(1, longest) <= 80 * GIB
    assert model.longest(9 * GIB) == 0


def test_a_line_that_hardly_grows_with_the_tokens_does_not_take_the_room_of_the_other() -> None:
    """As with checkpointed activations: at the end of backward, a sample takes as much as 20 000 tokens, its text."""
    model = MemoryModel(30 * GIB, 1e3, 0.0, at_start=MemoryLine(20 * GIB, 4e5), per_sample=20e6)
    longest = model.longest(80 * GIB, reserve=0)
    assert model.predict(1, longest) <= 80 * GIB < model.predict(1, longest + 1)
    overhead = model.overhead_tokens(80 * GIB, reserve=0)
    budget = BucketBudget(model.m_mem(80 * GIB, reserve=0), math.inf, overhead_tokens=overhead)
    for length, least in ((100, 0.5), (1000, 0.9), (50_000, 0.9)):
        assert least * 80 * GIB < model.predict(budget.batch_size(length), length) <= 80 * GIB


@pytest.mark.parametrize("per_token", [400_000, 800_000])
def test_where_small_micro_batches_all_take_as_much_the_line_is_that_of_the_others(per_token: int) -> None:
    """As where weights gathered from all ranks are the peak: a line through all of them would be flat."""
    tokens = (256, 1000, 4000, 16_000, 32_000, 58_000, 60_000, 64_000)
    peaks = [Measurement(1, s, 1.0, max(40 * GIB, 20 * GIB + per_token * s)) for s in tokens]
    model = MemoryModel.fit(peaks)
    assert model.worst_excess == pytest.approx(0, abs=1e-9)
    assert model.m_mem(80 * GIB, reserve=0) == pytest.approx(60 * GIB / per_token, abs=1)


def peaks_of_steps(tokens: int) -> tuple[float, float]:
    """Peaks of a later and of the first micro-batch: 10 blocks, checkpointed, with 2 GiB of gradients."""
    states, gradients, kept, block = 6 * GIB, 2 * GIB, 30_000 * tokens, 130_000 * tokens
    start = states + kept + block  # of backward; at its end, nothing is kept any more
    return start + gradients, max(start, states + gradients + block)


def measured(tokens: int) -> Measurement:
    later, first = peaks_of_steps(tokens)
    return Measurement(1, tokens, 1.0, later, first_peak_bytes=first, start_bytes=later - 2 * GIB)


@pytest.mark.parametrize("capacity", [9 * GIB, 16 * GIB, 20 * GIB, 80 * GIB])
def test_a_step_of_one_micro_batch_has_no_gradients_when_its_backward_starts(capacity: int) -> None:
    short = [measured(tokens) for tokens in (2048, 4096, 8192)]
    alone, several = MemoryModel.fit(short, accumulates=False), MemoryModel.fit(short)
    for model, which in ((several, 0), (alone, 1)):
        tokens = model.m_mem(capacity, reserve=0)
        assert peaks_of_steps(tokens)[which] <= capacity < peaks_of_steps(tokens + 2)[which]
    assert alone.m_mem(capacity) > several.m_mem(capacity)
    assert alone.predict(1, 200_000) == pytest.approx(peaks_of_steps(200_000)[1])


def test_older_measurements_and_gradients_that_stay_are_as_those_of_several_micro_batches() -> None:
    peaks = [measured(tokens)._replace(first_peak_bytes=None) for tokens in (2048, 4096, 8192)]
    assert MemoryModel.fit(peaks, accumulates=False) == MemoryModel.fit(peaks)
    stay = [m._replace(first_peak_bytes=m.peak_bytes, start_bytes=None) for m in peaks]
    assert MemoryModel.fit(stay, accumulates=False) == MemoryModel.fit(stay)


def test_what_cannot_be_fitted_or_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match="3 measured peaks"):
        MemoryModel.fit([Measurement(1, 10, 1.0, 5.0)])
    with pytest.raises(ValueError, match="do not grow"):
        MemoryModel.fit([Measurement(1, s, 1.0, 1e9 / s) for s in (10, 20, 30)])
    rounded = [Measurement(1, s, 1.0, 40 * GIB + 512 * (s in (200, 300))) for s in (100, 200, 300, 400)]
    with pytest.raises(ValueError, match="do not grow"):  # something beside the tokens is the peak
        MemoryModel.fit(rounded)
    model = MemoryModel(fixed=90 * GIB, per_token=1e5, worst_excess=0.0)
    with pytest.raises(ValueError, match=r"80\.0 GiB, 90\.0"):
        model.m_mem(80 * GIB)
    assert model.fits(80 * GIB) == 0
