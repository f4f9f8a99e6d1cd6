"""Submission of training jobs to SLURM: a job is checked, its script is stored in the run folder and given to sbatch.

`job.sbatch` is the one script. Below `MARK` it is the same for jobs by hand and for those of `fedmpi submit`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedmpi.common.errors import UserError
from fedmpi.common.files import make_folder, write_whole
from fedmpi.config import Config, load_config
from fedmpi.config.loading import OF_A_SWEEP, read_toml
from fedmpi.config.site import SRUN_MPI, Site, load_site, site_file
from fedmpi.mpi.launch import library_version
from fedmpi.records.provenance import refuse_other_shards

TEMPLATE = Path(__file__).with_name("job.sbatch")
MARK = "# ---"
"""First words of the line of the template from which scripts are equal."""
SAME = ("account", "partition", "qos", "mem")
"""Site settings that are options of sbatch by name."""
TASK = "%a"
"""Placeholder for the number of an array's task."""
TASKS = re.compile(r"\d+(-\d+(:[1-9]\d*)?)?(,\d+(-\d+(:[1-9]\d*)?)?)*(%[1-9]\d*)?")
"""Tasks of an array, and how many of them run at a time."""
MEMORY = re.compile(r"(\d+([KMGT]B?)?)?", re.IGNORECASE)


@dataclass(frozen=True)
class Submission:
    """A checked job."""

    folder: Path  # the folder of the run; for an array, the one above the placeholder or of the sweep
    script: str
    configuration: Path | None  # file to copy; a sweep is read where it is
    site: Path
    words: str  # description in one line
    warnings: tuple[str, ...]

    def contents(self) -> dict[str, bytes]:
        """Return the files that the job leaves in its folder, by name."""
        copied = {"job.toml": self.configuration.read_bytes()} if self.configuration else {}
        return {**copied, "job.sbatch": self.script.encode()}


def prepare_submission(
    config: Path | None,
    settings: Sequence[str],
    out: Path,
    nodes: int,
    ranks_per_node: int,
    gpus_per_node: int,
    time: str,
    array: str = "",
    **given: str | int,
) -> Submission:
    """Check a job as `fedmpi train` and SLURM would, and write the text of its script; `given` replaces site settings.

    A file with a table [sweep] becomes an array with a task for each run.
    """
    where = site_file()
    site = load_site(where, gpus=gpus_per_node > 0).model_copy(
        update={key: value for key, value in given.items() if value}
    )
    if not MEMORY.fullmatch(site.mem):
        raise UserError(
            f"mem = {site.mem!r} is not a size. Give a number with K, M, G or T (--mem 64G), or change mem in {where}"
        )
    sweeps = config is not None and not read_toml(config).keys().isdisjoint(OF_A_SWEEP)
    if sweeps:
        assert config is not None
        array = _checked_sweep(config, settings, out, array)
    else:
        _check_configuration(config, settings, out, array)
    folder = Path(os.path.abspath(str(out).partition(TASK)[0] if TASK in str(out) else out))  # the script adds /%a
    ranks = nodes * ranks_per_node
    numbers = {"ranks": ranks, "ranks_per_node": ranks_per_node, "nodes": nodes, "gpus": gpus_per_node}
    options = {
        "job-name": f"fedmpi-{folder.name}",
        "nodes": nodes,
        "ntasks-per-node": ranks_per_node,
        "time": time.strip(),
        "signal": f"B:USR1@{site.warning_seconds}",
        "open-mode": "append",
        "chdir": Path.cwd(),
        "output": str(folder).replace("%", "%%") + ("/job-%A_%a.log" if array else "/job-%j.log"),
        "array": array,
    }
    last = {"cpus-per-task": site.cpus_per_rank} | {name: getattr(site, name) for name in SAME}
    lines, over = (
        [f"--{name}={_value(str(value))}" for name, value in some.items() if value] for some in (options, last)
    )
    lines += ["--requeue", *([site.gpu_request.format(**numbers)] if gpus_per_node else []), *site.sbatch, *over]
    on_gpus = gpus_per_node and not any(text.partition("=")[0].strip() == "cluster.device" for text in settings)
    all_settings = [*settings, *(["cluster.device=cuda"] if on_gpus else [])]
    file = [os.path.abspath(config) if sweeps else str(folder / "job.toml")] if config else []
    words = ["sweep" if sweeps else "train", *file, *(word for text in all_settings for word in ("--set", text))]
    modules = [f"module load {shlex.quote(module)}" for module in site.modules]
    python = [] if site.environment or site.modules else [sys.executable, "-m"]
    head = [
        "#!/bin/bash -l" if modules else "#!/bin/bash",
        "# Written by `fedmpi submit`. Submit it again with `sbatch` to continue the run.",
        *(f"#SBATCH {line}" for line in lines),
        'needed() { [ "$1" -eq 0 ] || { echo "failed in the job, from site.toml: $2" >&2; exit 1; }; }',
        *(f"{line}\nneeded $? {shlex.quote(line)}" for line in (*modules, *site.environment)),
        "set -u",
        f"launch=({shlex.join([*_launcher(site, where, numbers), *site.launcher_options])})",
        f"fedmpi=({shlex.join(shlex.split(site.command) or [*python, 'fedmpi'])})",
        f"set -- {shlex.join([*words, '--out', os.path.abspath(out)])}",
    ]
    template = TEMPLATE.read_text()
    script = "\n".join([*head, template[template.index(MARK) :]])
    gpus = f", {gpus_per_node} GPUs per node" if gpus_per_node else ""
    described = (
        f"{f'array {array}, each task ' if array else ''}{ranks} ranks ({nodes} nodes x {ranks_per_node}{gpus}), time "
        f"limit {time.strip()}; site settings: {where if where.exists() else 'none, defaults'}"
    )
    warnings = tuple(_gpu_warnings(site, ranks_per_node, gpus_per_node)) if gpus_per_node else ()
    return Submission(folder, script, None if sweeps else config, where, described, warnings)


def _gpu_warnings(site: Site, ranks: int, gpus: int) -> Iterator[str]:
    """Yield warnings about resources that a job with GPUs probably lacks; numbers are per node."""
    if site.cpus_per_rank == 1:
        yield "each rank has one CPU core beside its GPU. Give more with --cpus-per-rank"
    if not site.mem and not any(option.startswith("--mem") for option in site.sbatch):
        yield "the job requests no memory, so it gets the default of the partition. Give --mem, for example --mem 64G"
    if ranks > gpus:
        yield f"the {ranks} ranks of each node share {gpus} GPU{'s' * (gpus > 1)}. Give --ranks-per-node {gpus}"


def write(submission: Submission) -> Path:
    """Write script and configuration into the run folder; return the script, which sbatch accepts as it is."""
    _write(submission.folder, submission.contents(), "--out")
    return submission.folder / "job.sbatch"


def submit(submission: Submission) -> str:
    """Write script and configuration into the run folder and submit the job; return its number."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no sbatch on the PATH. Submit on a machine with SLURM, or see the script by --dry-run"
        )
    script = write(submission)
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()).removeprefix("sbatch: ").removeprefix("error: ")
        raise UserError(
            f"sbatch rejects the job ({reason or f'exit code {done.returncode}'}). See {script} and {submission.site}"
        )
    return done.stdout.strip().partition(";")[0]


def write_scripts(folder: Path) -> list[Path]:
    """Write the script for jobs by hand to a folder."""
    _write(folder, {TEMPLATE.name: TEMPLATE.read_bytes()}, "folder")
    return [folder / TEMPLATE.name]


def _write(folder: Path, contents: dict[str, bytes], other: str) -> None:
    try:
        make_folder(folder)
        for name, content in contents.items():
            write_whole(folder / name, content)
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}). Choose another {other}") from error


def _check_configuration(config: Path | None, settings: Sequence[str], out: Path, array: str) -> None:
    """Check the configuration of each task of an array, or of the one job."""
    varied = [text for text in (*settings, str(out)) if TASK in text]
    if varied and not array:
        raise UserError(f"%a in {varied[0]} is the number of an array's task. Give --array, for example --array 0-3")
    tasks = _tasks(array or "0")
    if len(tasks) > 1 and not any(TASK in setting for setting in settings):
        raise UserError(f"the tasks of --array {array} are all the same run. Vary a setting, for example --set seed=%a")
    loaded = {}
    for task in tasks:
        with _named(f"task {task}: " if array else ""):
            loaded[f"task {task}"] = load_config(config, [setting.replace(TASK, str(task)) for setting in settings])
            if config is not None:
                refuse_other_shards(config, loaded[f"task {task}"])
    _try(loaded)


def _tasks(array: str) -> list[int]:
    """Return the numbers of an array's tasks."""
    found = list[int]()
    for first, last, step in re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", array.partition("%")[0]):
        found += range(int(first), int(last or first) + 1, int(step or 1))
    if TASKS.fullmatch(array) is None or not found:
        raise UserError(f"--array {array} is not a list of tasks. Give 0-3, 1,5,7 or 0-99%10 (ten at a time)")
    return found


def _checked_sweep(file: Path, settings: Sequence[str], out: Path, array: str) -> str:
    """Check the runs of a sweep whose shards exist as if they started; return its tasks."""
    from fedmpi.sweeps.plan import plan_sweep  # imports torch

    if varied := [text for text in (*settings, str(out)) if TASK in text]:
        raise UserError(f"%a in {varied[0]} has no effect, since {file} has a table [sweep]. Add its values there")
    runs = plan_sweep(file, out, settings).runs
    array = array if array and not array.startswith("%") else f"0-{len(runs) - 1}{array}"
    tasks = _tasks(array)
    if (largest := max(tasks)) >= len(runs):
        raise UserError(f"--array {array} names task {largest}, but {file} describes runs 0 to {len(runs) - 1}")
    _try({f"run {runs[task].name}": runs[task].config for task in tasks if runs[task].data is None})
    return array


def _try(configs: Mapping[str, Config]) -> None:
    """Assemble runs in this process as `fedmpi train` does, so that a job does not fail after hours in the queue.

    Of runs that differ in their seed only, the first is assembled.
    """
    from fedmpi.common.arithmetic import process_as_before  # these import torch
    from fedmpi.core.experiment import Experiment

    tried = list[Config]()
    for name, config in configs.items():
        here = config.cluster.model_copy(update={"device": "cpu"})  # login nodes may have no GPU
        if (alike := config.model_copy(update={"cluster": here, "seed": 0})) in tried:
            continue
        tried.append(alike)
        with _named(f"{name}: " if len(configs) > 1 else ""), process_as_before():
            Experiment.connect(config.model_copy(update={"cluster": here})).close()


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Put the name of a run before the message of its error."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}{error}") from error


def _launcher(site: Site, where: Path, numbers: dict[str, int]) -> list[str]:
    """Return the command line that starts the ranks, without the command of each rank."""
    mpi = site.mpi
    if mpi == "auto":
        library = library_version()
        if not library:
            raise UserError(
                "this Python has no MPI library, and the launcher depends on it. Install one with pip install "
                f'\'fedmpi[mpi]\', or set mpi = "mpich", "openmpi" or "cray" in {where}'
            )
        mpi = "openmpi" if library.startswith("Open MPI") else "cray" if "CRAY" in library.upper() else "mpich"
    if site.launcher == "srun":
        return ["srun", f"--mpi={site.srun_mpi or SRUN_MPI[mpi]}", "--kill-on-bad-exit=1"]
    if site.launcher == "mpiexec":
        own = Path(sys.prefix) / "bin" / "mpiexec"
        command = str(own) if own.exists() and not (site.environment or site.modules) else "mpiexec"
        return [command, *(["-n", str(numbers["ranks"]), "--bind-to", "none"] if mpi == "openmpi" else [])]
    return shlex.split(site.launcher.format(cpus_per_rank=site.cpus_per_rank, **numbers))


def _value(text: str) -> str:
    """Return the text of an option on a line of #SBATCH, quoted if needed."""
    return text if re.fullmatch(r"[\w@%+=:,./-]+", text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
