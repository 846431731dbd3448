"""Models: loading them, and finding the weight matrices to prune.

`load` opens checkpoints (`gguf` checks GGUF files first). `targets` lists the matrices of the decoder blocks; `experts`
gives it mixtures of experts as linear layers. `attributes` swaps attributes of modules for a while.
"""
