"""Formats of pruned models on disk.

Each format is one module that offers the same five functions:

    model_bytes(model)                      how much disk the format needs
    write(folder, model, tokenizer)         write a model into an existing empty folder
    load(name, ...)                         read a model back
    count_zeros(folder, names, ...)         count the zeros of matrices in the files
    verify(folder, expected, ...)           compare these counts with the expected ones

`dense` is the plain Hugging Face folder and today the only format: run/save.py writes and verifies it, and
model/load.py reads it. A new format is a new module beside it, which these two then have to choose.
`files` makes files and folders appear whole or not at all; `audit` counts zeros in safetensors files.
"""
