"""Packs and unpacks a folder, and prints by how many MB the memory of this process rose at most, as two JSON numbers.

    python tests/peak_memory.py SOURCE FOLDER

Mapped files do not count: the kernel takes their memory back when it needs it. Both conversions run twice and only the
second time counts, so libraries that stay in memory are left out. Files of weights have 4 MB.
"""

import json
import sys
import threading
from pathlib import Path

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
    for turn in ("first", "second"):
        packed, unpacked = folder / turn / "packed", folder / turn / "dense"
        rises = [rise(pack_folder, source, packed), rise(unpack_folder, packed, unpacked)]
    print(json.dumps(rises))
