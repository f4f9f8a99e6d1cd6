"""Formats of raw data: idx, pickles, LEAF's JSON and TFF's HDF5, texts, images, arrays and tables of the user's."""
