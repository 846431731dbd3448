"""Text as token windows."""
