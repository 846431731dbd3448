"""Packs and unpacks a folder, and prints by how many MB the memory of this process rose at most, as two JSON numbers.

    python tests/peak_memory.py SOURCE FOLDER

Mapped files do not count: the kernel takes their memory back when it needs it. Files of weights have 4 MB.
"""

import json
import sys
import threading
from pathlib import Path

import transformers.models.llama.modeling_llama  # noqa: F401 (so that its memory does not count)

from fwanda_pruner.formats import dense
from fwanda_pruner.run.convert import pack_folder, unpack_folder


def own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def rise(function, *arguments) -> float:
    before = top = own_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal top
        while not done.wait(0.0005):
            top = max(top, own_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    function(*arguments)
    done.set()
    thread.join()
    return (top - before) / 1e6


if __name__ == "__main__":
    source, folder = sys.argv[1], Path(sys.argv[2])
    dense.FILE_BYTES = 4_000_000
    steps = [(pack_folder, source, folder / "packed"), (unpack_folder, folder / "packed", folder / "dense")]
    print(json.dumps([rise(*step) for step in steps]))
