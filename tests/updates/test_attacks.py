"""Updates of attackers: equal for any rank and any order of training, and no other update is changed; their labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedmpi.common.registry import Component
from fedmpi.common.streams import Streams
from fedmpi.config import load_config
from fedmpi.updates.attacks import AttackedUpdates, attackers

ATTACKERS, STREAMS = np.array([1, 4]), Streams(3)
UPDATE = torch.linspace(-1, 1, 20_000)


@pytest.mark.parametrize(("fraction", "count"), [(0.25, 3), (0.24, 2), (1.0, 10)])
def test_a_share_of_the_clients_attacks_rounded_half_up(fraction: float, count: int) -> None:
    config = load_config(None, ["clients.sampler=all", "attack=noise", f"clients.attack_fraction={fraction}"])
    found = attackers(config.attack, fraction, STREAMS, 10)
    assert len(set(found.tolist())) == count and found.tolist() == sorted(found.tolist())


def sent(kind: Any, scale: float, round: int = 2, client: int = 4, update: torch.Tensor = UPDATE) -> torch.Tensor:
    attack = Component("attack", kind, {"scale": scale})
    return AttackedUpdates(attack, ATTACKERS, STREAMS).send(round, client, update.clone())


def test_attackers_send_the_update_flipped_and_stretched_the_honest_what_they_have() -> None:
    assert torch.allclose(sent("sign-flip", 3.0), -3 * UPDATE)
    assert all(torch.equal(sent(kind, 3.0, client=5), UPDATE) for kind in ("sign-flip", "noise"))


def test_noise_is_of_its_round_and_client_with_the_stated_deviation_and_nothing_of_the_update() -> None:
    """Mean, deviation and correlation of 20,000 values within six standard errors: false alarm 6e-9 in all."""
    noise, error = sent("noise", 0.5), 6 / len(UPDATE) ** 0.5
    assert abs(float(noise.mean())) < 0.5 * error and float(noise.std()) == pytest.approx(0.5, rel=error)
    for other in (UPDATE, sent("noise", 0.5, client=1), sent("noise", 0.5, round=3)):
        assert abs(np.corrcoef(noise.numpy(), other.numpy())[0, 1]) < error
    assert torch.equal(noise, sent("noise", 0.5, update=2 * UPDATE))
