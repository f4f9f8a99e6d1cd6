"""FedBalancer's sample selection: samples whose loss exceeds a threshold that grows with the rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from fedmpi import data_sampler

if TYPE_CHECKING:
    from numpy.typing import NDArray


@data_sampler(name="fedbalancer", needs=("sample_loss",))
def fedbalancer(
    client: Any,
    *,
    window: Annotated[int, Field(ge=1)] = 20,
    step: Annotated[float, Field(ge=0, le=1)] = 0.05,
    under: Annotated[float, Field(ge=0, le=1)] = 0.0,
    noise: Annotated[float, Field(ge=0)] = 0.0,
) -> NDArray[np.int64]:
    """Select the client's samples with a loss of at least a threshold.

    Shin, Li, Liu and Lee 2022 (MobiSys, "FedBalancer: Data and Pace Control for Efficient Federated Learning on
    Heterogeneous Clients"). The threshold is ll + ltr · (lh − ll) (Algorithm 2). ll is a low loss, lh is a high one,
    and ltr is the loss threshold ratio. OT are the samples with a loss of at least the threshold, and UT the others. A
    client trains on L samples, drawn uniformly: p L of OT and (1 − p) L of UT (Algorithm 1). If one of the two has too
    few, the other supplies the rest. L is the number of samples that it can process before the deadline, at least |OT|.

    Deviations:

    - In the paper the server takes ll as the smallest loss, and lh as the mean of the 80th percentiles of the losses,
      of the clients of earlier rounds. A data sampler sees one client only: ll and lh are the smallest loss and the
      80th percentile of its own losses in this round.
    - Algorithm 3 raises ltr by lss after every w rounds in which the mean training loss fell, from round 2 w on, and
      lowers it otherwise. Here ltr always rises: min(1, lss · max(⌊t / w⌋ − 1, 0)) in round t, counted from 0.
    - The deadline and its control (Algorithm 4) are left out. With `samples.budget`, or with a budget of the client
      sampler, that is the number of samples that the client can process. Without one L = |OT|. A client whose budget
      is all its samples also uses OT only, while the paper's trains on all.
    - The paper keeps the losses of a client's first round and updates those of trained samples. Here all losses are
      those of the current global model.
    - The public code exchanges the shares: it draws p L of UT and (1 − p) L of OT. With p = 1 it uses UT first.
    - The paper's client selection, which weighs the losses above the threshold as in Oort, is left out. The noise on ll
      and lh is drawn anew in every round, and a threshold above the largest loss becomes this loss.

    Parameters
    ----------
    window : int
        w, rounds after which the threshold ratio rises.
    step : float
        lss, the rise of the threshold ratio.
    under : float
        1 − p, share of the samples drawn from those below the threshold. The paper's experiments use 0.
    noise : float
        Standard deviation of the Gaussian noise added to ll and to lh, for differential privacy in the paper.
    """
    loss = client.fresh("sample_loss")
    ranked, ranks = np.sort(loss), np.arange(len(loss))
    low, high = np.interp((0, 0.8 * ranks[-1]), ranks, ranked) + noise * client.generator.standard_normal(2)
    ratio = min(1.0, step * max(client.round // window - 1, 0))
    threshold = min(low + ratio * (high - low), ranked[-1])
    above, below = np.flatnonzero(loss >= threshold), np.flatnonzero(loss < threshold)
    capacity = int(client.expected) if client.expected < len(loss) else 0
    wanted = max(capacity, len(above))
    easy = min(int(wanted * under + 1e-9), len(below))
    hard = min(wanted - easy, len(above))
    easy = min(wanted - hard, len(below))
    drawn = [client.generator.choice(some, k, replace=False) for some, k in ((above, hard), (below, easy))]
    return np.sort(np.concatenate(drawn))
