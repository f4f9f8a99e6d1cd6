"""Importance sampling of a client's samples by an upper bound of their gradient norms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from fedmpi import data_sampler, draw_without_replacement

if TYPE_CHECKING:
    from numpy.typing import NDArray


@data_sampler(name="sample-importance", needs=("sample_gradient_norm",))
def sample_importance(
    client: Any, *, share: Annotated[float, Field(gt=0, le=1)] = 0.2, threshold: Annotated[float, Field(ge=0)] = 1.5
) -> NDArray[np.int64]:
    """Draw a share of the client's samples in proportion to a bound of their gradient norms, if the gain is large.

    Katharopoulos and Fleuret 2018 (ICML, "Not All Samples Are Created Equal: Deep Learning with Importance Sampling",
    Algorithm 1). Up to a constant, the norm of the gradient of a sample's loss with respect to the model's outputs
    bounds the norm of its gradient (Section 3.2). Of B samples b are drawn with probabilities g_i in proportion to this
    bound if the gain τ exceeds a threshold, and uniformly otherwise (Section 3.3). With u_i = 1 / B it is
    1 / τ = √(1 − Σ (g_i − u_i)² / Σ g_i²), so that τ = √(B Σ g_i²). Here B is the number of the client's samples, and b
    is a share of its expected samples, those of `samples.budget` or all, but at least one.

    Deviations:

    - The paper weights the loss of a drawn sample by 1 / (B g_i), so that the batch gradient is unbiased. A data
      sampler cannot weight samples: all used samples count equally, and training favours those with long gradients. The
      aggregation weights count the samples used, which are the same share of every client.
    - Samples are drawn sequentially without replacement, with probability g_i over the rest. The paper draws with
      replacement.
    - The paper draws every batch anew from B presampled samples under the current parameters. Here all local steps of a
      round use the b samples drawn under the model that the client received.
    - τ is that of the client and round. The paper smooths it over iterations.

    Parameters
    ----------
    share : float
        b over the client's expected samples. The paper's experiments use 128 of 640.
    threshold : float
        τ_th, gain up to which the draw is uniform; 0 always draws by importance.
    """
    norm = client.fresh("sample_gradient_norm")
    count = min(len(norm), max(1, int(share * client.expected + 0.5)))
    gain = np.sqrt(len(norm) * (norm**2).sum()) / max(norm.sum(), np.finfo(float).tiny)
    return draw_without_replacement(client.generator, norm if gain > threshold else np.ones(len(norm)), count)
