"""What a network whose parameters FSDP2 has sharded refuses, as FSDP2 would lose something of it without a word.

`calls`            other tensors in the place of parameters; and backward that begins inside of a network
`second_backward`  a second backward through one pass
"""
