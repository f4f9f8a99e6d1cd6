"""The conformance kit: good parts pass, and every way of breaking a contract is caught by the check meant for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedmpi.testing
from fedmpi import ComponentFailure, UserError
from fedmpi.cli import app
from fedmpi.testing import CheckFailed, CheckSkipped, checks, perform
from fedmpi.testing.check import Subject
from fedmpi.testing.kit import part_of
from fedmpi.testing.selection import _chance, stated_inclusion
from fedmpi.testing.started import Starts, started_checks
from tests.testing import bad_parts

GLOBAL = "global generators untouched"
GOOD = [
    bad_parts.fair,
    bad_parts.varying,
    bad_parts.now_and_then,
    bad_parts.named_twice,
    bad_parts.half,
    bad_parts.pooled_third,
    bad_parts.root,
    bad_parts.midrange,
    bad_parts.absolute,
    bad_parts.confidence,
    bad_parts.LeastRecall,
    bad_parts.in_turn,
    bad_parts.WellNamed,
    bad_parts.OneName,
    bad_parts.CountingHeads,
    bad_parts.Counting,
]
BAD = [
    (bad_parts.from_the_global_generator, GLOBAL, "draws from, or seeds, the global generator of numpy"),
    (bad_parts.seeds_torch, GLOBAL, "of torch"),
    (bad_parts.unrepeatable, "same draw from the same generator", "two different results"),
    (bad_parts.wrong_inclusion, "inclusion probabilities over 10,000 draws", "states the inclusion probability 0.3"),
    *(
        pytest.param(part, "inclusion probabilities over 10,000 draws", "times in 10,000", marks=pytest.mark.slow)
        for part in (bad_parts.a_little_wrong, bad_parts.varying_wrong)
    ),
    (bad_parts.of_those_away, "valid cohorts", "returned client 3, who is not among view.available"),
    (bad_parts.everybody_compared, "cost with 100,000 clients", "ten times more clients"),
    (bad_parts.ForgetsOnResume, "state survives a checkpoint", "made anew before round 5"),
    (bad_parts.Misremembers, "state survives a checkpoint", "state names 'asks', .* no such attribute"),
    (bad_parts.global_rows, GLOBAL, "of random"),
    (bad_parts.shuffled, "rows sorted and in range", "are not sorted"),
    (bad_parts.beyond, "rows sorted and in range", "lies outside 0"),
    (bad_parts.repeated, "rows sorted and in range", "twice"),
    (bad_parts.Alternating, "rows do not depend on who else is asked", "asked in another order"),
    (bad_parts.pooled_from_its_start, "rows do not depend on who else is asked", "parts of the axis"),
    (bad_parts.jittered, GLOBAL, "of numpy"),
    (bad_parts.negative, "finite weights of the stated normalization", "a coefficient is negative"),
    (bad_parts.infinite, "finite weights of the stated normalization", "not finite"),
    (
        bad_parts.of_everybody,
        "finite weights of the stated normalization",
        "30.* for 9 participants.*sizes.cohort.clients",
    ),
    (bad_parts.times_their_chances, "same weights of the same cohort", r"\(30,\) \(9,\): .*sizes.cohort.clients"),
    (bad_parts.dropped_out, GLOBAL, "of torch"),
    (bad_parts.shortest, "slices of the coordinates agree with the whole", "cut into 2 slices"),
    (bad_parts.KeepsItToItself, "state survives a checkpoint", "it does something else in round 3|4|5"),
    (bad_parts.WrongNames, "names and shapes as declared", r"finish returned \['norm'\], but sums"),
    (bad_parts.NearlyNamed, "names and shapes as declared", "has 'proximal', .* did you mean 'proximal_mu'"),
    (bad_parts.NoisyAlgorithm, GLOBAL, "of torch"),
    (bad_parts.Forgetful, "state survives a checkpoint", "it does something else in round 3"),
    (bad_parts.noisy, GLOBAL, "of torch"),
    (bad_parts.of_the_batch, "a sample's value does not depend on the others", "with the samples beside it"),
    (bad_parts.averaged, "one finite value a sample", "returned a single number for 24 samples"),
    (bad_parts.unstable, "one finite value a sample", "not finite"),
    (bad_parts.rounded, "finite gradients", "no gradient by the outputs"),
    (bad_parts.noisy_metric, GLOBAL, "of torch"),
    (bad_parts.CountingMetric, "same sums of the same outputs", "two different results"),
    (bad_parts.averaged_metric, "sums add up over batches", r"confidence is 0.* in batches of \(9, 15\)"),
    (bad_parts.undefined_metric, "finite numbers", "surprise is nan for finite outputs"),
    (bad_parts.changing_metric, "finite numbers", "it changes what it is given"),
    (bad_parts.own_dice, GLOBAL, "of random"),
    (bad_parts.other_dice, "same clients from the same generator", "two different results"),
    (bad_parts.one_too_many, "a client for each row, or nobody", "gave rows to client 7, but --clients 7"),
    (bad_parts.below_nobody, "a client for each row, or nobody", "client -2: clients count from 0"),
    (bad_parts.of_some_rows, "a client for each row, or nobody", r"int64 of shape \(899,\)"),
    (bad_parts.sorts_the_labels, "a client for each row, or nobody", "it changes the labels"),
    (bad_parts.pairs_of_rows, "cost with 100,000 rows", "ten times more rows"),
]

OUTPUTS = "finite outputs of the shape that the task asks for"

BY_KEY: dict[str, tuple[list[Any], list[tuple[Any, str, str]]]] = {
    "availability": (
        [bad_parts.rising],
        [
            (bad_parts.above_one, "a probability for each client", "no probability"),
            (bad_parts.flickering, GLOBAL, "of numpy"),
            (bad_parts.Tiring, "state survives a checkpoint", "as after a resume, it gives other probabilities"),
        ],
    ),
    "scheduling": (
        [bad_parts.in_order],
        [
            (bad_parts.all_together, "a mediator for each client, none too large", "gave 7 clients to one mediator"),
            (bad_parts.shuffled_groups, GLOBAL, "of random"),
        ],
    ),
    "model": (
        [bad_parts.linear],
        [
            (bad_parts.one_output, OUTPUTS, r"it returns \(6, 1\) for 6 samples of 10 classes"),
            (bad_parts.Centred, "evaluated samples do not depend on one another", "with the samples beside it"),
            (bad_parts.Unseeded, GLOBAL, "of numpy"),
        ],
    ),
    "local optimizer": (
        [bad_parts.Steps, bad_parts.EverySecond],
        [
            (bad_parts.Standing, "steps follow the gradients and stay finite", "leave the parameters as they were"),
            (bad_parts.Remembering, "same steps from the same gradients", "two different results"),
            (bad_parts.Jumping, GLOBAL, "of torch"),
        ],
    ),
    "data set": (
        [bad_parts.points, bad_parts.raw_set],
        [
            (bad_parts.scattered, GLOBAL, "of numpy"),
            (bad_parts.labels_from_one, "features and labels as stated", "training labels from 1 to 3 of 3 classes"),
            (bad_parts.other_shape, "features and labels as stated", r"float32 \(2,\), but float32 \(3,\) is stated"),
            (bad_parts.in_reading_order, "rows do not depend on those read beside them", "in another order"),
        ],
    ),
    "data source": (
        [bad_parts.three_clients],
        [(bad_parts.other_numbers, "same data every time", "two different results")],
    ),
}
"""Parts that do not say their kind: good ones, and bad ones with the check that catches them."""


@pytest.mark.parametrize("kind", BY_KEY)
def test_parts_whose_kind_is_named_pass_or_are_caught(kind: str) -> None:
    good, bad = BY_KEY[kind]
    for part in good:
        assert all(check() for check in checks(part, kind=kind, runs=False))
    for part, name, words in bad:
        [check] = [check for check in checks(part, kind=kind, runs=False) if check.name == name]
        with pytest.raises((CheckFailed, ComponentFailure), match=words):
            check()


def test_a_model_is_tried_on_the_data_that_its_settings_name() -> None:
    x, y = np.ones((6, 7), np.float32), np.arange(6) % 3
    data = fedmpi.ClientArrays(x, y, y, test=(x, y))
    given = {"data.source": data}
    assert all(check() for check in checks(bad_parts.for_seven_features, given, kind="model", runs=False))
    with pytest.raises(CheckFailed, match="by the setting data.source .*seven features"):
        [check() for check in checks(bad_parts.for_seven_features, kind="model", runs=False)]


@pytest.mark.parametrize("task", ["tokens", "multilabel", "regression"])
def test_a_model_is_tried_on_the_kind_of_task_that_its_settings_name(task: str) -> None:
    of_positions = task == "tokens"
    good, bad = (bad_parts.next_letters, bad_parts.linear)[:: 1 if of_positions else -1]
    assert all(check() for check in checks(good, {"task.kind": task}, kind="model", runs=False))
    if of_positions:
        [check] = [check for check in checks(good, kind="model", runs=False) if check.name == OUTPUTS]
        with pytest.raises(CheckFailed, match=r"return \(6, 10\), or say what it is for by the setting task.kind"):
            check()
    with pytest.raises(CheckFailed):
        [check() for check in checks(bad, {"task.kind": task}, kind="model", runs=False)]


@fedmpi.testing.parametrize_with_checks(GOOD, runs=False)
def test_a_good_part_passes(check) -> None:
    assert check()


@pytest.mark.parametrize(("part", "name", "words"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_contract_is_caught_by_the_check_meant_for_it(part: Any, name: str, words: str) -> None:
    [check] = [check for check in checks(part, runs=False) if check.name == name]
    with np.errstate(divide="ignore"), pytest.raises((CheckFailed, ComponentFailure), match=words):
        check()


def test_what_a_part_raises_itself_is_reported_with_its_name_and_line() -> None:
    first, second, third, _ = checks(bad_parts.undecided, runs=False)
    for check in (first, second, third):
        said = r"the weights .*undecided \(.*bad_parts.py:\d+\) failed.*: ValueError: no opinion on this cohort$"
        with pytest.raises(ComponentFailure, match=said):
            check()


def test_a_part_that_asks_its_view_for_what_there_is_not_reads_what_there_is() -> None:
    for check in checks(bad_parts.asks_for_everybody, runs=False):
        with pytest.raises(ComponentFailure) as failed:
            check()
        assert "asks_for_everybody" in str(failed.value) and "bad_parts.py:" in str(failed.value)
        assert "'View' object has no attribute 'everybody' (it has age, available, class_counts, " in str(failed.value)


def test_a_pull_that_is_no_number_is_refused_as_in_a_run() -> None:
    for check in checks(bad_parts.PulledByWords, runs=False):
        with pytest.raises(UserError, match="has proximal_mu = 'a lot': the weight of the pull is a finite number"):
            check()


BY_RANK = [
    bad_parts.metric_by_processes,
    bad_parts.by_processes,
    bad_parts.first_by_processes,
    bad_parts.scaled_by_processes,
    bad_parts.PushedByProcesses,
]
NOT_SAVED = [bad_parts.ForgetsOnResume, bad_parts.KeepsItInTheClass, bad_parts.Forgetful]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_started_runs_catch_other_results_on_other_ranks_and_state_that_is_not_saved() -> None:
    subjects = [Subject(part_of(part)) for part in (bad_parts.half, *BY_RANK, *NOT_SAVED)]
    starts = Starts(subjects)
    failed = {
        (subject.part.object, result.check.name)
        for subject in subjects
        for result in perform(started_checks(subject, starts))
        if result.outcome != "ok"
    }
    by_rank = {(part, f"same result at 1 and {ranks} ranks") for part in BY_RANK for ranks in (2, 3)}
    not_saved = {(part, "same result after a resume") for part in NOT_SAVED}
    assert by_rank | not_saved <= failed
    assert {part for part, _ in failed - by_rank - not_saved} <= {bad_parts.KeepsItInTheClass}, "whose clients move"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("part", "kind", "good"),
    [
        (bad_parts.points, "data set", True),
        (bad_parts.dealt_by_processes, "partition", False),
    ],
)
def test_other_shards_by_other_processes_are_caught(part: Any, kind: str, good: bool) -> None:
    settings = {"count": 90} if good else {}
    [result] = perform([check for check in checks(part, settings, kind) if check.name.startswith("same shards")])
    assert result.outcome == ("ok" if good else "FAILED"), result
    assert good or "3 processes write another train-" in result.remark


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_fails_says_why_and_leaves_the_others_of_its_start_alone() -> None:
    good, broken = (Subject(part_of(part)) for part in (bad_parts.root, bad_parts.of_everybody))
    starts = Starts([broken, good])
    [failed] = perform(list(started_checks(broken, starts))[:1])
    assert failed.outcome == "FAILED"
    assert "return one coefficient a participant" in failed.remark and "bad_parts.py" in failed.remark
    [passed] = perform(list(started_checks(good, starts))[:1])
    assert passed.outcome == "ok"


def test_results_are_lines() -> None:
    results = list(perform(checks(bad_parts.negative, runs=False)))
    assert [result.outcome for result in results].count("FAILED") == 1
    for result in results:
        assert "\n" not in str(result) and str(result).startswith(result.outcome)
        assert result.check.name in str(result)


def test_options_are_given_as_keys_of_the_configuration() -> None:
    [check] = [c for c in checks(bad_parts.absolute, {"task.scale": 1e39}, runs=False) if c.name.startswith("one fin")]
    with pytest.raises(CheckFailed, match="not finite"):
        check()


def test_what_has_no_checks_is_refused() -> None:
    with pytest.raises(UserError, match="does not say what kind of part it is"):
        list(checks(bad_parts.processes))
    with pytest.raises(UserError, match="no kind 'colour'"):
        list(checks(bad_parts.absolute, kind="colour"))


def test_runs_of_a_part_that_is_in_no_file_are_skipped() -> None:
    def inside(outputs, targets):
        return bad_parts.absolute(outputs, targets)

    started = [check for check in checks(inside) if "same result a" in check.name]
    assert len(started) == 3
    for check in started:
        with pytest.raises(CheckSkipped, match="top level of a file"):
            check()


def test_the_command_prints_a_line_a_check_and_tells_by_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["check", "tests.testing.bad_parts:root", "--quick"], standalone_mode=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(line.startswith("ok ") for line in lines)
    assert app(["check", "tests.testing.bad_parts:negative", "--quick"], standalone_mode=False) == 1
    assert sum(line.startswith("FAILED ") for line in capsys.readouterr().out.splitlines()) == 1
    named = ["check", "focal", "--quick", "--set", "task.loss.gamma=-1"]
    assert app(named, standalone_mode=False) == 1
    assert "task.loss.gamma = -1" in capsys.readouterr().out


def test_an_option_that_is_missing_is_asked_for() -> None:
    with pytest.raises(UserError, match="'krum' needs server.aggregator.byzantine"):
        checks("krum")


def test_chances_are_those_of_the_binomial_law() -> None:
    third = np.full(5, 1 / 3)
    for draws, far in ((3333, 1.0), (3333 + 141, 3e-3), (3333 + 212, 7e-6), (3333 - 212, 7e-6)):
        assert far / 2 < _chance(third, draws, 10_000) < 2 * far
    assert _chance(np.ones(9_999), 9_999, 10_000) == 0, "who is certain to be drawn and was not"
    twice = np.array([0.2] * 1000 + [0.4] * 2000)  # drawn as stated in 5,000 rounds of each kind
    assert _chance(twice, 3000, 10_000) == pytest.approx(1.0)
    assert _chance(twice * 1.1, 3000, 10_000) < 1e-5


def test_the_limit_is_shared_among_the_clients() -> None:
    assert fedmpi.testing.FALSE_ALARM == 1e-4
    remark = stated_inclusion(Subject(part_of("uniform", "client sampler")))
    assert remark.startswith("12 clients, smallest chance 0.") and remark.endswith("refused below 8.3e-06")


def test_a_check_that_means_nothing_for_a_part_skips_the_test():
    mark = fedmpi.testing.parametrize_with_checks(["mse"])
    started = [check for check in mark.args[1] if "rank" in check.name]
    assert len(started) >= 2
    for check in started:
        with pytest.raises(pytest.skip.Exception, match="for regression"):
            check()
