"""Preparation of federated data sets: official files in, HDF5 shards ("fedmpi-shards/1") out."""
