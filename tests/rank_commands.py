"""Several commands of `fwanda`, one after the other, as one rank of torchrun; after a command that fails, none.

torchrun --nproc-per-node N tests/rank_commands.py '[["calibrate", ...], ["eval", ...]]'
"""

import json
import sys

from fwanda_pruner import cli

if __name__ == "__main__":
    for command in json.loads(sys.argv[1]):
        if code := cli.main(command):
            sys.exit(code)
