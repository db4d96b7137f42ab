"""``attention_backend=`` of the strategies: what runs, what is said, what a checkpoint keeps."""

from __future__ import annotations
