"""The record of a run, and texts made from records alone."""
