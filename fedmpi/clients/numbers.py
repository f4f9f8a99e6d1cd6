"""What the server remembers of single clients between rounds: losses, norms, seconds of their last participation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.types import Floats, Ints

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "numbers."
"""Of the names in a checkpoint."""


class ClientNumbers:
    """Numbers of the clients' last participations, kept by rank 0."""

    def __init__(self, names: Sequence[str], clients: int):
        self.names, self.clients = tuple(names), clients
        self._values = {name: np.full(clients, np.nan) for name in self.names}
        self._seen = {name: np.full(clients, -1, np.int64) for name in self.names}

    def last(self, name: str) -> Floats:
        """The last number of each client, float64 (N,); NaN where there is none. A copy."""
        return self._values[name].copy()

    def age(self, name: str, round: int) -> Ints:
        """Rounds between the one in which it was taken and `round`, int64 (N,); −1 where there is none."""
        seen = self._seen[name]
        return np.where(seen < 0, -1, round - seen)

    def enter(self, name: str, round: int, clients: Ints, values: Floats) -> None:
        """Remember the numbers (k,) of these clients (k,), taken in the given round."""
        self._values[name][clients] = values
        self._seen[name][clients] = round

    def state(self) -> dict[str, Tensor]:
        """Everything remembered, for a checkpoint."""
        import torch  # slow to import, and the configuration is checked before

        arrays = {f"{PREFIX}{name}": values for name, values in self._values.items()}
        arrays |= {f"{PREFIX}{name}.round": seen for name, seen in self._seen.items()}
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what a checkpoint remembers."""
        missing = sorted(self.state().keys() - state.keys())
        if missing:
            raise UserError(
                f"the checkpoint lacks {', '.join(missing)}, which participation.clients draws by: resume with the "
                "version of fedmpi that wrote it, or choose another --out"
            )
        for name in self.names:
            self._values[name][:] = state[f"{PREFIX}{name}"].numpy()
            self._seen[name][:] = state[f"{PREFIX}{name}.round"].numpy()
