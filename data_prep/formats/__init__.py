"""Formats of raw data: idx, pickles, LEAF's JSON and TFF's HDF5, texts, images, and the user's arrays and tables."""
