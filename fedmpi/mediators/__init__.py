"""Mediators: groups of clients trained one after another (Astraea; Duan et al. 2019, Algorithms 1 and 3)."""
