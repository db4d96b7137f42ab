"""Where diffusers' tests are found, and which files hold those of which family."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

COMMIT = "58eb52c0803ea9af3abec60841c2a093bdf1f951"
"""Of huggingface/diffusers, whose tests `KNOWN_FAILURES` speaks of."""

LISTED_WITH = "0.42.1"
"""The diffusers that was installed when `KNOWN_FAILURES` was made."""

PACKAGE = "diffusers_tests"
"""What the checkout's folder `tests` is imported as, since `tests` is ours."""

FAMILIES = {
    "wan": ("wan",),
    "wan_vace": ("wan_vace",),
    "wan_animate": ("wan_animate",),
    "chronoedit": ("chronoedit",),
    "skyreels_v2": ("skyreels_v2",),
    "hunyuan_video": ("hunyuan_video", "hunyuan_video_framepack", "hunyuan_1_5"),
    "ltx": ("ltx", "ltx2"),
    "cogvideox": ("cogvideox", "consisid"),
    "mochi": ("mochi",),
    "cosmos": ("cosmos",),
    "cogview4": ("cogview4",),
    "easyanimate": ("easyanimate",),
    "allegro": ("allegro",),
    "helios": ("helios",),
    "minimax_h3": ("minimax_h3",),
    "motif_video": ("motif_video",),
    "anyflow": ("anyflow",),
    "flux": ("flux",),
    "flux2": ("flux2",),
    "qwen_image": ("qwenimage",),
    "sd3": ("sd3",),
    "chroma": ("chroma",),
    "z_image": ("z_image",),
}
"""By family, the models that its files of tests are named after."""


NEEDS = {"cosmos": "torchvision"}
"""By family, a package without which its models cannot be called as their tests do; we do not install it."""

FUSED = (
    "wan",
    "wan_vace",
    "wan_animate",
    "chronoedit",
    "skyreels_v2",
    "hunyuan_video",
    "ltx",
    "cogvideox",
    "mochi",
    "cosmos",
    "flux",
    "flux2",
    "qwen_image",
    "sd3",
    "chroma",
    "z_image",
)
"""Those whose blocks have fused forwards."""


def lacking(family: str) -> str | None:
    """Returns the package that a family's tests need and that is not installed."""
    package = NEEDS.get(family)
    return package if package is not None and find_spec(package) is None else None


def files_of(family: str, parent: Path) -> list[str]:
    """Files of a family's tests, as paths from the folder that holds `PACKAGE`; older checkouts lack some."""
    files = [f"{PACKAGE}/models/transformers/test_models_transformer_{model}.py" for model in FAMILIES[family]]
    return [file for file in files if (parent / file).is_file()]


@contextmanager
def linked(diffusers: Path) -> Iterator[Path]:
    """A folder in which the tests of a checkout lie as `PACKAGE`, for a while.

    Raises:
        FileNotFoundError: If they are not in the checkout.
    """
    tests = next((folder for folder in (diffusers / "tests", diffusers) if (folder / "models").is_dir()), None)
    if tests is None:
        raise FileNotFoundError(
            f"{diffusers} has no folder tests/models. Give a checkout of diffusers: git clone "
            f"https://github.com/huggingface/diffusers && git -C diffusers checkout {COMMIT}"
        )
    with tempfile.TemporaryDirectory(prefix="upstream-") as folder:
        (Path(folder) / PACKAGE).symlink_to(tests.resolve(), target_is_directory=True)
        yield Path(folder)


def has_tests(diffusers: Path, family: str) -> bool:
    """Whether a checkout knows a family, which may be newer."""
    with linked(diffusers) as parent:
        return bool(files_of(family, parent))
