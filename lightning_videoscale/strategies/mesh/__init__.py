"""The mesh of a run.

- `of_run`: `HasMesh`, which makes, opens, divides and closes it for a strategy.
- `division`: what its division is chosen by: the run's data, and what stands against rings.
"""
