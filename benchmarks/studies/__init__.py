"""Studies for single pages of the documentation: each answers one question about published results."""
