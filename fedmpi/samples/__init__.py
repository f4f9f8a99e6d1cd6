"""Data samplers: the samples of the selected clients that are used."""
