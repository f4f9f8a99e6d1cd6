"""A rule for stale updates: topology.staleness = "staleness:recent"."""


def recent(staleness: int, *, most: int = 20) -> float:
    """Weigh by 1 / (1 + staleness), and ignore older updates.

    Parameters
    ----------
    most : int
        Largest staleness of an update that counts.
    """
    return 1 / (1 + staleness) if staleness <= most else 0.0
