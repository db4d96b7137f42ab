"""Models of diffusers that have no split plan, with the reasons.

A plan in which nearly every module is `Whole` would be exact and save nothing. Whoever wants one writes it.
"""

from __future__ import annotations

_DIFFUSERS = "diffusers.models.transformers"

_SANA = (
    "its linear attention sums over all tokens, and its feed-forward convolves over the picture and the frames. Almost "
    "all of it would run whole on every rank. Train it without sequence parallelism."
)

REFUSALS = {
    f"{_DIFFUSERS}.sana_transformer.SanaTransformer2DModel": _SANA,
    f"{_DIFFUSERS}.transformer_sana_video.SanaVideoTransformer3DModel": _SANA,
    f"{_DIFFUSERS}.latte_transformer_3d.LatteTransformer3DModel": (
        "its blocks attend by turns within a frame and over one place of all frames, and keep both as a batch. No dim "
        "holds a sequence that all blocks could share. Train it without sequence parallelism."
    ),
    f"{_DIFFUSERS}.transformer_cosmos3.Cosmos3OmniTransformer": (
        "its text attends causally, and a module attends twice, once for the text and once for the rest. Plans know "
        "attention of all tokens, by one call for each module. Train it without sequence parallelism."
    ),
    f"{_DIFFUSERS}.transformer_anyflow_far.AnyFlowFARTransformer3DModel": (
        "its attention is causal by blocks of frames, by a mask that differs between queries. Train it without "
        "sequence parallelism. AnyFlowTransformer3DModel attends to all tokens and can be split."
    ),
}
