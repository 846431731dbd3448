"""Seconds and peak memory of pruning large models on paper, and how well the same model predicts what was measured.

    python benchmarks/scaling_model.py                          the tables of docs/scaling.md
    python benchmarks/scaling_model.py --card H100 --gpus 1 4 8 large models on other machines

The model itself is lib/cost.py: it counts FLOPs and bytes and divides them by rates of a card, the host and the links.
lib/rates.py has these, each with its source; none serves one row of a table alone. The model covers the calibration of
Wanda and F-Wanda and the walk of SparseGPT through the blocks, with weights of two bytes. It leaves out reading the
text, the search of `response` and `auto`, and loading and saving the model.
"""

import argparse

from lib import scaling_tables
from lib.rates import CARDS

NAMES = {card.name: card for card in CARDS.values()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("--card", choices=NAMES, default="H200", help="of the second table (%(default)s)")
    option("--gpus", type=int, nargs="+", default=scaling_tables.GPUS, metavar="N", help="of the second table (1 8 64)")
    args = parser.parse_args(arguments)
    if min(args.gpus) < 1:
        parser.error(f"--gpus must be at least 1, got {min(args.gpus)}")
    print(f"Predicted / measured = ratio\n\n{scaling_tables.measured()}")
    print(
        f"{scaling_tables.sizes()}\n{args.card}\n\n{scaling_tables.large(NAMES[args.card], tuple(args.gpus))}", end=""
    )


if __name__ == "__main__":
    main()
