Traceback (most recent call last):
  File "/tmp/oom.py", line 3, in <module>
    import torch
ModuleNotFoundError: No module named 'torch'
