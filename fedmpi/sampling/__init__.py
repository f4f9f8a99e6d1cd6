"""Data-level sampling: which rows of the participants are used, and what the server may know about sizes."""
