"""For each family of ops, what a benchmark of it runs: inputs, a naive torch baseline, and a check that both agree."""
