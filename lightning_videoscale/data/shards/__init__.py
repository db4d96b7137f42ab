"""What is in the shards, and how it is read.

- Bytes: `patterns` (which tars are meant), `location` (paths, URLs, byte ranges), `storage` (files), `remote` (URLs).
- Samples: `tars` and `keys` (which members make a sample), `inspection` (what a sample is), `captions`, `samples` (a
  table of them), `index` (the table of all shards, as a file) and `indexing` (which makes it).
- Values: `sample_reader`, `decoding` (members to tensors), `safetensors`, `frames` (pixels of a video, at a size and
  rate).
- Media: `media` (opening files safely), `film` (frames and their times), `stills` (what Pillow reads), `pictures`
  (upright, square pixels, RGB), `probing` (what a file shows from end to end).
- `errors`: what is wrong with a shard or a member.
"""
