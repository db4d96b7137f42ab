"""What the commands take, a file each. Nothing here imports PyTorch, so that ``--help`` answers at once."""
