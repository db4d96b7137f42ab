"""What ZeRO does otherwise than torch, made good for `SequenceParallelDeepSpeedStrategy`.

- `precision`: `ZeroPrecision`.
- `steps`: `ZeroSteps`, where parameters have no gradient in a step.
"""
