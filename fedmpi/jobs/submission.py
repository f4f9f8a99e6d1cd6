"""Handing a job to SLURM: everything is checked before, and the script is kept in the run's folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedmpi.common.errors import UserError
from fedmpi.common.files import make_folder, write_whole
from fedmpi.config import Config, load_config
from fedmpi.data.schema import read_manifest
from fedmpi.jobs.script import (
    SCRIPTS,
    TASK,
    TrainingJob,
    fill_template,
    seconds_of,
    shown_time,
    submitted_script,
    tasks_of,
)
from fedmpi.jobs.site import Site, load_site, site_file
from fedmpi.mpi.launch import library_version

SCRIPT, CONFIGURATION = "job.sbatch", "job.toml"
"""What a job leaves in its run's folder: the script, and the configuration as it was when it was submitted."""
NO_SBATCH = "there is no sbatch on the PATH: submit where SLURM is, or see the script with --dry-run"


@dataclass(frozen=True)
class Submission:
    """A job that is ready to be submitted."""

    job: TrainingJob
    folder: Path
    script: str
    configuration: bytes | None
    site: Path

    @property
    def words(self) -> str:
        """What is asked for, in a line."""
        job = self.job
        gpus = f", {job.gpus_per_node} GPUs a node" if job.gpus_per_node else ""
        array = f"array {job.array}, each task " if job.array else ""
        return (
            f"{array}{job.ranks} ranks ({job.nodes} nodes x {job.ranks_per_node}{gpus}), time limit "
            f"{shown_time(job.seconds)}; site settings: {self.site if self.site.exists() else 'none, defaults'}"
        )


def prepare_submission(
    config: Path | None,
    settings: Sequence[str],
    out: Path,
    nodes: int,
    ranks_per_node: int,
    gpus_per_node: int,
    time: str,
    array: str = "",
) -> Submission:
    """Check a job as `fedmpi train` and SLURM would, and write its script's text."""
    for name, number, least in (
        ("--nodes", nodes, 1),
        ("--ranks-per-node", ranks_per_node, 1),
        ("--gpus-per-node", gpus_per_node, 0),
    ):
        if number < least:
            raise UserError(f"{name} {number}: give {least} or more")
    seconds = seconds_of(time)
    where = site_file()
    site = load_site(where, gpus=gpus_per_node > 0)
    _check_tasks(config, settings, out, array)
    if array and TASK not in str(out):
        out = out / TASK
    folder = Path(os.path.abspath(str(out).partition(TASK)[0] if TASK in str(out) else out))
    if seconds <= site.warning_seconds + 60:
        raise UserError(
            f"--time {time}: the run is told to save {site.warning_seconds} s before the end, and SLURM may say so a "
            f"minute early: give more than {shown_time(site.warning_seconds + 60)}, or lower warning_seconds in {where}"
        )
    pattern = "job-%A_%a.log" if array else "job-%j.log"
    job = TrainingJob(
        config=folder / CONFIGURATION if config is not None else None,
        settings=tuple(settings) + (("cluster.device=cuda",) if gpus_per_node and not _chosen(settings) else ()),
        run=os.path.abspath(out),
        log=str(folder).replace("%", "%%") + f"/{pattern}",
        name=f"fedmpi-{folder.name}",
        folder=Path.cwd(),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        gpus_per_node=gpus_per_node,
        seconds=seconds,
        array=array,
    )
    script = submitted_script(job, site, _flavour(site, where), Path(sys.prefix), sys.executable)
    text = config.read_bytes() if config is not None else None
    return Submission(job, folder, script, text, where)


def submit(submission: Submission) -> str:
    """Write the script into the run's folder and hand it to SLURM."""
    if shutil.which("sbatch") is None:
        raise UserError(NO_SBATCH)
    folder, script = submission.folder, submission.folder / SCRIPT
    try:
        make_folder(folder)
        if submission.configuration is not None:
            write_whole(folder / CONFIGURATION, submission.configuration)
        write_whole(script, submission.script.encode())
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error.strerror}): choose another --out") from error
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()).removeprefix("sbatch: ").removeprefix("error: ")
        raise UserError(
            f"sbatch refuses the job ({reason or f'exit code {done.returncode}'}): see {script} and {submission.site}"
        )
    return done.stdout.strip().partition(";")[0]


def write_scripts(folder: Path) -> list[Path]:
    """The scripts for use by hand (`SCRIPTS`), written to a folder."""
    paths = [folder / name for name in SCRIPTS]
    try:
        make_folder(folder)
        for path in paths:
            write_whole(path, fill_template(path.name).encode())
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error.strerror}): choose another folder") from error
    return paths


def _check_tasks(config: Path | None, settings: Sequence[str], out: Path, array: str) -> None:
    """Validate the configuration of every task."""
    varied = [text for text in (*settings, str(out)) if TASK in text]
    if not array:
        if varied:
            raise UserError(f"{varied[0]}: %a is the number of an array's task: give --array, for example --array 0-3")
        _check(load_config(config, list(settings)))
        return
    tasks = tasks_of(array)
    if len(tasks) > 1 and not any(TASK in setting for setting in settings):
        raise UserError(
            f"--array {array}: its {len(tasks)} tasks would all be the same run: let one setting differ, for example "
            "--set seed=%a"
        )
    for task in tasks:
        _check(load_config(config, [setting.replace(TASK, str(task)) for setting in settings]))


def _check(config: Config) -> None:
    """The data, where they are a folder: a job that waits for hours should not fail on a wrong path."""
    shards = config.data.shards
    if isinstance(shards, str) and not re.match(r"digits(:|$)", shards) and not re.fullmatch(r"[\w.]+:[\w.]+", shards):
        read_manifest(Path(shards))


def _chosen(settings: Sequence[str]) -> bool:
    return any(setting.partition("=")[0].strip() == "cluster.device" for setting in settings)


def _flavour(site: Site, where: Path) -> str:
    """The MPI of the site, or that of this Python."""
    if site.mpi != "auto":
        return site.mpi
    library = library_version()
    if library.startswith("Open MPI"):
        return "openmpi"
    if library:
        return "cray" if "CRAY" in library.upper() else "mpich"
    raise UserError(
        "this Python loads no MPI library, and the job's launcher depends on it: pip install 'fedmpi[mpi]', or say "
        f'mpi = "mpich", "openmpi" or "cray" in {where}'
    )
