"""How text goes through a model, and where its weights are.

engine.py            the protocol Engine, which all above this folder use, and make_engine()
resident.py          ResidentEngine: all weights lie on one device
streamed.py          StreamedEngine: a few decoder blocks at a time lie on the device
sharded.py           ShardedEngine: each rank holds a share of every decoder block
block_weights.py     BlockWeights: loads a block when it runs, and sends it home
threshold.py         one threshold for the scores of all targets, block by block
loop.py              the one window loop: micro-batches, memory, progress; every pass of text runs in it
ranks.py             Ranks: the processes of a run; they divide the windows and merge their sums
model_windows.py     windows through the whole model, with the loss or its backward pass
walk.py              windows through one decoder block after the other
losses.py            the next-token loss, in slices
sums.py              Sums: what adds up while windows run
masks_in_passing.py  masks that apply only while a block runs
prefix.py            the blocks before the first target, run once for several masks
compile_blocks.py    blocks under torch.compile
attention.py, device.py, memory.py   attention kernels; mode, limits and determinism; free memory
all_weights.py       facts about all weights, gathered block by block
resume.py            what a long computation needs to survive an interruption
"""
