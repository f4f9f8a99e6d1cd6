"""Updates of attackers: equal for any rank and any order of training, and no other update is changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedmpi.common.streams import Streams
from fedmpi.config import load_config
from fedmpi.updates.attacks import AttackedUpdates, attackers

ATTACKERS, STREAMS = np.array([1, 4]), Streams(3)
UPDATE = torch.linspace(-1, 1, 20_000)


@pytest.mark.parametrize(("fraction", "count"), [(0.25, 3), (0.24, 2), (1.0, 10)])
def test_a_share_of_the_clients_attacks_rounded_half_up(fraction: float, count: int) -> None:
    config = load_config(None, ["clients.sampler=all", "attack=noise", f"clients.attack_fraction={fraction}"])
    found = attackers(config, STREAMS, 10)
    assert len(set(found.tolist())) == count and found.tolist() == sorted(found.tolist())


@pytest.mark.parametrize("kind", ["sign-flip", "noise"])
def test_the_honest_send_what_they_have(kind: str) -> None:
    for client in (0, 2, 3, 5):
        assert torch.equal(AttackedUpdates(kind, 3.0, ATTACKERS, STREAMS).send(2, client, UPDATE.clone()), UPDATE)


def test_a_flipped_update_is_as_many_times_as_long_in_the_other_direction() -> None:
    mine = UPDATE.clone()
    sent = AttackedUpdates("sign-flip", 3.0, ATTACKERS, STREAMS).send(2, 4, mine)
    assert sent is mine and torch.allclose(sent, -3 * UPDATE)


def test_noise_has_the_stated_deviation_and_nothing_of_the_update() -> None:
    """Mean, deviation and correlation of 20,000 values within six standard errors: false alarm 6e-9 in all."""
    sent = AttackedUpdates("noise", 0.5, ATTACKERS, STREAMS).send(2, 4, UPDATE.clone())
    error = 6 / len(UPDATE) ** 0.5
    assert abs(float(sent.mean())) < 0.5 * error and float(sent.std()) == pytest.approx(0.5, rel=error)
    assert abs(np.corrcoef(sent.numpy(), UPDATE.numpy())[0, 1]) < error


def test_noise_is_of_its_round_and_client() -> None:
    attacks = AttackedUpdates("noise", 0.5, ATTACKERS, STREAMS)
    sent = {(t, k): attacks.send(t, k, UPDATE.clone()) for t in (2, 3) for k in (4, 1)}
    again = {key: AttackedUpdates("noise", 0.5, ATTACKERS, STREAMS).send(*key, 2 * UPDATE) for key in reversed(sent)}
    assert all(torch.equal(sent[key], again[key]) for key in sent)
    for one, other in (((2, 1), (2, 4)), ((2, 1), (3, 1)), ((3, 1), (2, 4))):
        assert abs(np.corrcoef(sent[one].numpy(), sent[other].numpy())[0, 1]) < 0.05
