"""The real program, run with a folder and watched: what every round planned, drew and recorded, and the model after it.

mpiexec -n N python tests/reference/program.py OUT.npz FOLDER HOW CONFIG.toml [CONFIG.toml ...]

runs every configuration "whole", "cut" in two after its first round, the "first" part of it alone, or the "rest".
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi import Config, UserError
from fedmpi.common.plan import Plan
from fedmpi.config import config_toml, load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.mpi import read_launch
from fedmpi.process.exit_codes import run_guarded
from fedmpi.records.recorder import open_recorder
from fedmpi.records.tables import TABLES, read_table
from tests.mpi.launch import run_mpi
from tests.quick_end import end_quickly

Trace = dict[str, np.ndarray]
FIRST, REST, WHOLE = (False, True), (True, False), (False, False)
PARTS = {"whole": [WHOLE], "cut": [FIRST, REST], "first": [FIRST], "rest": [REST]}
"""Parts of a run: whether each resumes the run in its folder, and whether it stops after its first round."""


def traced(config: Config, folder: Path, how: str = "whole") -> Trace | None:
    """A run of `config` into `folder`; None on ranks other than 0."""
    parts = [part for resume, stops in PARTS[how] if (part := _part(config, folder, resume, stops))]
    if not parts:
        return None
    found = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    tables = {name: {key: column.tolist() for key, column in read_table(folder, name).items()} for name in TABLES}
    return found | {"records": np.array((folder / "metrics.jsonl").read_text()), "tables": np.array(str(tables))}


def _part(config: Config, folder: Path, resume: bool, stops: bool) -> Trace | None:
    experiment = Experiment.connect(config)
    cohorts, groups, normalized, models = [], [], [], []
    rows, factors = [], []
    trainer, train = experiment.trainer, experiment.trainer.train

    def watched(plan: Plan, *others: Any, trial: bool = False) -> Any:
        done = train(plan, *others, trial=trial)
        if trial:
            return done
        cohorts.append(np.concatenate([[-1 - plan.round], plan.clients]))
        groups.append(np.concatenate([[-1 - plan.round], plan.mediators]))
        normalized.append(plan.normalize)
        for task in trainer.worker.tasks(plan, trainer.worker.members(plan)):
            own = np.arange(experiment.data.sizes[task.client]) if task.rows is None else task.rows
            rows.extend((plan.round, task.client, int(row)) for row in own)
            factors.append((plan.round, task.client, task.coefficient))
        return done

    trainer.train = watched  # type: ignore[method-assign]
    recorder = open_recorder(
        experiment.cluster, folder, config, resume, experiment.model.module, experiment.data_facts.digest
    )
    simulation = Simulation(experiment, recorder, stop=lambda: stops)
    apply = simulation._apply

    def applied(*round: Any) -> None:
        apply(*round)
        models.append(simulation.model.cpu().numpy().copy())

    simulation._apply = applied  # type: ignore[method-assign]
    assert simulation.run() == ("stopped" if stops else "finished")
    gathered = [experiment.cluster.gather(np.array(own, np.float64).reshape(-1, 3)) for own in (rows, factors)]
    found = None
    if (all_rows := gathered[0]) is not None and (all_factors := gathered[1]) is not None:
        found = {
            "cohorts": np.concatenate(cohorts),
            "groups": np.concatenate(groups),
            "rows": np.concatenate([part.reshape(-1, 3) for part in all_rows]).astype(np.int64),
            "factors": np.concatenate([part.reshape(-1, 3) for part in all_factors]),
            "shares": np.array([len(part.reshape(-1, 3)) for part in all_rows])[None],
            "normalized": np.array(normalized),
            "models": np.array(models),
            "window": np.array([simulation.summary["mpi_bytes"]["window"]]),
        }
    if recorder is not None:
        recorder.close()
    experiment.close()
    return found


def on_ranks(
    ranks: int, configs: dict[str, Config], folder: Path, how: str = "cut", program: tuple[str, ...] = (__file__,)
) -> dict[str, Trace]:
    """Trace every configuration in one job of so many ranks."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{number}.toml" for number in range(len(configs))]
    for path, config in zip(paths, configs.values(), strict=True):
        path.write_text(config_toml(config))
    result = run_mpi(ranks, [*program, folder / "out.npz", folder, how, *paths], timeout=800)
    assert result.returncode == 0, result.stderr
    held: dict[str, Trace] = {name: {} for name in configs}
    names = list(configs)
    for key, value in np.load(folder / "out.npz").items():
        number, _, part = key.partition("/")
        held[names[int(number)]][part] = value
    return held


def records_of(trace: Trace) -> list[dict[str, Any]]:
    """The records without what the number of ranks or the machine changes."""
    read = [json.loads(line) for line in str(trace["records"]).splitlines()]
    timed = ("seconds", "phase_seconds", "busy_seconds", "idle_seconds", "hops")
    return [{key: value for key, value in record.items() if key not in timed} for record in read]


def main() -> int:
    logging.getLogger("fedmpi").setLevel(logging.ERROR)
    out, folder, how = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    traces: Trace = {}
    for path in map(Path, sys.argv[4:]):
        try:
            found = traced(load_config(path), folder / path.stem, how)
        except UserError as refusal:
            found = {"refusal": np.array(str(refusal))}
        traces |= {f"{path.stem}/{key}": value for key, value in (found or {}).items()}
    launch = read_launch()
    if launch is None or launch.rank == 0:
        np.savez(out, **traces)
    return 0


if __name__ == "__main__":
    end_quickly()
    run_guarded(main)
