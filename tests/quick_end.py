"""Programs that tests start, and pytest itself, end without searching all that they hold for garbage once more.

Where torch is loaded that search takes half a second, in each of hundreds of processes.
"""

from __future__ import annotations

import atexit
import gc


def end_quickly() -> None:
    """From the end of this process on, nothing that it holds is searched for garbage."""
    atexit.register(gc.freeze)
