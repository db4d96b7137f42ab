"""The work of a transformer, counted by hand."""

from lightning_videoscale.cost import TransformerFlops, training_flops


def test_flops_of_a_transformer_without_recomputation() -> None:
    # One layer of width 2 with a middle of 3. Per token 12 * 2² + 4 * 2 * 3 = 72, per pair 4 * 2 = 8, three passes.
    # 5 samples of 10 tokens: 5 * 3 * (72 * 10 + 8 * 100) = 22 800.
    for checkpointing in (False, True):
        transformer = TransformerFlops(layers=1, width=2, ffn_width=3, checkpointing=checkpointing)
        assert training_flops(transformer, batch_size=5, sequence_length=10) == 22_800
        assert training_flops(transformer, 5, 10, sequence_parallel_size=4) == 5_700
