"""Many settings on one model."""
