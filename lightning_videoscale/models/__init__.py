"""What is known of model families, a file or a folder each: split plan, fused blocks, sizes.

`families.py`, the table beside this folder, says which file knows a class, and what a file holds under which name.
`feed_forward` is of no family: many of diffusers' models share it. Each file is imported when it is first needed::

    from lightning_videoscale.models.dit import dit_block  # for blocks built like DiT's
"""
