"""Pruning methods: one loop over the blocks, by score or by Optimal Brain Surgeon."""
