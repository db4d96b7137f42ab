"""What is peculiar to image models: layers that are left out, arguments and masks that are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from torch import Tensor, nn

from lightning_videoscale.parallel import SequenceMesh, parallelize
from tests.distributed.families.harness import Case, errors_of
from tests.distributed.families.test_parity import FAMILIES
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]
Change = Callable[[Any, dict[str, Any]], None]


def without(layer: int) -> dict[str, float]:
    case = Case("sd3", (1, 1, 2), {"dual": (0, 1), "skipped": [layer]})
    return errors_of(case, FAMILIES["sd3"])


def test_a_layer_that_is_left_out_exchanges_nothing(ranks: Ranks) -> None:
    for layer in (0, 1):
        for found in ranks(2).run(without, layer):
            assert found.pop("norm") > 1e-3
            assert max(found.values()) <= 1e-10


def with_cached_references(_: Any, inputs: dict[str, Any]) -> None:
    inputs |= {"kv_cache_mode": "extract", "num_ref_tokens": 9}


def with_a_mask_of_numbers(_: Any, inputs: dict[str, Any]) -> None:
    """As the pipeline of Chroma makes it: one is added to the logits of what counts."""
    inputs["attention_mask"] = inputs["attention_mask"].float()


def with_an_adapter_of_images(model: Any, inputs: dict[str, Any]) -> None:
    """Which attends to the images' tokens, too, in the same module."""
    model.transformer_blocks[0].attn.set_processor(FluxIPAdapterAttnProcessor(32, 6))
    images = [torch.randn(2, 4, 6)]
    inputs["joint_attention_kwargs"] = {"ip_hidden_states": images}


def with_residuals_of_another_size(_: Any, inputs: dict[str, Any]) -> None:
    inputs["controlnet_block_samples"] = [torch.randn(2, 20, 32)]


REFUSED: Mapping[str, Mapping[Change, str]] = {
    "flux2": {with_cached_references: "argument 'kv_cache_mode' of the network"},
    "chroma": {
        with_a_mask_of_numbers: "ChromaTransformer2DModel cannot be split in this call: attention_mask is torch.float32"
    },
    "flux": {
        with_an_adapter_of_images: "transformer_blocks.0.attn: its query is (2, 4, 14, 8)",
        with_residuals_of_another_size: "It has 20 tokens along dim 1, and the streams of this forward pass 27",
    },
}


def said(name: str, changes: list[Change]) -> list[str]:
    case, found = Case(name, float32=True), []
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        for change in changes:
            model, inputs = FAMILIES[name].model(case), dict(FAMILIES[name].inputs(case, 0))
            change(model, inputs)
            parallelize(model, mesh)
            found.append(first_error(model, inputs))
    return found


def first_error(model: nn.Module, inputs: dict[str, Any]) -> str:
    try:
        model(**inputs)
    except Exception as error:
        return str(error)
    return ""


def test_what_plans_do_not_cover_is_refused_on_all_ranks(ranks: Ranks) -> None:
    for name, changes in REFUSED.items():
        for messages in ranks(2).run(said, name, [*changes]):
            for message, (change, expected) in zip(messages, changes.items(), strict=True):
                assert expected in message and "gloo" not in message, (change, message)


def attended_padding() -> Tensor:
    """What the first block of a Chroma makes of its text, of which the first sample's last tokens are padding."""
    case, seen = Case("chroma", float32=True), []
    model: Any = FAMILIES["chroma"].model(case)
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh, torch.no_grad():
        parallelize(model, mesh)
        model.transformer_blocks[0].attn.to_add_out.register_forward_hook(lambda _, given, __: seen.append(given[0]))
        model(**FAMILIES["chroma"].inputs(case, 0))
    return seen[-1]


def test_padding_attends_to_nothing(ranks: Ranks) -> None:
    first, last = ranks(2).run(attended_padding)
    text = torch.cat([first, last], dim=1)
    assert text.shape[:2] == (2, 7)
    assert text.norm(dim=-1).gt(0).tolist() == [[True] * 4 + [False] * 3, [True] * 7]
