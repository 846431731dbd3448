"""What is pruned: a model's blocks, its linear layers and experts, and how checkpoints are loaded."""
