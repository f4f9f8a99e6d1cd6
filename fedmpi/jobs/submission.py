"""Job scripts for SLURM, and handing them over: everything is checked before, the script is kept in the run's folder.

A template is a bash script in which a line of its own, `@NAME@`, is replaced by other text. All scripts share the part
that supervises a run (`templates/supervise.sh`).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from fedmpi.common.errors import UserError
from fedmpi.common.files import make_folder, write_whole
from fedmpi.config import Config, load_config
from fedmpi.data.schema import read_manifest
from fedmpi.jobs.site import SRUN_MPI, Site, load_site, site_file
from fedmpi.mpi.launch import library_version

SCRIPTS = ("train.sbatch", "train-gpu.sbatch", "sweep.sbatch", "prepare.sbatch")
"""The scripts for use by hand, as they lie in jobs/ of the repository."""
TASK = "%a"
"""What stands for the number of an array's task."""
MOST_TASKS = 100_000

_SLOT = re.compile(r"^@([a-z_]+)@\n", re.MULTILINE)
_TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+)(?::(\d+))?)?|(?:(\d+):)?(\d+):(\d+)|(\d+))")
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


@dataclass(frozen=True)
class TrainingJob:
    """A training job as it is asked for."""

    config: Path | None  # The configuration file that every rank reads
    settings: tuple[str, ...]  # What follows `--set`; "%a" stands for the number of the array's task
    run: str  # The folder of the run; of an array, of the task's, with "%a" in it
    log: str  # The file for what the job prints, in sbatch's notation
    name: str  # The job's
    folder: Path  # The working directory
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    seconds: int  # The time limit
    array: str = ""  # What `sbatch --array` is told; "" for a single job

    @property
    def ranks(self) -> int:
        """Ranks of the job, or of each task of an array."""
        return self.nodes * self.ranks_per_node


def submitted_script(job: TrainingJob, site: Site, flavour: str, prefix: Path, python: str) -> str:
    """The script of one job."""
    words = ["train", *([str(job.config)] if job.config else [])]
    words += [word for setting in job.settings for word in ("--set", setting)]
    words += ["--out", job.run]
    return fill_template(
        "submitted.sbatch",
        shebang="#!/bin/bash -l" if site.modules else "#!/bin/bash",
        options="\n".join(f"#SBATCH {option}" for option in sbatch_options(job, site)),
        environment=_environment(site),
        launch=f"launch=({_quoted(launch_words(job, site, flavour, prefix))})",
        command=f"fedmpi=({_quoted(_command(site, python))})",
        words=f"words=({_quoted(words)})",
    )


def sbatch_options(job: TrainingJob, site: Site) -> list[str]:
    """The options of sbatch that stand in a job's script."""
    options = [
        f"--job-name={_value(job.name)}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.ranks_per_node}",
        f"--cpus-per-task={site.cpus_per_rank}",
    ]
    if job.gpus_per_node:
        options.append(site.gpu_request.format(gpus=job.gpus_per_node))
    options += [
        f"--time={shown_time(job.seconds)}",
        f"--signal=B:USR1@{site.warning_seconds}",
        "--requeue",
        "--open-mode=append",
        f"--chdir={_value(str(job.folder))}",
        f"--output={_value(job.log)}",
    ]
    options += [f"--array={job.array}"] * bool(job.array)
    options += [f"--{key}={_value(value)}" for key in ("account", "partition") if (value := getattr(site, key))]
    return options + list(site.sbatch)


def launch_words(job: TrainingJob, site: Site, flavour: str, prefix: Path) -> list[str]:
    """The command line that starts the ranks, without what each of them runs."""
    if site.launcher == "srun":
        words = ["srun", f"--mpi={site.srun_mpi or SRUN_MPI[flavour]}", "--kill-on-bad-exit=1"]
    elif site.launcher == "mpiexec":
        own = prefix / "bin" / "mpiexec"
        words = [str(own) if own.exists() and not (site.environment or site.modules) else "mpiexec"]
        if flavour == "openmpi":
            words += ["-n", str(job.ranks), "--bind-to", "none"]
    else:
        words = shlex.split(
            site.launcher.format(
                ranks=job.ranks,
                ranks_per_node=job.ranks_per_node,
                nodes=job.nodes,
                cpus_per_rank=site.cpus_per_rank,
                gpus=job.gpus_per_node,
            )
        )
    return words + list(site.launcher_options)


def fill_template(template: str, **slots: str) -> str:
    """A template with its slots replaced, those that other files of the templates fill among them."""
    folder = files("fedmpi.jobs") / "templates"

    def text(found: re.Match[str]) -> str:
        name = found.group(1)
        content = slots[name] if name in slots else fill_template(f"{name}.sh", **slots)
        return content.rstrip("\n") + "\n" if content else ""

    return _SLOT.sub(text, (folder / template).read_text(encoding="utf-8"))


def seconds_of(time: str) -> int:
    """A time limit as sbatch reads it: minutes, minutes:seconds, hours:minutes:seconds, days-
    hours[:minutes[:seconds]].
    """
    found = _TIME.fullmatch(time.strip())
    if found is None:
        raise UserError(
            f"--time {time}: give minutes, hours:minutes:seconds or days-hours:minutes:seconds, as 12:00:00"
        )
    days, day_hours, day_minutes, day_seconds, hours, minutes, seconds, only = (
        int(group) if group else 0 for group in found.groups()
    )
    total = ((days * 24 + day_hours + hours) * 60 + day_minutes + minutes + only) * 60 + day_seconds + seconds
    if not 0 < total <= 366 * 86400:
        raise UserError(f"--time {time}: a job takes longer than nothing and at most a year")
    return total


def shown_time(seconds: int) -> str:
    """Seconds as days-hours:minutes:seconds."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{f'{days}-' if days else ''}{hours:02}:{minutes:02}:{seconds:02}"


def tasks_of(array: str) -> list[int]:
    """The numbers of an array's tasks: "0-3", "1,5,7", "0-10:2", each with "%2" behind it to run two at a time."""
    listed, limit, at_once = array.partition("%")
    wrong = UserError(f"--array {array}: give numbers and ranges, as 0-3 or 1,5,7 or 0-99%10 (ten at a time)")
    if limit and not (at_once.isdigit() and int(at_once)):
        raise wrong
    tasks: set[int] = set()
    for part in listed.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise wrong
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        if last < first or step < 1 or last - first > MOST_TASKS:
            raise wrong
        tasks |= set(range(first, last + 1, step))
    return sorted(tasks)


def _environment(site: Site) -> str:
    lines = [f"module load {shlex.quote(module)}" for module in site.modules] + list(site.environment)
    return "\n".join(f"{line}\nneeded $? {shlex.quote(line)}" for line in lines)


def _command(site: Site, python: str) -> list[str]:
    if site.command:
        return shlex.split(site.command)
    return ["fedmpi"] if site.environment or site.modules else [python, "-m", "fedmpi"]


def _quoted(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)


def _value(text: str) -> str:
    """A value on a line of #SBATCH, in quotes where sbatch would end it; none that goes on as a command below."""
    if not text.isprintable():
        raise UserError(f"{text!r} holds a line break or another character that no job script can hold: rename it")
    return text if re.fullmatch(r"[\w@%+=:,./-]+", text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


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
    shards = config.data.source.choice
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
