"""What the callbacks take for a batch's meta."""

from lightning_videoscale.data import BatchMeta
from lightning_videoscale.data.batch_load import load_of
from tests.callbacks.toy import Meta


def test_the_data_modules_meta_and_any_like_it() -> None:
    planned = BatchMeta(
        frames=3, height=8, width=8, sequence_length=48, samples=2, predicted_cost=2 * 48.0**2, loss_weight=1.0
    )
    assert load_of({"meta": planned}) is planned
    own = Meta(samples=2, sequence_length=48)
    assert load_of({"meta": own}) is own


def test_anything_else_is_none() -> None:
    assert load_of([1, 2]) is None
    assert load_of({"x": 1}) is None
    assert load_of({"meta": {"samples": 2}}) is None
