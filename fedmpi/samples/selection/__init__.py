"""Data samplers of published papers, one per module, written against the public interface of `fedmpi` alone.

Each docstring names the paper, its equations and every deviation from it. A file here is registered by itself.
"""
