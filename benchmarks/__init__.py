"""Benchmarks: fedmpi against a plain PyTorch loop, hand-written floors and other simulators; see README.md."""
