"""Perplexity and the tasks of lm-eval."""
