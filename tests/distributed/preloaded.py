"""What workers on CPUs need, imported once in the process that they are forked from.

Also what is imported late, by the first compilation, the first URL, the first run of DDP or DeepSpeed: two seconds of
every worker else.
"""

import gc
import os

import lightning.pytorch  # noqa: F401
import peft  # noqa: F401
import pytest  # noqa: F401
import s3fs  # noqa: F401
import setuptools  # noqa: F401
import torch._inductor.compile_fx
import torch.distributed.algorithms.ddp_comm_hooks
import torch.distributed.tensor.experimental  # noqa: F401
from diffusers.models.transformers import transformer_wan  # noqa: F401
from diffusers.pipelines.wan import pipeline_wan  # noqa: F401

import lightning_videoscale.data  # noqa: F401
from lightning_videoscale.parallel import known_models

os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported

import deepspeed.runtime.zero.muon.muon_optimizer
import deepspeed.runtime.zero.stage3  # noqa: F401

import tests.distributed.parity  # noqa: F401

known_models()  # which imports those of all families

# Else every collection in a worker looks at all that was imported, and writes to its pages, which copies them.
gc.collect()
gc.freeze()
