"""Settings that every job script of a computing center needs, stored once in `~/.config/fedmpi/site.toml`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from fedmpi.common.errors import UserError
from fedmpi.config.layers import read_toml
from fedmpi.config.loading import sentence

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
    sbatch: list[str] = []
    """More options of sbatch, for example ["--qos=long", "--constraint=rome"]."""
    gpu_request: str = "--gpus-per-node={gpus}"
    """Option that requests GPUs; older sites need "--gres=gpu:{gpus}"."""
    cpus_per_rank: int = Field(default=1, ge=1)
    """CPU cores per rank."""
    warning_seconds: int = Field(default=120, ge=1, le=65535)
    """Seconds before the time limit at which the run saves: longer than a round (SLURM may be a minute early)."""

    @field_validator("*")
    @classmethod
    def _usable(cls, value: Any, info: ValidationInfo) -> Any:
        texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
        if any("\n" in text or "\0" in text for text in texts):
            raise ValueError("give one line")
        if info.field_name == "sbatch" and (wrong := [text for text in texts if not text.startswith("-")]):
            raise ValueError(f"{wrong[0]!r} is not an option of sbatch, which start with -")
        if info.field_name in ("launcher", "gpu_request"):
            try:
                filled = value.format_map(dict.fromkeys(NUMBERS, 1))
            except (KeyError, IndexError, ValueError, AttributeError):
                raise ValueError(f"the placeholders are {', '.join(f'{{{name}}}' for name in NUMBERS)}") from None
            if not filled.strip():
                raise ValueError("give at least one word")
        return value


def site_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return `fedmpi/site.toml` in $XDG_CONFIG_HOME, else in ~/.config ("/.config" for users without a home)."""
    folder = Path(environ.get("XDG_CONFIG_HOME", ""))
    try:
        home = Path(environ.get("HOME") or Path.home())
    except RuntimeError:
        home = Path("/")
    return (folder if folder.is_absolute() else home / ".config") / "fedmpi" / "site.toml"


def load_site(path: Path, gpus: bool = False) -> Site:
    """Return the settings in a file, with those of its table `gpu` if the job has GPUs; the defaults without a file."""
    if not os.path.lexists(path):
        return Site()
    table = read_toml(path)
    own = table.pop("gpu", {})
    if not isinstance(own, dict):
        raise UserError(f"gpu in {path} is not a table. Write [gpu] and its keys below it")
    known = list(Site.model_fields)
    for key in (*table, *(f"gpu.{key}" for key in own)):
        if key.removeprefix("gpu.") not in known:
            near = get_close_matches(key.removeprefix("gpu."), known, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]}?" if near else f"The keys are {', '.join(known)}, and the table gpu"
            raise UserError(f"unknown key {key} in {path}. {hint}")
    found = []
    for keys, prefix in ((table, ""), (table | own, "gpu.")):
        try:
            found.append(Site.model_validate(keys))
        except ValidationError as error:
            raise UserError(f"{path}: {prefix}{sentence(error, keys, {})}") from None
    return found[gpus]
