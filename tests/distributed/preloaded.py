"""What workers on CPUs need, imported once in the process that they are forked from."""

import gc
import os

import lightning.pytorch  # noqa: F401
from diffusers.models.transformers import transformer_wan  # noqa: F401
from diffusers.pipelines.wan import pipeline_wan  # noqa: F401

import lightning_videoscale  # noqa: F401

os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported

import deepspeed  # noqa: F401

# Else every collection in a worker looks at all that was imported, and writes to its pages, which copies them.
gc.collect()
gc.freeze()
