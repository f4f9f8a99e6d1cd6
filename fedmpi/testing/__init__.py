"""Conformance tests: does a custom component satisfy its interface?

From the command line `fedmpi check mine:loudest`; under pytest::

    import fedmpi.testing
    from mine import loudest, rare_first

    @fedmpi.testing.parametrize_with_checks([loudest, rare_first])
    def test_my_parts(check):
        check()

Every check is one statement. Each statistical check rejects a correct component with a probability of at most 10⁻⁴.
"""

from fedmpi.testing.check import FALSE_ALARM, Check, CheckFailed, CheckSkipped
from fedmpi.testing.kit import Result, checks, parametrize_with_checks, perform

__all__ = [
    "FALSE_ALARM",
    "Check",
    "CheckFailed",
    "CheckSkipped",
    "Result",
    "checks",
    "parametrize_with_checks",
    "perform",
]
