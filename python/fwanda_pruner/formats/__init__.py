"""Formats of pruned models on disk.

Each format is one module that offers the same five functions:

    model_bytes(model)                      how much disk the format needs
    write(folder, model, tokenizer)         write a model into an existing empty folder
    load(name, ...)                         read a model back
    count_zeros(folder, names, ...)         count the zeros of matrices in the files
    verify(folder, expected, ...)           compare these counts with the expected ones

`dense` is the plain Hugging Face folder, `packed` holds one bit per weight and the kept values, and `masks` is dense
with a file of masks. run/save.py writes and verifies by the setting `save`; model/load.py reads all of them.
`files` makes files and folders appear whole or not at all; `audit` counts zeros in safetensors files.
"""
