"""The ops, one file for each family: schema, fake kernel, plain-torch reference, samples, checks, documentation.

The function under `define` is the reference of an op: it defines the right result, and serves where no faster backend
does. `define` puts the op `torch.ops.fwanda.<name>` in its place. The wrapper of the same name, without the leading
underscore, is what users call: it checks the arguments first.

Shapes: R output rows, C input columns, T tokens. Weights are [R, C] bf16, fp16 or fp32, with any strides; they are
scored in fp32. A mask is True where a weight is kept.
"""
