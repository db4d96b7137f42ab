"""What choices by measurement have in common, whatever is chosen: kernels of attention, schedules.

`world`  what all ranks of the job know, where each of them has measured something else
`kept`   measurements on disk, a file for each machine and set of versions
"""
