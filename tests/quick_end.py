"""Programs that tests start, and pytest itself, end without searching all that they hold for garbage once more.

Where torch is loaded that search takes half a second, in each of hundreds of processes.
"""

from __future__ import annotations

import atexit
import gc


def end_quickly() -> None:
    """Skip the search for garbage from here to the end of this process."""
    atexit.register(gc.freeze)
