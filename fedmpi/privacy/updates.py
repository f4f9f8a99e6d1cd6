"""What a configuration means for the privacy of updates: the fixed denominator, when a draw is secret, what is refused.

The privacy of `privacy/gaussian.py` is that of one client whose data is replaced, everything else being equal.
It holds only where that client changes nothing but its own clipped update.
"""

from __future__ import annotations

from fedmpi.clients.cohort import cohort_size
from fedmpi.common.errors import UserError
from fedmpi.config import Config
from fedmpi.models.flat import FlatModel


def adds_noise(config: Config) -> bool:
    """Whether updates are clipped and the server adds noise, so that an ε is reported."""
    return config.privacy.clip_norm is not None and config.privacy.noise_multiplier > 0


def planned_participants(config: Config, clients: int) -> int:
    """W, what the sum of clipped updates is divided by: the participants wanted, or N where all take part.

    Known before any round, whoever is there and returns (McMahan et al. 2018, the estimator with fixed denominator).
    """
    part = config.participation
    return clients if part.clients == "all" else cohort_size(clients, part.count, part.fraction)


def draws_in_secret(config: Config) -> bool:
    """Whether a round's cohort is a uniform sample that depends on nobody's data and shows in nothing but the sum.

    Otherwise a round is charged as if everybody took part. That is so where

    - everybody takes part;
    - who is there follows from the clients' labels;
    - clients keep what transport lost (error feedback): a round then depends on who was drawn before;
    - the participants' own size answers set p: they say something about who was drawn.

    Independent availability and drop-outs leave the draw uniform among those present. Over-selection draws more: all
    who are asked count as drawn. The first m of them to arrive are a function of the sample that one replaced client
    changes by one place.
    """
    part, samples = config.participation, config.samples
    asks_cohort = samples.rule == "bernoulli" and samples.asked == "participants"
    by_label = config.system.availability not in ("always", "bernoulli", "time-of-day")
    return part.clients == "uniform" and not (by_label or config.transport.error_feedback or asks_cohort)


def check_buffers(config: Config, model: FlatModel) -> None:
    """Refuse noise for a model whose buffers would be released without it."""
    if adds_noise(config) and model.has_buffers:
        raise UserError(
            f"model.name = {config.model.name!r} has buffers that clients change (batch norm); noise "
            "(privacy.noise_multiplier) does not protect them. Use group or layer norm, or track_running_stats = "
            "False; constants belong into buffers with persistent = False"
        )
