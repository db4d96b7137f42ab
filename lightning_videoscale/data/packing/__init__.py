"""From a folder of videos and images, and a file of captions, to WebDataset shards.

- `caption_files`: captions as trainers keep them: CSV, JSON Lines, JSON, or a text beside each file.
- `pack_folder`: the files and their captions into tars, in pieces that are whole or not there.
"""
