"""Models: loading them, and finding the weight matrices to prune.

`load` opens checkpoints: `checks` says what they must be, `hub` looks up ids, `gguf_file` reads GGUF files, and
`gguf_model` converts them and keeps copies in the `cache`. `arguments` checks the types of what is given in Python, and
`plain` that a model can be pruned in place and saved. `busy` looks at the load of the machine. `targets` lists the
matrices of the decoder blocks; `experts` gives it mixtures of experts as linear layers. `attributes` swaps attributes
of modules for a while. `place` moves a model to where its engine expects it, and `placement` says where that is.
`sharding` divides the blocks over the ranks, `read_shares` reads them so, and `shares` gathers them.
"""
