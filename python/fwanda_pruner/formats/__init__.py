"""Model folders on disk: write, load, count zeros, verify."""
