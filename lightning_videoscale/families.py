"""Which file of `models` knows a class: the table of model families, a line each.

A file is imported when one of its classes is first met, so that the rooms below `models` need not import it. It says
what is known of the family under these names, and leaves out what does not apply; of a folder, the modules do that it
names as its ``MODULES``:

`SPLIT_PLANS`    by class path, what returns the `SplitPlan` of such a model
`REFUSALS`       by class path, why such a model has no plan
`PROJECTIONS`    by class path, what returns the `Projection` of each stream in each attention of such a model
`BLOCKS`         by class path, the paths of the transformer blocks of such a model, as a `SplitPlan` has them
`FUSED_BLOCKS`   by class path, the `FusedBlock`
`FUSED_ATTENTIONS`   by class path of an attention's processor, the `FusedBlock` of the attention
`FLOPS`          by class path, what makes `TransformerFlops` of a model's configuration
`TRANSFORMERS`   by name, `TransformerFlops` of the published models
`GEOMETRIES`     by name, `ModelGeometry`: the factors of the VAE and of the patches
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any, TypeVar

_Value = TypeVar("_Value")

FAMILIES = {
    "diffusers.models.transformers.transformer_wan": "wan",
    "diffusers.models.transformers.transformer_wan_vace": "wan.vace",
    "diffusers.models.transformers.transformer_chronoedit": "wan.chronoedit",
    "diffusers.models.transformers.transformer_skyreels_v2": "wan.skyreels_v2",
    "diffusers.models.transformers.transformer_wan_animate": "wan.animate",
    "diffusers.models.transformers.transformer_hunyuan_video": "hunyuan_video",
    "diffusers.models.transformers.transformer_hunyuan_video15": "hunyuan_video",
    "diffusers.models.transformers.transformer_hunyuan_video_framepack": "hunyuan_video",
    "diffusers.models.transformers.cogvideox_transformer_3d": "cogvideox",
    "diffusers.models.transformers.consisid_transformer_3d": "cogvideox",
    "diffusers.models.transformers.transformer_ltx": "ltx",
    "diffusers.models.transformers.transformer_ltx2": "ltx",
    "diffusers.models.transformers.transformer_mochi": "mochi",
    "diffusers.models.transformers.transformer_cosmos": "cosmos",
    "diffusers.models.transformers.transformer_kandinsky": "kandinsky",
    "diffusers.models.transformers.transformer_cogview4": "cogview4",
    "diffusers.models.transformers.transformer_easyanimate": "easyanimate",
    "diffusers.models.transformers.transformer_allegro": "allegro",
    "diffusers.models.transformers.pixart_transformer_2d": "pixart",
    "diffusers.models.transformers.transformer_helios": "helios",
    "diffusers.models.transformers.transformer_minimax_h3": "minimax_h3",
    "diffusers.models.transformers.transformer_motif_video": "motif_video",
    "diffusers.models.transformers.transformer_anyflow": "anyflow",
    "diffusers.models.transformers.sana_transformer": "unsplit",
    "diffusers.models.transformers.transformer_sana_video": "unsplit",
    "diffusers.models.transformers.latte_transformer_3d": "unsplit",
    "diffusers.models.transformers.transformer_cosmos3": "unsplit",
    "diffusers.models.transformers.transformer_anyflow_far": "unsplit",
    "diffusers.models.transformers.transformer_flux": "flux",
    "diffusers.models.transformers.transformer_flux2": "flux2",
    "diffusers.models.transformers.transformer_qwenimage": "qwen_image",
    "diffusers.models.transformers.transformer_sd3": "sd3",
    "diffusers.models.transformers.transformer_chroma": "chroma",
    "diffusers.models.transformers.transformer_z_image": "z_image",
    "diffusers.models.attention_processor.CogVideoXAttnProcessor2_0": "cogvideox",
    "diffusers.models.attention_processor.MochiAttention": "mochi",
    "diffusers.models.attention_processor.JointAttnProcessor2_0": "sd3",
    "diffusers.models.attention": "feed_forward",
    "diffusers.models.attention.JointTransformerBlock": "sd3",
    "models": "dit",
}
"""By the module that classes are in, or by the path of one class, the file in `models/` that knows them.

``"wan.vace"`` is `models/wan/vace.py`.
"""


def class_path(cls: type) -> str:
    """Returns ``"package.module.ClassName"``."""
    return f"{cls.__module__}.{cls.__qualname__}"


def known(kind: str, cls: type, own: Mapping[str, Any] | None = None) -> Any | None:
    """Returns what is known of a class or its nearest base, or None.

    Args:
        kind: Under which name families say it, such as ``"SPLIT_PLANS"``.
        cls: The class.
        own: By class path, what comes before what families say of the same class.
    """
    for base in cls.__mro__:
        path = class_path(base)
        file = FAMILIES.get(path, FAMILIES.get(base.__module__))
        if own is not None and path in own:
            return own[path]
        if file is not None and path in (entries := said(file, kind)):
            return entries[path]
    return None


def said_of(classes: Iterable[type], kind: str) -> dict[str, Any]:
    """Returns what the families of some classes say under a name; empty where none of them is known."""
    files = {FAMILIES[base.__module__] for cls in classes for base in cls.__mro__ if base.__module__ in FAMILIES}
    return {key: value for file in sorted(files) for key, value in said(file, kind).items()}


class AllFamilies(Mapping[str, _Value]):
    """What all families say under one name, such as ``"GEOMETRIES"``, by its keys; read when first asked for."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    @cached_property
    def _entries(self) -> dict[str, _Value]:
        return {key: value for file in FAMILIES.values() for key, value in said(file, self._kind).items()}

    def __getitem__(self, key: str) -> _Value:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def said(file: str, kind: str) -> Mapping[str, Any]:
    """Returns what a file of `models`, or the modules of a folder there, say under a name; empty for nothing."""
    path = f"lightning_videoscale.models.{file}"
    home = import_module(path)
    found = dict(getattr(home, kind, {}))
    for part in getattr(home, "MODULES", ()):
        found |= getattr(import_module(f"{path}.{part}"), kind, {})
    return found
