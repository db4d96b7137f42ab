"""What is changed inside a user's model: fused kernels in its blocks, and how its sequence is split.

- `inject`: `inject_fused_kernels`, replaces the forward of every block it knows.
- `report`: `InjectionReport`, what was replaced, what was skipped and why, and the way back.
- `fused_block`: `FusedBlock`, how one class of blocks is replaced.
- `methods`: whether a class's methods are still those it was written with, and which version.
- `branch_bias`: the bias gradient of a branch's last Linear, taken by the gated residual after it.
- `bypassed`: whether modules that fused forwards do not call are still as they take them to be.
- `wan_blocks`, `wan_attention`, `wan_timesteps`: the fused forwards of diffusers' Wan 2.1 / 2.2 / TI2V: its blocks, its
  attention, and the embedding of timesteps that repeat over tokens.
- `feed_forward`: the fused forward of diffusers' feed-forward with the tanh GELU.
- `dit_block`: `dit_block`, the fused forward of DiT's block and of every fork's with the same attributes.
- `wan`: Wan's split plan and its attention over a split sequence.

Your own block takes a forward, with the parameter names of the original, and one line that says whose it is::

    from lightning_videoscale.injection import FusedBlock, inject_fused_kernels
    from lightning_videoscale.kernels import norm_modulate


    def fused_forward(self, x, c):
        shift, scale, gate = self.modulation(c).unsqueeze(1).chunk(3, dim=-1)
        return x + gate * self.mlp(norm_modulate(x, scale, shift, eps=self.norm.eps, backend=self.kernel_backend))


    MY_BLOCK = FusedBlock("my_package.model.MyBlock", fused_forward, what="norm: norm_modulate")

    report = inject_fused_kernels(model, extra_blocks=[MY_BLOCK])  # or callbacks.FusedKernels(extra_blocks=[MY_BLOCK])
    print(report)
    report.undo()

Where the class is somebody else's, give `FusedBlock` also the ``known_forwards`` that yours was written for, by
`source_hash`: another version is then skipped with a warning instead of being replaced by something else.

A block built like DiT's takes the one line alone: ``dit_block("my_package.model.MyDiTBlock")``.
"""

from lightning_videoscale.injection import wan  # noqa: F401  importing it registers Wan's split plan
from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.inject import inject_fused_kernels
from lightning_videoscale.injection.methods import source_hash
from lightning_videoscale.injection.report import InjectionReport
from lightning_videoscale.models.dit import dit_block

__all__ = ["FusedBlock", "InjectionReport", "dit_block", "inject_fused_kernels", "source_hash"]
