"""What a computing centre wants in every job script, written once: `~/.config/fedmpi/site.toml`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedmpi.common.errors import UserError
from fedmpi.config.layers import read_toml
from fedmpi.config.loading import sentence

Flavour = Literal["auto", "mpich", "openmpi", "cray"]
SRUN_MPI = {"mpich": "pmi2", "openmpi": "pmix", "cray": "cray_shasta"}
"""What `srun --mpi` is told for each flavour; cray_shasta is that of Cray EX systems."""


class Site(BaseModel):
    """Settings of a site; each has a default that works with the mpich wheel in a virtual environment."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    launcher: str = "srun"
    """What starts the ranks: "srun", "mpiexec" (the one beside the Python that submits), or a command line of your own,
    in which {ranks}, {ranks_per_node}, {nodes} and {cpus_per_rank} are filled in."""
    mpi: Flavour = "auto"
    """The MPI that the jobs load: "mpich", "openmpi" or "cray"; "auto" asks the mpi4py of the Python that submits."""
    srun_mpi: str = ""
    """What `srun --mpi` is told; by default what the MPI speaks: pmi2 (mpich), pmix (openmpi), cray_shasta (cray)."""
    launcher_options: tuple[str, ...] = Field(default=(), strict=False)
    """Further words for the launcher, for example ["--cpu-bind=cores"]."""
    modules: tuple[str, ...] = Field(default=(), strict=False)
    """Loaded with `module load`, in this order, from a login shell."""
    environment: tuple[str, ...] = Field(default=(), strict=False)
    """Lines that the job runs before the ranks start, as ["source ~/venv/bin/activate"]; one that fails ends it."""
    command: str = ""
    """How a rank starts fedmpi, as "apptainer exec --nv fedmpi.sif fedmpi"; by default the Python that submits, or,
    where `environment` or `modules` are given, the fedmpi that they lead to."""
    account: str = ""
    """`#SBATCH --account`."""
    partition: str = ""
    """`#SBATCH --partition`."""
    sbatch: tuple[str, ...] = Field(default=(), strict=False)
    """Further options of sbatch, for example ["--qos=long", "--constraint=rome"]."""
    gpu_request: str = "--gpus-per-node={gpus}"
    """How GPUs are asked for; older sites want "--gres=gpu:{gpus}"."""
    cpus_per_rank: int = Field(default=1, ge=1)
    """Processor cores of a rank."""
    warning_seconds: int = Field(default=120, ge=1, le=65535)
    """How long before the time limit the run is told to save: longer than a round (SLURM may be a minute early)."""

    @field_validator("launcher_options", "modules", "environment", "sbatch", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            raise ValueError('give a list of texts, ["…", "…"]')
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _one_line(cls, value: Any) -> Any:
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and ("\n" in text or "\0" in text):
                raise ValueError("give one line")
        return value

    @field_validator("sbatch", mode="after")
    @classmethod
    def _options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for option in value:
            if not option.startswith("-"):
                raise ValueError(f"{option!r} is no option of sbatch, which start with -")
        return value

    @field_validator("launcher", "gpu_request", mode="after")
    @classmethod
    def _fillable(cls, value: str) -> str:
        numbers = dict.fromkeys(("ranks", "ranks_per_node", "nodes", "cpus_per_rank", "gpus"), 1)
        try:
            filled = value.format_map(numbers)
        except (KeyError, IndexError, ValueError, AttributeError):
            raise ValueError("in braces stand {ranks}, {ranks_per_node}, {nodes}, {cpus_per_rank} or {gpus}") from None
        if not filled.strip():
            raise ValueError("give at least one word")
        return value


def site_file(environ: Mapping[str, str] | None = None) -> Path:
    """Where the site's settings stand: `fedmpi/site.toml` in $XDG_CONFIG_HOME, else in ~/.config.

    A user without a home, as in containers with a number of their own, has "/", which container engines name then.
    """
    environ = os.environ if environ is None else environ
    folder = environ.get("XDG_CONFIG_HOME", "")
    try:
        home = Path(environ.get("HOME") or Path.home())
    except RuntimeError:
        home = Path("/")
    return (Path(folder) if Path(folder).is_absolute() else home / ".config") / "fedmpi" / "site.toml"


def load_site(path: Path, gpus: bool = False) -> Site:
    """The settings that a file holds; the defaults where there is none."""
    if not os.path.lexists(path):
        return Site()
    table = read_toml(path)
    own = table.pop("gpu", {})
    if not isinstance(own, dict):
        raise UserError(f"{path}: gpu is a table: write [gpu] and its keys below it")
    _refuse_unknown(table, path, "")
    _refuse_unknown(own, path, "gpu.")
    for_all = _validated(table, path, "")
    for_gpus = _validated(table | own, path, "gpu.")
    return for_gpus if gpus else for_all


def _refuse_unknown(table: Mapping[str, Any], path: Path, prefix: str) -> None:
    known = list(Site.model_fields) + ([] if prefix else ["gpu"])
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"there are {', '.join(known)}"
            raise UserError(f"unknown key {prefix}{key} in {path}; {hint}")


def _validated(table: Mapping[str, Any], path: Path, prefix: str) -> Site:
    try:
        return Site.model_validate(dict(table))
    except ValidationError as error:
        raise UserError(f"{path}: {prefix}{sentence(error, table, {})}") from None
