"""One run: its stages in order, timed and resumable."""
