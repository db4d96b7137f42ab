"""What all layers receive, such as a mask, is split and exchanged once in a pass."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

from lightning_videoscale.attention import as_choices
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.parallel import SequenceMesh, parallelize
from lightning_videoscale.parallel.context import SplitRecord
from lightning_videoscale.strategies.blocks import checkpoint_activations
from tests.distributed.families.models.hunyuan_video import SIZES, inputs
from tests.distributed.parallel.test_biases import Counting
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]
mesh_of = cache(lambda: SequenceMesh.create("cpu", ulysses_size=2))


def _model() -> nn.Module:
    from diffusers import HunyuanVideoTransformer3DModel

    torch.manual_seed(0)
    sizes = SIZES | {"num_layers": 2}
    return HunyuanVideoTransformer3DModel(
        **sizes, num_single_layers=3, patch_size=1, pooled_projection_dim=8, guidance_embeds=True
    )


def _pass(change: str, checkpoint: bool) -> tuple[float, int, int]:
    """How far output and gradients are from one device; gathers in forward, and in forward and backward."""
    torch.manual_seed(1)
    given = inputs() | {"return_dict": False}
    whole, split, transport = _model(), _model(), Counting()
    inject_fused_kernels(split)
    parallelize(split, mesh_of(), transport=transport, attention_backend=as_choices("sdpa"), verify_plan=False)
    if change == "hooks":  # so that the original forward runs, of whose norms hooks are called
        for model in (whole, split):
            for block in model.transformer_blocks:
                block.attn.norm_q.register_forward_hook(lambda _, __, output: 2 * output)
    if checkpoint:
        checkpoint_activations(split)
    with torch.no_grad():
        split(**given)
    results = []
    for model in (whole, split):
        transport.gathers = 0
        output = model(**given)[0]
        forward = transport.gathers
        output.square().mean().backward()
        results.append([output.detach(), model.x_embedder.proj.weight.grad, model.proj_out.weight.grad])
    expected, found = results
    found[1:] = map(_mean, found[1:])
    distances = [float((a - b).norm() / a.norm()) for a, b in zip(expected, found, strict=True)]
    return max(distances), forward, transport.gathers


def _mean(gradient: Tensor) -> Tensor:
    torch.distributed.all_reduce(gradient)
    return gradient / 2


@pytest.mark.parametrize(("change", "checkpoint"), [("none", True), ("hooks", False)])
def test_one_mask_is_exchanged_once(ranks: Ranks, change: str, checkpoint: bool) -> None:
    for distance, forward, total in ranks(2).run(_pass, change, checkpoint):
        assert distance < 1e-4
        # The mask, the output, and as in all first calls checksums of the inputs.
        assert forward == 3
        # In backward only those of the output's gradient, also where layers are computed again.
        assert total == forward + 1


def test_what_was_found_out_holds_for_that_tensor_as_it_is() -> None:
    record, calls = SplitRecord(0), []

    def find(x: Tensor, what: str = "sum", record: SplitRecord = record) -> float:
        def add_up() -> float:
            calls.append(what)
            return float(x.sum())

        return record.once(x, what, add_up)

    x, y = torch.ones(3), torch.ones(2)
    assert [find(x) for _ in range(3)] == [3.0] * 3 and calls == ["sum"]
    assert find(x, "another") == 3.0 and calls == ["sum", "another"]
    x.add_(1)
    assert find(x) == 6.0
    assert find(y, record=record.with_stream("video", 4, (2, 2))) == 2.0
    del x
    assert len(record.known) == 1  # of y: what nobody holds is forgotten
    calls.clear()
    assert find(y) == 2.0 and not calls
    assert find(y, record=SplitRecord(0)) == 2.0 and calls == ["sum"]


def test_what_was_found_out_goes_with_the_record_without_collecting_garbage() -> None:
    assert not gc.isenabled()
    record, mask = SplitRecord(0), torch.ones(2, 3, dtype=torch.bool)
    whole = mask.clone()
    found = weakref.ref(whole)
    record.once(mask, "view", partial(tuple, [mask[None], whole]))
    del mask, whole, record
    assert found() is None
