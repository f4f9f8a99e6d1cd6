"""Benchmarks: fedmpi against a plain PyTorch loop and other simulators; see README.md."""
