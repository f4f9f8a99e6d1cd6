"""Every field of the records and of the summary has a statement in some test: a new one without fails here."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np

from tests.keys.entries import ALL, AWAY, CLOCK, COPIES, MEDIATED, NOISED, OPTICS, PRIVATE, SOME, STRATA, near
from tests.keys.watched import Watcher

TESTS = Path(__file__).resolve().parents[1]
STARS, RELAYS = "reference/plain_*.py", "reference/plain_relays.py"
FOLDER = "end_to_end/test_run_folder.py"
RECORD = {
    STARS: (
        "round lr train_loss samples steps participants opening available asked virtual_seconds strata stratum_sizes "
        "noise_clients allocation sampling_probability size_estimate size_asked "
        "size_unprotected size_epsilon_round size_epsilon_max size_epsilon_mean clipped_updates inclusion_min "
        "inclusion_mean inclusion_max stratum_spreads update_norm gradient_diversity client_drift gamma clients_used "
        "client_use_effective client_use_gini samples_used sample_use_effective sample_use_gini attackers test_loss "
        "test_accuracy test_macro_f1 bytes_client_up bytes_client_down bytes_paper_formula"
    ),
    "reference/plain_draws.py": "size_true clipped_fraction",
    RELAYS: "visits mediators kl_mediators",
    "mediators/test_relay.py": "hops",
    "keys/test_every_field.py": (
        "bytes_mediator_up bytes_mediator_down kl_mean kl_std kl_max kl_quartiles kl_client_mean kl_client_std "
        "kl_client_max kl_client_quartiles kl_client_before_mean kl_client_before_std kl_client_before_max "
        "kl_client_before_quartiles"
    ),
    "end_to_end/test_private_updates.py": "update_epsilon",
    "end_to_end/test_validation.py": "val_loss val_accuracy val_macro_f1",
    "end_to_end/test_sampling_runs.py": "weight_divergence",
    "end_to_end/test_astraea.py": "rebalancing busy_seconds idle_seconds",
    "core/test_clients_view.py": " ".join(
        f"client_{score}_{name}"
        for score in ("accuracy", "loss", "tuned_accuracy", "tuned_loss")
        for name in ("mean", "weighted", "std", "worst10", "best10", "jain")
    ),
    FOLDER: "seconds phase_seconds",
}
SUMMARY = {
    FOLDER: (
        "final best_test_accuracy best_round wall_seconds bytes_total bytes_client_up bytes_client_down ranks clients "
        "parameters engine versions git_commit"
    ),
    "end_to_end/test_validation.py": "best_chosen_on best_val_accuracy",
    "end_to_end/test_astraea.py": (
        "bytes_paper_formula bytes_mediator_up bytes_mediator_down rebalancing mpi_bytes rounds_to_target "
        "megabytes_to_target"
    ),
    "keys/entries.py": "target_accuracy attackers",
    "core/test_clients_view.py": "clients_evaluated_on",
    "test_api.py": "data",
    "records/test_recorder.py": "samples_total steps_total",
    "keys/test_every_field.py": "size_epsilon_max size_epsilon_mean update_epsilon",
}
"""Test → the fields that it compares with expected values."""
RUNS = (
    f"{MEDIATED} topology.clients_per_mediator=2 logging.reference={{reference}} rebalance=true",
    f"{STRATA} logging.diagnostics=true clients.sampler.initial_step=true",
    f"{PRIVATE} logging.diagnostics=true",
    COPIES,
    f"{OPTICS} clients.sampler.clustering.outliers=singletons",
    f"{NOISED} privacy.noise_multiplier=1",
    f"{CLOCK} clients.over_selection=2 clients.failure_rate=0.1",
    f"{AWAY} clients.availability.probability=0.5",
    f"{ALL} attack=sign-flip evaluation.target_accuracy=0.01",
    f"{SOME} data.source={{val}} evaluation.on=both evaluation.clients=all evaluation.fine_tune=1",
)
CALLED_OTHERWISE = ("bytes_mediator_", "kl_", "client_accuracy_", "client_loss_", "client_tuned_")
"""Made of parts there: f"bytes_{link}", f"{name}_mean"."""


def field_names(of: dict[str, str]) -> set[str]:
    return {field for fields in of.values() for field in fields.split()}


def test_every_field_is_checked_somewhere(watcher: Watcher):
    record, summary = set[str](), set[str]()
    for settings in RUNS:
        seen = watcher.see(settings)
        assert not seen.refusal, seen.refusal
        for line in (seen.folder / "metrics.jsonl").read_text().splitlines():
            record |= json.loads(line).keys()
        summary |= json.loads((seen.folder / "summary.json").read_text()).keys()
    assert record == field_names(RECORD)
    assert summary == field_names(SUMMARY)


def test_the_tests_named_speak_of_these_fields():
    for path, fields in [*RECORD.items(), *SUMMARY.items()]:
        text = "".join(found.read_text() for found in TESTS.glob(path))
        for field in fields.split():
            whole = field.startswith(CALLED_OTHERWISE)
            assert whole or re.search(rf"\b{field}\b", text) or field.removeprefix("bytes_") in text, (path, field)


def test_divergences_before_copies_are_those_of_the_participants_own_samples(watcher: Watcher):
    seen, plain = watcher.see(RUNS[0]), watcher.see(SOME)
    for t, record in enumerate(seen.record):
        counts = plain.class_counts[seen.cohort[t][0]].astype(float)
        shares = counts / counts.sum(1, keepdims=True)
        terms = [sum(p * math.log(p * len(row)) for p in row if p) for row in shares.tolist()]
        assert near(record["kl_client_before_mean"], np.mean(terms))
        assert near(record["kl_client_before_std"], np.std(terms))
        assert near(record["kl_client_before_max"], max(terms))
        assert near(record["kl_client_before_quartiles"], np.quantile(terms, [0, 0.25, 0.5, 0.75, 1]))


def test_the_summary_reports_what_was_spent_in_all(watcher: Watcher):
    sizes, updates = watcher.see(PRIVATE), watcher.see(f"{NOISED} privacy.noise_multiplier=1")
    for key in ("size_epsilon_max", "size_epsilon_mean"):
        assert sizes.summary[key] == sizes.record[-1][key] == 6.0
    assert (
        updates.summary["update_epsilon"] == updates.record[-1]["update_epsilon"] > updates.record[0]["update_epsilon"]
    )
