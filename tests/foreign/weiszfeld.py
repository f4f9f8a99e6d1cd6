from fedmpi import aggregator


@aggregator
class Weiszfeld:
    """One step from the mean to the geometric median, with whole distances."""

    def __init__(self, *, smooth: float = 1e-6):
        self.smooth = smooth

    def measure(self, updates):
        return ((updates - updates.mean(0)) ** 2).sum(1)

    def combine(self, updates, coefficients, measured):
        w = coefficients / (measured + self.smooth).sqrt()
        return (w / w.sum()).to(updates.dtype) @ updates
