"""Settings that every job script of a computing center needs, stored once in `~/.config/fedmpi/site.toml`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedmpi.common.errors import UserError, shown
from fedmpi.config.loading import read_toml

SRUN_MPI = {"mpich": "pmi2", "openmpi": "pmix", "cray": "cray_shasta"}
"""Argument of `srun --mpi` for each MPI; cray_shasta is for Cray EX systems."""
NUMBERS = ("ranks", "ranks_per_node", "nodes", "cpus_per_rank", "gpus")


class Site(BaseModel):
    """Settings of a site; the defaults work with the mpich wheel in a virtual environment."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    launcher: str = "srun"
    """Command that starts the ranks: "srun", "mpiexec" (of the submitting Python), or a custom command line, with
    {ranks}, {ranks_per_node}, {nodes}, {cpus_per_rank} and {gpus} as placeholders."""
    mpi: Literal["auto", "mpich", "openmpi", "cray"] = "auto"
    """MPI of the jobs; "auto" uses that of the submitting Python."""
    srun_mpi: str = ""
    """Argument of `srun --mpi`; default: pmi2 (mpich), pmix (openmpi), cray_shasta (cray)."""
    launcher_options: list[str] = []
    """More options of the launcher, for example ["--cpu-bind=cores"]."""
    modules: list[str] = []
    """Arguments of `module load`, in this order, in a login shell."""
    environment: list[str] = []
    """Lines to run before the ranks start, such as ["source ~/venv/bin/activate"]; if one fails, so does the job."""
    command: str = ""
    """Command that starts fedmpi on a rank, such as "apptainer exec --nv fedmpi.sif fedmpi"; default: the submitting
    Python, or the fedmpi on the PATH if `environment` or `modules` are given."""
    account: str = ""
    """`#SBATCH --account`."""
    partition: str = ""
    """`#SBATCH --partition`."""
    qos: str = ""
    """`#SBATCH --qos`."""
    mem: str = ""
    """`#SBATCH --mem`, memory per node."""
    sbatch: list[str] = []
    """More options of sbatch, for example ["--constraint=rome"]."""
    gpu_request: str = "--gpus-per-node={gpus}"
    """Option that requests GPUs; older sites need "--gres=gpu:{gpus}"."""
    cpus_per_rank: int = Field(default=1, ge=1)
    """CPU cores per rank."""
    warning_seconds: int = Field(default=120, ge=1, le=65535)
    """Seconds before the time limit at which the run saves: longer than a round (SLURM may be a minute early)."""

    @field_validator("launcher", "gpu_request")
    @classmethod
    def _fits(cls, value: str) -> str:
        try:
            if value.format_map(dict.fromkeys(NUMBERS, 1)).strip():
                return value
        except (KeyError, IndexError, ValueError, AttributeError):
            pass
        placeholders = ", ".join(f"{{{name}}}" for name in NUMBERS)
        raise ValueError(f"give at least one word; the placeholders are {placeholders}")


def site_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return `fedmpi/site.toml` in $XDG_CONFIG_HOME, else in ~/.config."""
    folder = Path(environ.get("XDG_CONFIG_HOME", ""))
    return (folder if folder.is_absolute() else Path(environ.get("HOME", "/")) / ".config") / "fedmpi" / "site.toml"


def load_site(path: Path, gpus: bool = False) -> Site:
    """Return the settings in a file, with those of its table `gpu` if the job has GPUs; the defaults without a file."""
    if not os.path.lexists(path):
        return Site()
    table = read_toml(path)
    own = table.pop("gpu", {})
    if not isinstance(own, dict):
        raise UserError(f"gpu in {path} is not a table. Write [gpu] and its keys below it")
    found = []
    for keys, prefix in ((table, ""), (table | own, "gpu.")):
        try:
            found.append(Site.model_validate(keys))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            known = f". The keys are {', '.join(Site.model_fields)}" if first["type"] == "extra_forbidden" else ""
            key = f"{prefix}{first['loc'][0]} = {shown(first['input'], repr)}"
            raise UserError(f"{path}: {key}: {first['msg']}{known}") from None
    return found[gpus]
