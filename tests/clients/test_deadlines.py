"""Deadlines, intervals of availability and energy: runs against a plain loop.

Ranks and resumptions: tests/reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi import UserError
from fedmpi.clients.availability import FOREVER, Intervals
from fedmpi.clients.devices import steps_in
from fedmpi.clients.sampler import View
from fedmpi.clients.turnout import CohortDraw
from fedmpi.common.streams import Streams
from fedmpi.config import load_config
from fedmpi.config.loading import given_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.placement import planned_cost
from fedmpi.local.work import LocalRule, schedule, step_count
from fedmpi.records.history import clients_as_text
from tests.end_to_end.in_process import QUIET, run
from tests.reference.plain_data import AVAILABILITY, Network, Population, stream
from tests.reference.plain_draws import draw_cohort
from tests.reference.plain_loop import batches, train

N, PERIOD = 9, 60.0
PARTIAL = ["devices.deadline=6.5", "devices.late=partial"]
CASES = {
    "lost": ["devices.deadline=6.5", "local.epochs=2"],
    "partial epochs": [*PARTIAL, "local.epochs=2", "local.drop_last=true"],
    "partial steps": [*PARTIAL, "local.steps=40", "clients.failure_rate=0.2"],
    "over-selection": ["devices.deadline=6.5", "clients.count=1", "clients.over_selection=5"],
    "no deadline": ["local.epochs=2"],
}


def tables(folder: Path) -> list[str]:
    """Write the devices and intervals of nine clients; return the settings that read them."""
    draws = np.random.Generator(np.random.Philox(3))
    rates = {"speed": 30 * np.exp(draws.standard_normal(N)), "down": 4e3 + 1e3 * np.arange(N), "up": np.full(N, 2500.0)}
    rates["up"][4] = 380
    np.savez(folder / "devices.npz", **rates, watts=1 + np.arange(N) / 4)
    rows = [(k, s, s + draws.uniform(4, 26)) for k in range(N) for s in np.arange(0, 30.0, 30) + draws.uniform(0, 9)]
    rows += [(k, 40 + k, PERIOD) for k in range(0, N, 2)] + [(8, 0.0, rows[8][1])]
    pandas.DataFrame(rows, columns=["client", "start", "end"]).to_csv(folder / "intervals.csv", index=False)
    keys = {"speed": "speed", "download": "down", "upload": "up", "power.training": "watts"}
    found = [f"devices.{key}={{name='table',file='devices.npz',column='{name}'}}" for key, name in keys.items()]
    return [*found, f"clients.availability={{name='intervals',file='intervals.csv',period={PERIOD}}}"]


def settings_of(name: str, folder: Path) -> list[str]:
    """Return the settings of a case."""
    few = ["data.source=digits:clients=9,alpha=0.6", "model.hidden=[8]", "model.activation=tanh", "rounds=9", "seed=4"]
    return [*few, "clients.count=5", "local.batch_size=8", *QUIET, *tables(folder), *CASES[name]]


class Plain:
    """A run of FedAvg in float64, one client and one step after the other."""

    def __init__(self, given: list[str]):
        self.config = config = load_config(None, given)
        self.population = Population(config)
        self.network = Network(config, self.population.description)
        self.w, self.clock = self.network.initial, 0.0
        self.table = np.load("devices.npz")
        self.intervals = pandas.read_csv("intervals.csv").to_numpy().tolist()
        self.bytes, self.joules = np.zeros(N, np.int64), np.zeros(N)

    def leaves(self, k: int) -> float | None:
        """Return the seconds after which an available client leaves; None if it is away."""
        own = [(a + c * PERIOD, b + c * PERIOD) for i, a, b in self.intervals if i == k for c in range(40)]
        end = next((b for a, b in own if a <= self.clock < b), None)
        while following := [b for a, b in own if a == end]:
            end = following[0]
        return None if end is None else end - self.clock

    def round(self, t: int) -> dict[str, Any]:
        """Run one round; return its record."""
        config, deadline = self.config, self.config.devices.deadline or np.inf
        there = [k for k in range(N) if self.leaves(k) is not None]
        drawn = draw_cohort(config, t, there, self.population.sizes, None).clients
        dropped = dropping(config, t, drawn)
        wanted, arrivals, ends, plans = config.clients.count, {}, {}, {}
        facts = {"late": 0, "partial": 0, "departed": 0}
        size = 4 * len(self.w)
        for k in drawn:
            steps = batches(config, t, k, int(self.population.sizes[k]))
            down, up, speed = size / self.table["down"][k], size / self.table["up"][k], self.table["speed"][k]
            done = list(steps)
            if config.devices.late == "partial" and down + up + sum(map(len, steps)) / speed > deadline:
                done = []
                while down + up + (sum(map(len, done)) + len(steps[len(done)])) / speed <= deadline:
                    done.append(steps[len(done)])
                facts["partial"] += bool(done) and k not in dropped
                done = done or list(steps)
            seconds, stays = down + up + sum(map(len, done)) / speed, self.leaves(k)
            parts = down, sum(map(len, done)) / speed, up
            if k in dropped:
                ends[k] = min(down + parts[1], stays, deadline), parts
            elif seconds > min(stays, deadline):
                facts["late" if deadline <= stays else "departed"] += 1
                ends[k] = min(stays, deadline), parts
            else:
                arrivals[k], plans[k], ends[k] = seconds, done, (seconds, parts)
        used = sorted(sorted(arrivals, key=arrivals.__getitem__)[:wanted])
        length = max((arrivals[k] for k in used), default=0.0)
        if len(arrivals) > wanted or (config.clients.over_selection > 1 and len(arrivals) == wanted):
            ends = {k: (min(end, length), parts) for k, (end, parts) in ends.items()}
        elif facts["late"]:
            length = deadline
        if not drawn:
            starts = [(a - self.clock) % PERIOD for _, a, _ in self.intervals]
            length = min(starts)
        elif not used and not facts["late"]:
            length = max((ends[k][0] for k in drawn if k not in dropped), default=0.0)
        total, divisor = np.zeros_like(self.w), 0.0
        for k in used:
            x, y = self.population.rows(k, None)
            n = int(self.population.sizes[k])
            total = total + n * train(config, t, k, self.w, x, y, plans[k], self.network).change
            divisor += n
        self.w = self.w + total / divisor if used else self.w
        each = {"bytes": list[int](), "joules": list[float]()}
        for k, (end, (down, work, up)) in ends.items():
            watts = self.table["watts"][k]
            energy = min(end, down) + watts * min(max(end - down, 0), work) + min(max(end - down - work, 0), up)
            each["joules"].append(energy)
            each["bytes"].append(size * (1 + (k in used)))
            self.joules[k] += energy
            self.bytes[k] += each["bytes"][-1]
        self.clock += length
        counts = {"asked": len(drawn), "participants": len(used), "available": len(there)}
        counts |= {"invited": clients_as_text(np.array(drawn)), **{f"invited_{name}": each[name] for name in each}}
        steps = sum(len(plans[k]) for k in used)
        return counts | facts | {"virtual_seconds": length, "joules": sum(each["joules"]), "steps": steps}


def dropping(config: Any, t: int, drawn: list[int]) -> list[int]:
    """Return the clients that drop out after training."""
    chance = stream(config.seed, AVAILABILITY, t, 1).random(N)
    return [k for k in drawn if chance[k] < config.clients.failure_rate]


@pytest.mark.parametrize("name", CASES)
def test_rounds_with_deadlines_and_intervals_are_those_of_a_plain_loop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [*settings_of(name, tmp_path), "evaluation.clients=all", "logging.participants=true"]
    plain = Plain(given)
    expected = [plain.round(t) for t in range(9)]
    assert sum(one["departed"] for one in expected) and (name == "no deadline" or sum(o["late"] for o in expected))
    assert ("partial" not in name) or sum(one["partial"] for one in expected) > 3
    for engine in ("sequential", "auto"):
        done = run(*given, f"local.engine={engine}")
        for record, one in zip(done.records, expected, strict=True):
            for key, value in one.items():
                absent = key in ("late", "partial") and key not in record
                value = value if key == "invited" else pytest.approx(value, rel=1e-9)
                assert (0 if absent else record[key]) == value, (key, record["round"])
            assert record["virtual_seconds"] <= 6.5 or name == "no deadline" or not record["available"]
        found, start = done.model.double().numpy(), done.start.double().numpy()
        assert np.linalg.norm(found - plain.w) < 1e-5 * np.linalg.norm(plain.w - start)
        columns = done.experiment.decisions.planner.accounts.of_clients(np.arange(N))
        np.testing.assert_array_equal(columns["bytes"], plain.bytes)
        np.testing.assert_allclose(columns["joules"], plain.joules)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 11), st.integers(1, 12)), min_size=1, max_size=12),
    st.sampled_from([12.0, None]),
    st.floats(0, 100),
)
@settings(deadline=None, max_examples=150)
def test_intervals_are_those_of_a_plain_search(rows: list, period: float | None, clock: float) -> None:
    kept: list[tuple[int, int, int]] = []
    for k, start, end in rows:
        if start < end and all(k != c or end <= a or b <= start for c, a, b in kept):
            kept.append((k, start, end))
    if not kept:
        return
    table = Intervals(file="unread.csv", period=period)
    columns = {
        name: np.array(values, float)
        for name, values in zip(("client", "start", "end"), zip(*kept, strict=True), strict=True)
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedmpi.clients.availability.read_columns", lambda *about: columns)
        view = View(0, 4, np.ones(4, np.int64), 4, Streams(1), clock=clock)
        here, until = table(view), table.until(view)
    cycles = range(0, 12 if period else 1)
    absolute = [(k, a + c * (period or 0), b + c * (period or 0)) for k, a, b in kept for c in cycles]
    for k in range(4):
        own = sorted((a, b) for c, a, b in absolute if c == k)
        inside = [b for a, b in own if a <= clock < b]
        assert bool(here[k]) == bool(inside)
        change = inside[0] if inside else min((a for a, _ in own if a > clock), default=FOREVER)
        while inside and any(a == change for a, _ in own):
            change = next(b for a, b in own if a == change)
        change = FOREVER if inside and period and change >= 12 * period else change
        assert until[k] == pytest.approx(change - clock, abs=1e-9)


@pytest.mark.parametrize(
    ("rows", "more", "words"),
    [
        ([(0, 0, 5), (0, 4, 9)], "", "intervals of client 0 that overlap"),
        ([(0, 5, 5)], "", "start < end ≤ period, with one period per client. Row 0 differs"),
        ([(1, 0, 5), (1, 8, 99)], ",period=60", "Row 1 differs"),
        ([(9, 0, 5)], "", "column 'client' of .* holds 9. The 9 clients are 0 to 8"),
        ([(0, np.nan, 5)], "", "Row 0 differs"),
        ([], "", "It has no rows"),
    ],
    ids=str,
)
def test_intervals_that_do_not_fit_are_rejected_before_the_start(
    rows: list, more: str, words: str, tmp_path: Path
) -> None:
    pandas.DataFrame(rows, columns=["client", "start", "end"], dtype=float).to_csv(tmp_path / "a.csv", index=False)
    given = [f"clients.availability={{name='intervals',file='{tmp_path}/a.csv'{more}}}", "devices=true"]
    with pytest.raises(UserError, match=words):
        run("data.source=digits:clients=9", "clients.count=5", *given)


def test_a_shorter_epoch_is_the_beginning_of_the_whole_one() -> None:
    for drop_last in (False, True):
        whole = LocalRule(epochs=3, batch_size=8, drop_last=drop_last)
        draws = [np.random.Generator(np.random.Philox(5)) for _ in range(40)]
        full = schedule(whole, 45, draws.pop())
        for steps in range(1, len(full) + 3):
            cut = LocalRule(epochs=3, steps=steps, batch_size=8, drop_last=drop_last)
            found = schedule(cut, 45, draws.pop())
            assert len(found) == step_count(cut, 45) == min(steps, len(full))
            assert all(np.array_equal(a, b) for a, b in zip(found, full, strict=False))
    costs = planned_cost(whole, np.array([45, 45]), False, np.array([0, 2]))
    assert costs[0] == planned_cost(whole, np.array([45]), False)[0] > costs[1]


def test_as_many_steps_fit_as_a_plain_loop_finds() -> None:
    draws = np.random.Generator(np.random.Philox(2))
    for _ in range(300):
        n, b, room = int(draws.integers(1, 50)), int(draws.integers(1, 20)), float(draws.integers(0, 90))
        batch, steps, passed, at = min(b, n), 0, 0, 0
        while True:
            size = min(batch, n - at)
            if passed + size > room:
                break
            passed, steps, at = passed + size, steps + 1, (at + size) % n
        found = steps_in(*(np.array([v], float) for v in (room, n, batch, n)))
        assert (int(found[0][0]), found[1][0]) == (steps, passed)
    found = steps_in(*(np.array([v]) for v in (4.35 * 100, 60.0, 5.0)), None)  # 435 samples, less a rounding error
    assert (found[0][0], found[1][0]) == (87, 435)


def test_each_round_begins_after_the_end_of_an_interval_however_times_are_rounded(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("client,start,end\n0,0.1,0.2\n")
    few = ["data.source=digits:clients=9", "rounds=40", "clients.count=1", "devices.speed.median=1", *QUIET]
    there = f"clients.availability={{name='intervals',file='{tmp_path}/a.csv'"
    done = run(*few, f"{there},period=0.3}}")
    assert [record["available"] for record in done.records] == [0, 1] * 20
    done = run(*few, f"{there}}}")
    assert [record["available"] for record in done.records] == [0, 1] + [0] * 38
    assert [record["virtual_seconds"] for record in done.records] == pytest.approx([0.1, 0.1] + [0] * 38)


def test_partial_work_fits_the_samples_that_a_sampler_sets_but_not_its_steps() -> None:
    dealt = ["data.source=digits:clients=9", "clients.sampler=tests.core.own_work:dealt", "clients.count=6"]
    with pytest.raises(UserError, match=r'sets steps in its Cohort\. Set devices\.late = "lost"'):
        run(*dealt, "clients.sampler.names=steps", *PARTIAL)
    work = ["clients.sampler.names=budget", "local.steps=40", "local.batch_size=8", "devices.speed.median=10"]
    experiment = Experiment.connect(load_config(None, [*dealt, *work, *PARTIAL, *QUIET]))
    planner = experiment.decisions.planner
    plan, cohorts = planner.plan(0), planner.cohorts
    seconds = 6.5 - cohorts.bytes_down / 4e6 - cohorts.bytes_up / 1e6
    assert 3 in plan.budgets and plan.steps.tolist() == (10 * seconds // np.minimum(8, plan.budgets)).tolist()
    experiment.close()


def test_steps_that_end_at_the_deadline_fit_however_times_are_rounded() -> None:
    work = {"clients.count": 3, "local.steps": 40, "local.batch_size": 8, "devices.speed.median": 13.0}
    work |= {"devices.download.median": 9.0, "devices.upload.median": 41.0}
    for steps in range(1, 40):
        deadline = (40 / 9 + 40 / 41) + steps * 8 / 13
        config = given_config("fedavg", work | {"devices.deadline": deadline, "devices.late": "partial"})
        found = CohortDraw(config, np.full(5, 50), None, Streams(1), values=10).draw(0, None)
        assert found.cohort.steps is not None and found.cohort.steps.tolist() == [steps] * 3
