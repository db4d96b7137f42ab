"""From pixels and captions to latents and embeddings, beforehand or while training."""
