"""Ranks that fail, stay away or are told to stop.

- `detector`: `FailureDetector`, which watches the other ranks and says what failed first, or who is missing.
- `answering_store`: `AnsweringStore`, a store that is not waited for longer than one may.
- `rank_state`: what each rank publishes of where it is.
- `network_calls`: `NetworkCalls`, who is in a split network that its peers have passed by.
- `rendezvous`: `Rendezvous`, a wait for all ranks that names those that are missing.
- `stopping`: `StopsOnSignals`, the same last step for all ranks after a SIGTERM.
- `epoch_ends`: `EpochEnds`, where an epoch ends on one rank before it does on another.
- `backward_counts`: `BackwardCounts`, ranks that go backward differently often.
- `endings`: how a process ends.
"""
