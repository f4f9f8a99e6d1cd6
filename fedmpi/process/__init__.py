"""The process of a run: joint exit of all ranks, signals, memory of the C library."""
