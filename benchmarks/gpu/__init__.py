"""Measurements on a GPU: `run.sh` runs them all within a time limit."""
