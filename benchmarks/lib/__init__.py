"""What the benchmarks share: cases and baselines, facts about the machine, results, and the tables made from them."""
