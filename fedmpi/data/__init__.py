"""Client data: the shard store, the embedded digits, ownership, and what engines read.

Nothing here imports torch except `fedmpi.data.source`, so that a folder can be opened and inspected at once.
"""
