"""The process that a run lives in: ending all ranks, signals, memory of the C library."""
