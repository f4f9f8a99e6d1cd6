"""`fedmpi.sweep`, and what a sweep shows: the plan, a line per run, what is running, and a table at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.live import Live
from rich.text import Text

from fedmpi.api import Run, load_run
from fedmpi.common.errors import MissingFiles, RunFailure, UserError
from fedmpi.common.terminal import console, on_terminal, paragraph, readable_duration, show_table
from fedmpi.sweeps.plan import PlannedRun, Sweep, labels_text, plan_sweep
from fedmpi.sweeps.run import Outcome, Standing, Started, recorded, refuse_mixed_sources, run_sweep

SCORES = (
    ("test_accuracy", "test accuracy"),
    ("val_accuracy", "validation accuracy"),
    ("test_loss", "test loss"),
    ("val_loss", "validation loss"),
)


def show_plan(
    sweep: Sweep, runs: Sequence[PlannedRun], standings: Sequence[Standing], missing: Sequence[MissingFiles]
) -> None:
    """The table of --dry-run: index, what differs, folder and state of each run, the shards, and missing files."""
    ranks = f", {sweep.ranks} ranks each" if sweep.ranks > 1 else ""
    rows = [
        [str(run.index), run.name, labels_text(run.labels), _state(run, standing)]
        for run, standing in zip(runs, standings, strict=True)
    ]
    title = f"{sweep.origin}: {len(runs)} runs{ranks}, folders in {sweep.out}"
    show_table(console(), ["#", "folder", "what differs", "state"], rows, title, left=4)
    for data in {run.data.folder: run.data for run in runs if run.data is not None}.values():
        state = "prepared" if data.ready() else "to be prepared"
        print(paragraph(f"{state}: fedmpi prepare {' '.join(data.command)}", "shards  ", "    "))
    for sentence in dict.fromkeys(map(str, missing)):
        print(paragraph(sentence, "missing ", "    "))


def _state(run: PlannedRun, standing: Standing) -> str:
    if standing.state == "begun":
        return f"continues at round {standing.rounds} of {run.config.rounds}"
    if standing.state == "busy":
        return f"in use by {standing.owner}"
    return standing.state


class SweepDisplay:
    """Lines about runs, and on a terminal one at the bottom about those at work."""

    def __init__(self, runs: int):
        self._runs = runs
        self._done = 0
        self._console = console()
        self._live = Live(console=self._console, refresh_per_second=4) if on_terminal() else None

    def __enter__(self) -> SweepDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(Text(""))
            self._live.stop()

    def show_line(self, text: str) -> None:
        """A line."""
        self._console.print(Text(paragraph(text)), soft_wrap=True)

    def done(self, outcome: Outcome) -> None:
        """A line about a run that came to its end now."""
        self._done += 1
        if outcome.ending == "finished" and not outcome.seconds:
            return
        self.show_line(f"{self._done}/{self._runs} {outcome.run.name}: {_ending_text(outcome)}")

    def working(self, started: Sequence[Started]) -> None:
        """The line at the bottom."""
        if self._live is None:
            return
        at_work = [f"{one.run.name} {recorded(one.run.folder)}/{one.run.rounds}" for one in started]
        line = Text(f"{self._done}/{self._runs} done; at work: {'; '.join(at_work) or 'none'}", no_wrap=True)
        line.truncate(self._console.width, overflow="ellipsis")
        self._live.update(line)

    def table(self, sweep: Sweep, outcomes: Sequence[Outcome]) -> None:
        """The end: every run, and the failed ones by name."""
        rows = [
            [
                one.run.name,
                one.ending,
                f"{one.standing.rounds}/{one.run.rounds}",
                _score(one) or "-",
                readable_duration(one.seconds) if one.seconds else "before" if one.ending == "finished" else "-",
            ]
            for one in outcomes
        ]
        counts = [
            f"{count} {ending}"
            for ending in ("finished", "failed", "stopped")
            if (count := sum(one.ending == ending for one in outcomes))
        ]
        show_table(self._console, ["run", "state", "rounds", "score", "time"], rows, caption=", ".join(counts), left=2)
        for one in outcomes:
            if one.ending == "failed":
                print(paragraph(f"{one.run.name}: {one.why} (see {one.run.folder})", "failed  ", "    "))
        finished = sum(one.ending == "finished" for one in outcomes)
        if finished > 1:
            print(paragraph(f"results in {sweep.out}: fedmpi compare {sweep.out}"))


def _ending_text(outcome: Outcome) -> str:
    if outcome.ending == "failed":
        return f"failed: {outcome.why}"
    rounds = f"{outcome.standing.rounds} of {outcome.run.rounds} rounds"
    if outcome.ending == "stopped":
        return f"stopped, {rounds} done"
    score = _score(outcome, named=True)
    return f"finished in {readable_duration(outcome.seconds)}{f', {score}' if score else ''}"


def _score(outcome: Outcome, named: bool = False) -> str:
    final = (outcome.standing.summary or {}).get("final", {})
    for key, name in SCORES:
        if final.get(key) is not None:
            return f"{name} {final[key]:.4f}" if named else f"{final[key]:.4f}"
    return ""


def sweep(
    given: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    jobs: int = 1,
    ranks: int | None = None,
    progress: bool = False,
    stop: Callable[[], bool] | None = None,
    mix_sources: bool = False,
) -> list[Run]:
    """Bring all runs of a sweep to their end, each in a separate process; finished ones are only read.

    Parameters
    ----------
    given : str, Path or mapping
        The file of `fedmpi sweep`, or its tables: {"rounds": 20, "sweep": {"preset": ["fedavg", "fedprox"]}}.
    out : str or Path, optional
        The folder of the runs' folders.
    jobs : int
        Runs at the same time.
    ranks : int, optional
        Ranks of every run, instead of those that the file asks for.
    progress : bool
        Show one line per run.
    stop : callable, optional
        Called all the time; true has the runs save and stop.
    mix_sources : bool
        Whether to start runs although others in the folder ran with another source of the same component.

    Returns
    -------
    list of Run
        In the order of `fedmpi sweep --dry-run`, read from their folders.

    Raises
    ------
    UserError
        Wrong input, before anything is started.
    RunFailure
        Runs failed; they are named, and all others have come to their end.
    """
    if jobs < 1:
        raise UserError(f"jobs = {jobs}: give 1 or more")
    planned = plan_sweep(given, None if out is None else Path(out), ranks=ranks)
    refuse_mixed_sources(planned, planned.runs, lambda words: mix_sources)
    ask = stop or (lambda: False)
    if progress:
        with SweepDisplay(len(planned.runs)) as shown:
            outcomes = run_sweep(planned, planned.runs, jobs, ask, shown.show_line, shown.done, shown.working)
        shown.table(planned, outcomes)
    else:
        outcomes = run_sweep(planned, planned.runs, jobs, ask)
    failed = [f"{one.run.name} ({one.why})" for one in outcomes if one.ending == "failed"]
    if failed:
        raise RunFailure(f"{len(failed)} of {len(outcomes)} runs failed: {'; '.join(failed)}")
    return [load_run(one.run.folder) for one in outcomes if (one.run.folder / "config.toml").exists()]
