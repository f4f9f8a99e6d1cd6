"""Job scripts for SLURM: what is asked for, and the text of the script, from the templates of this package.

A template is a bash script in which a line of its own, `@NAME@`, is replaced by other text. All scripts share the part
that supervises a run (`templates/supervise.sh`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from fedmpi.common.errors import UserError
from fedmpi.jobs.site import SRUN_MPI, Site

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
