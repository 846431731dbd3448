"""Text for calibration and evaluation.

`sources` turns the name of a text into documents; a new source is an entry in its dict `NAMED`. `windows` tokenises the
documents and cuts them into windows of equal length. `own_text` lets the model write windows. `domains` says which
windows of each text are for comparisons.
"""
