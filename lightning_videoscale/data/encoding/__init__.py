"""From pixels and captions to latents and embeddings.

- `encode_shards`: shards of videos to shards of latents, beforehand; `online_encoder`: batches while training.
- `vae` and `text`: the encoders of diffusers and transformers behind both.
"""
