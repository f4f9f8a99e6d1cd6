"""Studies that one page of the documentation is about: each answers one question about published results."""
