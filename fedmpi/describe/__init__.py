"""Output of `fedmpi inspect` and `fedmpi estimate`."""
