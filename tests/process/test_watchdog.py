"""Whom the watchdog finds to hold up a job, and when, in made-up time."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import psutil
import pytest

import fedmpi
from fedmpi import Config
from fedmpi.cluster import Cluster
from fedmpi.common.activity import PHASES, Activity, activity
from fedmpi.common.frames import place_of
from fedmpi.process.judge import (
    ALONE_TIMES,
    LATE_TIMES,
    LONGEST_LOOK,
    SECONDS_OF_SILENCE,
    SECONDS_PER_DEPUTY,
    UNLEARNED_TIMES,
    Finding,
    Judge,
    State,
)
from fedmpi.process.watchdog import SECONDS_STOPPED, Own, Process, Watchdog, watched

PATIENCE, ROUND = 60.0, 30.0
LATE = LATE_TIMES * ROUND + PATIENCE


def at(round: int, phase: str = "work", waiting: bool = False, idle: float = 0.0, client: int = -1) -> State:
    return State(PHASES.index(phase), round, 0, client, 0, int(waiting), int(1000 * idle))


Job = Callable[[float], tuple[State, dict[int, State]]]
"""The own state and what is heard of others, by the seconds since the round began."""


def found_in(judge: Judge, seconds: int, job: Job) -> list[tuple[int, Finding]]:
    """What is found while a round takes so many seconds, a look a second."""
    looks = [(second, judge.look(1.0, *job(second))) for second in range(1, seconds + 1)]
    return [(second, found) for second, found in looks if found is not None]


def experienced(rank: int = 0, size: int = 3) -> Judge:
    """A judge that has seen a round of thirty seconds and looks at the next."""
    judge = Judge(rank, size, PATIENCE)
    others = [other for other in range(size) if other != rank] if rank == 0 else [0]
    assert not found_in(judge, int(ROUND), lambda s: (at(0), {other: at(0) for other in others}))
    return judge


def test_a_round_is_late_after_ten_of_the_longest_and_the_patience_and_said_again_at_twice_that() -> None:
    def one_hangs(s: float) -> tuple[State, dict[int, State]]:
        return at(1, "sum", True, s), {1: at(1, "work", idle=s, client=17), 2: at(1, "sum", True, s)}

    found = found_in(experienced(), 1000, one_hangs)
    assert [second for second, _ in found] == [LATE, 2 * LATE]
    assert all(list(finding.late) == [1] and finding.over for _, finding in found)


def test_a_short_round_after_a_long_one_makes_nobody_late_sooner() -> None:
    judge = experienced()
    assert not found_in(judge, 2, lambda s: (at(1), {1: at(1), 2: at(1)}))
    found_in(judge, 1, lambda s: (at(2), {1: at(2), 2: at(2)}))
    assert judge.limit == LATE


def test_whoever_goes_on_is_not_late_however_long_the_round() -> None:
    def busy(s: float) -> tuple[State, dict[int, State]]:
        return at(1, "sum", True, s), {1: at(1, idle=s % (PATIENCE - 1)), 2: at(1, idle=2.0)}

    assert not found_in(experienced(), 3000, busy)


def test_a_rank_without_signs_of_life_is_late_and_not_those_that_hang_with_it_in_a_call_of_mpi() -> None:
    def one_stopped(s: float) -> tuple[State, dict[int, State]]:
        return at(1, "sum", False, s), {2: at(1, "sum", False, s)}

    ((_, finding),) = found_in(experienced(), int(LATE), one_stopped)
    assert list(finding.late) == [1] and finding.late[1][1] >= max(SECONDS_OF_SILENCE)


def test_a_pause_in_the_signs_of_life_makes_nobody_late() -> None:
    def pausing(s: float) -> tuple[State, dict[int, State]]:
        return at(1, "sum", True, s), {rank: at(1) for rank in (1, 2) if s % (max(SECONDS_OF_SILENCE) - 1) == 0}

    assert not found_in(experienced(), 2000, pausing)


def test_a_rank_that_missed_a_look_or_two_is_not_named_however_short_the_patience() -> None:
    judge = Judge(0, 3, patience=1.0)

    def one_stopped(s: float) -> tuple[State, dict[int, State]]:
        return at(1, "sum", True, s), {1: at(1, "sum", True, s)} if s % 3 == 1 else {}

    found = found_in(judge, 40, one_stopped)
    assert found and all(list(finding.late) == [2] for _, finding in found)


def test_ranks_that_all_wait_for_one_another_are_found() -> None:
    def deadlocked(s: float) -> tuple[State, dict[int, State]]:
        return at(1, "sum", True, s), {1: at(1, "work", True, s), 2: at(1, "plan", True, s)}

    ((_, finding),) = found_in(experienced(), int(LATE), deadlocked)
    assert not finding.late and finding.over
    ((_, finding),) = found_in(
        experienced(size=2), int(LATE), lambda s: (at(1, "sum", True, s), {1: at(1, "work", True, s)})
    )
    assert not finding.late and finding.over


def test_rank_0_is_judged_by_rank_1_and_later_by_rank_2() -> None:
    def silent(s: float) -> tuple[State, dict[int, State]]:
        return at(1, "sum", True, s), {}

    for rank, later in ((1, 0.0), (2, SECONDS_PER_DEPUTY), (3, 2 * SECONDS_PER_DEPUTY)):
        seconds, finding = found_in(experienced(rank, 4), int(LATE) + 40, silent)[0]
        assert seconds == LATE + later and list(finding.late) == [0] and finding.over
        *_, (seconds, finding) = found_in(Judge(rank, 4, PATIENCE), 1900, lambda s: (at(-1, "start", True, s), {}))
        assert seconds == UNLEARNED_TIMES * PATIENCE + later and finding.over
    assert not found_in(experienced(1), 2000, lambda s: (at(1, "work", idle=s), {0: at(1, "sum", True, s)}))


def test_before_any_round_is_finished_it_warns_sooner_where_somebody_waits_and_ends_much_later() -> None:
    def starting(waiting: bool) -> Job:
        return lambda s: (at(-1, "start", waiting, s), {1: at(-1, "start", idle=s)})

    found = found_in(Judge(0, 2, PATIENCE), int(UNLEARNED_TIMES * PATIENCE), starting(True))
    assert [second for second, _ in found] == [60, 120, 240, 480, 960, UNLEARNED_TIMES * PATIENCE]
    assert [finding.over for _, finding in found] == [False] * 5 + [True]
    found = found_in(Judge(0, 2, PATIENCE), 1000, starting(False))
    assert [second for second, _ in found] == [ALONE_TIMES * PATIENCE, 2 * ALONE_TIMES * PATIENCE]


def test_a_single_process_that_does_nothing_is_found() -> None:
    ((_, finding),) = found_in(experienced(size=1), int(LATE), lambda s: (at(1, idle=s), {}))
    assert list(finding.late) == [0]


def test_a_single_process_whose_first_round_never_ends_says_so_after_a_while() -> None:
    judge = Judge(0, 1, PATIENCE)
    found = found_in(judge, 1000, lambda s: (at(0, idle=s, client=3), {}))
    assert [second for second, _ in found] == [ALONE_TIMES * PATIENCE, 2 * ALONE_TIMES * PATIENCE]
    assert not any(finding.over for _, finding in found)


def pointing(judge: Judge, seconds: int, job: Job) -> list[int]:
    """The seconds at which the rank itself reports where it is."""
    pointed = []
    for second in range(1, seconds + 1):
        own, received = job(second)
        judge.look(1.0, own, received)
        pointed += [second] * judge.points(own)
    return pointed


def test_a_rank_that_holds_up_the_others_tells_once_a_round_where_it_is() -> None:
    waited_for, waiting = at(1, "sum", True), at(1, "work", idle=1e4, client=17)
    for rank in (0, 1):
        judge = experienced(rank)
        assert pointing(judge, 1000, lambda s: (waiting, {0: waited_for})) == [LATE]
        later = LATE_TIMES * 1000 + PATIENCE
        assert pointing(judge, 11_000, lambda s: (waiting._replace(round=2), {0: waited_for})) == [later]
    assert not pointing(experienced(1), 1000, lambda s: (at(1, "sum", True, s), {0: at(1, "sum", True, s)}))
    assert not pointing(experienced(1), 1000, lambda s: (at(1, idle=s % (PATIENCE - 1)), {0: waited_for}))
    first = at(-1, "start", idle=1e4)
    assert pointing(Judge(1, 2, PATIENCE), 99, lambda s: (first, {0: at(-1, "start", waiting=True)})) == [PATIENCE]
    assert not pointing(Judge(1, 2, PATIENCE), 99, lambda s: (first, {0: at(-1, "start")}))
    assert pointing(Judge(0, 1, PATIENCE), 1000, lambda s: (first, {})) == [ALONE_TIMES * PATIENCE]


def test_the_place_of_a_thread_is_the_innermost_line_of_the_users_own() -> None:
    def stay() -> None:
        threading.Event.wait(over)

    over = threading.Event()
    thread = threading.Thread(target=stay)
    thread.start()
    line = stay.__code__.co_firstlineno + 1
    while place_of(thread.ident or 0) != f"{__file__}:{line}":
        time.sleep(0.001)
    over.set()
    thread.join()
    assert place_of(thread.ident or 0) == "its end"


def test_rounds_shorter_than_a_look_are_learned_too() -> None:
    judge = Judge(0, 1, PATIENCE)
    assert judge.look(1.0, at(7), {}) is None
    assert judge.limit == LATE_TIMES + PATIENCE


def test_a_rank_is_idle_for_as_long_as_nothing_of_it_changes() -> None:
    activity = Activity()
    own = Own(activity)
    assert [own.look(1.0).idle_seconds for _ in range(3)] == [0.0, 1.0, 2.0]
    activity.work_on(5)
    assert (own.look(1.0).idle_seconds, own.look(1.5).idle_seconds, own.look(0.0).client) == (0.0, 1.5, 5)


@pytest.mark.parametrize(("what", "letters"), [("run", "RSD"), ("suspend", "T"), ("kill", "")])
def test_the_state_of_a_process_is_seen_and_a_later_one_of_its_number_is_another(what: str, letters: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = Process.of(child.pid)
        handle = psutil.Process(child.pid)
        if what != "run":
            getattr(handle, what)()
        while what == "suspend" and handle.status() != psutil.STATUS_STOPPED:
            pass
        while what == "kill" and handle.status() != psutil.STATUS_ZOMBIE:
            pass
        assert process.seen in letters if letters else process.seen == ""
        assert Process(process.host, child.pid, process.started + 1).seen == ""
        child.kill()
    assert process.seen == "" and Process.of(os.getpid()).seen


def test_the_configuration_says_whether_there_is_a_watchdog_its_patience_and_what_it_may_do(monkeypatch) -> None:
    looks: list[tuple[float, bool]] = []

    def remember(watchdog: Watchdog, seconds: float) -> None:
        looks.append((watchdog._judge.patience, watchdog.ends))

    monkeypatch.setattr("fedmpi.process.watchdog.SECONDS_BETWEEN_LOOKS", 0.001)
    monkeypatch.setattr(Watchdog, "_look", remember)
    for mode, patience in (("off", 9.0), ("warn", 5.0), ("end", 7.0)):
        with watched(Cluster(None, "none"), Config(preset="fedavg", cluster={"watchdog": mode, "patience": patience})):
            running = [thread for thread in threading.enumerate() if thread.name == "fedmpi-watchdog"]
            assert bool(running) == (mode != "off")
            while mode != "off" and (patience, mode == "end") not in looks:
                time.sleep(0.001)
        assert not any(thread.is_alive() for thread in running)
    assert set(looks) == {(5.0, False), (7.0, True)}


@pytest.mark.parametrize("mode", ["off", "warn"])
def test_a_second_run_of_a_process_begins_in_no_round(mode: str) -> None:
    activity.enter("end", 5)
    activity.work_on(7, beside=2)
    with watched(Cluster(None, "none"), Config(preset="fedavg", cluster={"watchdog": mode})):
        assert (activity.phase, activity.round, activity.first) == (PHASES.index("start"), -1, -1)
        assert (activity.client, activity.beside) == (-1, 0)


@pytest.fixture
def watchdog(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watchdog]:
    """That of a process by itself; it looks when the test says so."""
    monkeypatch.setattr("fedmpi.process.watchdog.SECONDS_BETWEEN_LOOKS", 1e6)
    activity.begin()
    made = Watchdog(Cluster(None, "none"), patience=1.0, ends=False)
    yield made
    made.close()
    activity.begin()


def test_a_process_whose_client_never_ends_says_so_and_where_it_is(
    watchdog: Watchdog, caplog: pytest.LogCaptureFixture
) -> None:
    activity.enter("work", 3)
    activity.work_on(7)
    for _ in range(ALONE_TIMES):
        assert not caplog.messages
        watchdog._look(1.0)
    for thread in threading.enumerate():
        if thread.name == "fedmpi-pointing":
            thread.join()
    own = watchdog.processes[0]
    late, here = sorted(caplog.messages)
    assert late.startswith("nothing has been finished for 4 s in the work of round 3 (training client 7 for 4 s)")
    assert here.startswith(f"rank 0 on {own.host} is at {__file__}:") and here.endswith("(training client 7 for 4 s)")


def test_what_is_known_of_the_process_is_said_on_its_own_host_only(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Process, "seen", property(lambda process: "T" if process.pid == 5 else ""))  # of another here
    watchdog.size = 3
    watchdog.processes += [Process("node7", 5, 1), Process(watchdog.processes[0].host, 2**22 + 1, 1)]
    watchdog._visible.add(2)
    before = at(7, "work", client=10)
    finding = Finding(66.0, {1: (before, 64.0), 2: (before, 64.0)}, over=False)
    assert watchdog.words(finding, at(7, "sum", waiting=True)) == (
        f"waiting 66 s for rank 1 on node7, rank 2 on {watchdog.processes[0].host} in the sum of round 7 (no sign of "
        "life for 64 s, it was training client 10 then; no sign of life for 64 s, its process is gone, it was training "
        "client 10 then)"
    )


def test_a_process_that_is_stopped_alone_is_reported_within_seconds_and_again_when_it_is_stopped_again(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    letter = "S"
    monkeypatch.setattr(Process, "seen", property(lambda process: letter))
    watchdog.size = 2
    watchdog.processes += [Process(watchdog.processes[0].host, 5, 1)]
    watchdog._visible.add(1)
    watchdog._stopped = {1: 0.0}
    watchdog._judge._states[1] = at(7, "work", client=10)
    ended: list[str] = []
    monkeypatch.setattr("fedmpi.process.watchdog.end_now", lambda code, words: ended.append(words))

    def reports_after(looks: int) -> list[str]:
        caplog.clear()
        for _ in range(looks):
            watchdog._mind_the_stopped(1.0, at(7, "sum", waiting=True))
        return caplog.messages

    assert not reports_after(9)
    letter = "t"  # a debugger's
    assert not reports_after(9)
    letter = "T"
    assert not reports_after(int(SECONDS_STOPPED) - 1)
    (said,) = reports_after(20)
    assert said == (
        f"waiting 5 s for rank 1 on {watchdog.processes[0].host} in the sum of round 7 (no sign of life for 5 s, its "
        "process is stopped, it was training client 10 then)"
    )
    letter = "R"
    reports_after(1)
    letter, watchdog.ends = "T", True
    assert not reports_after(int(SECONDS_STOPPED) - 1) and not ended
    reports_after(1)
    assert ended == [f"{said}: the job is ended, --resume goes on from the last checkpoint"]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_of_the_ranks_of_a_host_that_run_the_lowest_tells_of_all_that_are_stopped(
    watchdog: Watchdog, rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here ranks 0, 1 and 2; rank 3 is on another host."""
    letters = dict.fromkeys(range(4), "S")
    monkeypatch.setattr(Process, "seen", property(lambda process: letters[process.pid]))
    host = watchdog.processes[0].host
    watchdog.rank, watchdog.size = rank, 4
    watchdog.processes = [Process(host, number, 1) for number in range(3)] + [Process("node7", 3, 1)]
    watchdog._visible = {0, 1, 2}
    watchdog._stopped = dict.fromkeys({0, 1, 2} - {rank}, 0.0)
    for state in ("TSS", "STS", "SST", "STT", "TST", "TTS", "tST", "RTD", "?ST"):
        letters.update(enumerate(state))
        if letters[rank] in "Tt":
            continue
        running = [number for number in range(3) if letters[number] not in "Tt"]
        stopped = [f"rank {number} on {host}" for number in range(3) if letters[number] == "T"]
        caplog.clear()
        for _ in range(9):
            watchdog._mind_the_stopped(1.0, at(7, "sum", waiting=True))
        messages = [words.partition(" in the sum")[0] for words in caplog.messages]
        assert messages == [f"waiting 5 s for {', '.join(stopped)}"] * (rank == running[0])
        letters.update(dict.fromkeys(range(4), "S"))
        watchdog._mind_the_stopped(1.0, at(7, "sum", waiting=True))


def test_a_job_that_was_suspended_as_a_whole_counts_that_as_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    clock = iter([0.0, 1.0, 5000.0, 5001.0])

    def look(watchdog: Watchdog, seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            watchdog._closing.set()

    with monkeypatch.context() as patched:
        patched.setattr("fedmpi.process.watchdog.SECONDS_BETWEEN_LOOKS", 1e6)
        made = Watchdog(Cluster(None, "none"), patience=1.0, ends=False)
        made.close()
        made._closing.clear()
        patched.setattr("fedmpi.process.watchdog.SECONDS_BETWEEN_LOOKS", 0.0)
        patched.setattr("fedmpi.process.watchdog.time", SimpleNamespace(monotonic=lambda: next(clock)))
        patched.setattr(Watchdog, "_look", look)
        made._watch()
    assert looks == [1.0, LONGEST_LOOK, 1.0]


def test_a_process_that_cannot_be_looked_at_is_not_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process.of(os.getppid())
    for error, seen in ((errno.EMFILE, True), (errno.ENOENT, False), (errno.ESRCH, False)):
        with monkeypatch.context() as patched:
            patched.setattr("builtins.open", lambda *_, error=error, **__: (_ for _ in ()).throw(OSError(error, "no")))
            assert bool(process.seen) == seen
    assert process.seen


@pytest.mark.parametrize("engine", ["sequential", "batched", "merged"])
def test_a_rank_goes_on_with_every_step_of_training_and_every_batch_of_an_evaluation(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    monkeypatch.setattr(Activity, "go_on", lambda self: steps.append(PHASES[self.phase]))
    one = {"local.steps": 1} if engine == "merged" else {"local.epochs": 2}
    own = {"rounds": 1, "local.engine": engine, "evaluation.batch_size": 100, "participation.count": 2}
    outcome = fedmpi.run("fedavg", {**own, **one})
    assert steps.count("evaluation") == 4  # 355 samples
    assert steps.count("work") == 1 if engine == "merged" else steps.count("work") > 4
    assert outcome.ending == "finished"
