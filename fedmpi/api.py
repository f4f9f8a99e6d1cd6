"""Python interface of fedmpi: `run`, its result `Run`, and runs loaded from their folders.

    import fedmpi

    run = fedmpi.run("fedavg", {"rounds": 20, "local.lr": 0.05}, data="digits")
    run.summary["final"]["test_accuracy"]

The command line adds printing, signals and exit codes to this function.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedmpi.common.arithmetic import process_as_before
from fedmpi.common.errors import UserError
from fedmpi.common.files import named_folder
from fedmpi.common.terminal import paragraph
from fedmpi.config import Config, load_config
from fedmpi.config.loading import given_config, read_toml
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Ending, Simulation
from fedmpi.core.records import OnRound, log_setup, opening_lines
from fedmpi.data.arrays import ClientArrays
from fedmpi.data.opening import of_datasets
from fedmpi.data.schema import DataDescription
from fedmpi.models import build
from fedmpi.mpi import Cluster
from fedmpi.process.exit_codes import ending_together, stall_timeout
from fedmpi.process.malloc import freed_memory_kept
from fedmpi.process.signals import delayed_interrupt
from fedmpi.records.checkpoint import load_model
from fedmpi.records.history import Record, ending_of, read_records, read_summary
from fedmpi.records.progress import shown_warnings
from fedmpi.records.provenance import refuse_other_shards, sources_of
from fedmpi.records.recorder import open_recorder
from fedmpi.records.tables import CLIENTS, EVENTS, Columns, concatenated, read_table

_one_at_a_time = threading.RLock()
"""Lock for torch's threads and generators, which belong to the process: runs of several threads wait for each other."""


class Run:
    """Result of a run.

    Attributes
    ----------
    summary : dict
        Final and best scores, seconds, bytes, versions; as in RUN/summary.json. Identical on every rank.
    folder : Path or None
        RUN; None if nothing was written.
    ending : {"finished", "ended", "stopped"}
        All rounds done; ended earlier by `on_round` or `evaluation.patience`; or stopped on request, with a checkpoint
        in the folder to resume from.
    """

    def __init__(self, summary: Record, *, folder: Path | None = None, ending: Ending = "finished", **known: Any):
        self.summary = summary
        self.folder = folder
        self.ending = ending
        self.__dict__.update(known)  # values of the properties below that are not read from the folder

    @property
    def finished(self) -> bool:
        """Check whether the run has ended, after all rounds or earlier."""
        return self.ending != "stopped"

    @cached_property
    def config(self) -> Config:
        """Return the complete configuration of the run, with the current path of its shards."""
        with sources_of(self._path("config.toml")):
            return load_config(self._path("config.toml"))

    @cached_property
    def records(self) -> list[Record]:
        """Return one record per round, as in RUN/metrics.jsonl.

        With a folder, they are read from there at the first access. Under MPI the list is complete on rank 0 and
        empty on the others.
        """
        rounds = self.summary["final"]["round"] + 1 if "round" in self.summary.get("final", {}) else None
        records = read_records(self._path(), rounds)
        if rounds is not None and len(records) < rounds:
            raise UserError(
                f"{self._path('metrics.jsonl')} holds {len(records)} of the {rounds} records that the run has written. "
                "Put the file back"
            )
        return records

    @cached_property
    def model(self) -> nn.Module:
        """Return the network with the final weights, in evaluation mode, on the CPU. It is identical on every rank."""
        return _rebuilt(self._path(), self.summary)

    @cached_property
    def best_model(self) -> nn.Module:
        """Return the network of the best round (`best_round` of the summary); otherwise like `model`."""
        if self.summary and self.summary["best_round"] is None:
            raise UserError("no round of this run has a score, so none is the best")
        return _rebuilt(self._path(), self.summary, "model-best.safetensors")

    @cached_property
    def clients(self) -> Columns:
        """Return per-client evaluations (`evaluation.clients`): columns by name, one row per client and evaluation.

        They are as in RUN/clients.parquet, and empty if clients were not evaluated.

        Under MPI the columns are complete on rank 0 and empty on the others.
        """
        return read_table(self._path(), CLIENTS)

    @cached_property
    def events(self) -> Columns:
        """Return the events of an asynchronous run: columns by name, one row per event, in the order of time.

        They are as in RUN/events.parquet, and empty with another topology.

        Under MPI the columns are complete on rank 0 and empty on the others.
        """
        return read_table(self._path(), EVENTS)

    def _path(self, name: str = "") -> Path:
        assert self.folder is not None
        return self.folder / name

    def frame(self) -> Any:
        """Return the records as a pandas table, one row per round."""
        from pandas import DataFrame  # slow to import

        return DataFrame(self.records)

    def __repr__(self) -> str:
        final = self.summary.get("final", {})
        keys = [key for key in ("test_accuracy", "val_accuracy") if final.get(key) is not None]
        keys = keys or [key for key in ("test_loss", "val_loss") if final.get(key) is not None]
        scores = ", ".join(f"{key} {final[key]:.4f}" for key in keys)
        where = f" in {self.folder}" if self.folder else ""
        return f"<Run of {final.get('round', -1) + 1} rounds{where}, {self.ending}{f': {scores}' if scores else ''}>"


def run(
    config: str | Path | Mapping[str, Any] | Config,
    overrides: Mapping[str, Any] | None = None,
    *,
    data: str | Path | ClientArrays | Mapping[str, Any] | Callable[..., ClientArrays] | None = None,
    model: str | nn.Module | Callable[..., nn.Module] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    progress: bool = False,
    stop: Callable[[], bool] | None = None,
) -> Run:
    """Run a federated method: in a notebook, a script, a thread, or on every rank of an mpiexec.

    Nothing is printed. Signal handlers, torch's number of threads and all global generators are restored afterwards.
    Runs of several threads of a process wait for one another.

    Parameters
    ----------
    config : str, Path, mapping or Config
        A preset's name; a TOML file; keys and values; or a complete configuration.
    overrides : mapping, optional
        Values by key, as {"rounds": 20, "local.lr": 0.05}, which override those of `config`. A component may be given
        as your own function or class.
    data : str, Path, ClientArrays, mapping or function, optional
        `data.source`: "digits", a folder of shards, or samples in memory. {"train": …, "test": …, "validation": …} are
        datasets of torch or Hugging Face (`ClientArrays.from_datasets`). Their column "user" names the clients.
        Without it, samples are assigned as in the digits, by `data.source.clients`, `partition`, `alpha` and `seed`.
    model : str, function or nn.Module, optional
        `model.name`: a built-in name, a function(description, \\*\\*options), or a network, which is copied.
    out : str or Path, optional
        Folder of the run; without it nothing is written.
    resume : bool
        Continue the run in `out`, if there is one.
    on_round : callable, optional
        Function called on rank 0 after each round with its record, including the evaluation if it is due. If it has a
        parameter `model`, it also receives a copy of the network after the round. A true result ends the run there, on
        all ranks.
    progress : bool
        Show finished rounds and warnings.
    stop : callable, optional
        Function called once per round on every rank. If one returns true, all save a checkpoint and stop: `Run.ending`
        is "stopped".

    Returns
    -------
    Run

    Raises
    ------
    UserError
        Wrong input; the message names the problem, its place and a remedy.
    ComponentFailure
        A custom component, or `on_round`, raised an exception, which is the cause.
    KeyboardInterrupt
        Ctrl-C or the stop button of a notebook. A single process with `out` finishes the round and saves a checkpoint
        first, unless interrupted again.

    Under MPI an exception that not all ranks raise ends the whole job.

    Examples
    --------
    >>> import fedmpi
    >>> run = fedmpi.run("fedavg", {"rounds": 3, "local.lr": 0.1}, data="digits")
    >>> len(run.records)
    3
    """
    with _one_at_a_time, ExitStack() as after:
        after.enter_context(freed_memory_kept())
        after.enter_context(process_as_before())
        if progress:
            after.enter_context(shown_warnings())
        after.enter_context(sources_of(config))
        with ending_together():
            if resume and out is None:
                raise UserError("resume needs out, the folder of the run to continue")
            folder = None if out is None else named_folder(str(out))
            loaded = _configured(config, {} if overrides is None else overrides, data, model)
        with ending_together():
            cluster = Cluster.connect(reduction=loaded.cluster.reduction)
            after.callback(cluster.close)
            rearm = after.enter_context(stall_timeout(loaded.cluster.stall_timeout if cluster.size > 1 else 0.0))
            experiment = Experiment.connect(loaded, cluster)
            after.callback(experiment.close)
            return _run(experiment, folder, resume, progress, stop, on_round=on_round, rearm=rearm)


def _configured(
    config: str | Path | Mapping[str, Any] | Config, overrides: Mapping[str, Any], data: Any, model: Any
) -> Config:
    if isinstance(data, Mapping):
        data = of_datasets(data)
    if data is not None and not isinstance(data, str | Path) and not callable(data):
        raise UserError(
            f'data cannot be of type {type(data).__name__}. Give a folder of shards, "digits", datasets as '
            '{"train": train, "test": test}, fedmpi.ClientArrays(x, y, owner, test=(x, y)), '
            "fedmpi.ClientArrays.from_datasets(train, owner, test=test), or a function that returns such arrays"
        )
    objects = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in (("data.source", data), ("model.name", model))
        if value is not None
    }
    for key in objects:
        if key in overrides:
            raise UserError(
                f"{key.partition('.')[0]}= and {key} of the overrides say the same in two ways. Keep one of them"
            )
    found = given_config(config, {**overrides, **objects} if objects else overrides)
    if isinstance(config, str | Path):
        refuse_other_shards(Path(config), found)
    return found


def _run(
    experiment: Experiment,
    folder: Path | None,
    resume: bool,
    progress: bool,
    stop: Callable[[], bool] | None,
    **functions: Any,
) -> Run:
    config, cluster, simulation = experiment.config, experiment.cluster, None
    recorder = open_recorder(cluster, folder, config, resume, experiment.model.module, experiment.data_facts.digest)
    try:
        log_setup(experiment)
        if progress and cluster.is_server:
            print("\n".join(map(paragraph, opening_lines(experiment, folder))), flush=True)
        saves = recorder is not None and cluster.size == 1
        with delayed_interrupt(stop) if saves else nullcontext(stop) as stop:
            simulation = Simulation(experiment, recorder, progress=progress, stop=stop, **functions)
            ending = simulation.run()
    except Exception as error:
        if recorder is not None:
            recorder.failed(error)
        raise
    finally:
        if simulation is not None:
            simulation.close()
        if recorder is not None:
            recorder.close()
    summary, where = _from_server(cluster, [simulation.summary, str(folder.absolute()) if folder else ""])
    known: dict[str, Any] = {"config": config}
    if summary["best_round"] is not None:
        known["best_model"] = simulation.saved.share_best()
        experiment.model.begin(simulation.model)  # the copy has replaced it by the best
    history, known["model"] = simulation.history, experiment.model.released()
    if recorder is None:
        known |= {"records": history.records, "clients": concatenated(history.tables[CLIENTS])}
        known["events"] = concatenated(history.tables[EVENTS])
    return Run(summary, folder=Path(where) if where else None, ending=ending, **known)


def _from_server(cluster: Cluster, values: Any) -> Any:
    """Send rank 0's JSON-compatible values to all ranks; collective."""
    own = [np.frombuffer(json.dumps(values).encode(), np.uint8)] if cluster.is_server else None
    return json.loads(cluster.broadcast(own)[0].tobytes())


def load_run(folder: str | Path) -> Run:
    """Return a run from its folder, finished or not.

    Raises
    ------
    UserError
        The folder contains no run, or a file in it is damaged; later, if missing data are accessed.
    """
    folder = Path(folder).absolute()  # the program may change its directory later
    path = folder / "config.toml"
    if not os.path.isfile(path):
        raise UserError(f"{folder} holds no run, since it has no {path.name}. Give the folder of a run")
    summary = read_summary(folder / "summary.json")
    return Run(summary, folder=folder, ending=ending_of(summary, path) if summary else "stopped")


def _rebuilt(folder: Path, summary: Record, name: str = "model.safetensors") -> nn.Module:
    """Return the network of a finished run: built from its configuration, with the values of a file in the folder.

    Its other components need not be importable: they may have been typed into a notebook.
    """
    if not summary:
        raise UserError(f"{folder} holds no finished run, so it has no {name}. Continue it with resume")
    if "data" not in summary:
        raise UserError(
            f"{folder / 'summary.json'} does not describe the data, so it is damaged. Repeat the run from its "
            "config.toml"
        )
    with sources_of(folder / "config.toml"):
        table = read_toml(folder / "config.toml")
        config = given_config("fedavg", {key: table[key] for key in ("seed", "model") if key in table})
        try:
            description = DataDescription(**summary["data"])
        except (TypeError, ValueError) as error:
            raise UserError(f"{folder / 'summary.json'} does not say what the data look like ({error})") from None
        try:
            module = build(config.model.choice, config.model.options, description, config.seed)
        except UserError as error:
            raise UserError(
                f"{error}. If the run was given a network itself, no folder can build it again. Load the values of "
                f"{folder / name} into it"
            ) from error
    load_model(module, folder / name)
    return module.eval()
