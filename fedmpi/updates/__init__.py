"""Transport of updates, and their bytes on the links."""
