"""The machinery that puts fused kernels into a user's model: recognise, replace, report, undo.

- `inject`: `inject_fused_kernels`, replaces the forward of every block it knows.
- `report`: `InjectionReport`, what was replaced, what was skipped and why, and the way back.
- `fused_block`: `FusedBlock`, how one class of blocks is replaced.
- `methods`: whether a class's methods are still those it was written with, and which version.
- `branch_bias`: the bias gradient of a branch's last Linear, taken by the gated residual after it.
- `residual_stream`: the branches of a block in order, fused where one ends and the next begins.
- `attention`: projections, norms and rotations of diffusers' attentions, fused.
- `parts`, `norms`: the norms that a fused forward does the work of, and what they must be.
- `bypassed`: whether modules that fused forwards do not call are still as they take them to be.
- `modulation`: shift, scale and gate of a timestep's part and a block's own, and timesteps that repeat over tokens.

The blocks that are known without your help are in `models`, a file per family.

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
`source_hash`: another version is then skipped, with a warning that says what differs.

A block built like DiT's takes the one line alone: ``models.dit.dit_block("my_package.model.MyDiTBlock")``.
"""

from lightning_videoscale.injection.fused_block import FusedBlock
from lightning_videoscale.injection.inject import inject_fused_kernels
from lightning_videoscale.injection.methods import source_hash
from lightning_videoscale.injection.report import InjectionReport

__all__ = ["FusedBlock", "InjectionReport", "inject_fused_kernels", "source_hash"]
