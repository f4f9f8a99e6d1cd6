"""Layers that train several clients' weights side by side."""
