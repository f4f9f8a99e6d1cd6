"""The commands. Each returns its exit code (see `process.exit_codes`); None is 0."""

from __future__ import annotations

import gc
import sys
from datetime import datetime
from inspect import unwrap
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

import fedmpi
from fedmpi.common.errors import UserError
from fedmpi.common.files import named_folder, write_named
from fedmpi.common.options import one_line, type_text
from fedmpi.common.registry import KINDS, components, describe, known_kind, resolve
from fedmpi.common.terminal import console, paragraph
from fedmpi.config import Config, config_toml, key_descriptions, load_config, presets
from fedmpi.config.loading import assignment, dotted, remarks
from fedmpi.config.writing import flat_table
from fedmpi.mpi import world_rank
from fedmpi.process.signals import STOPPED_AFTER_SAVING, Interrupt
from fedmpi.records.provenance import refuse_other_shards, sources_of

app = typer.Typer(name="fedmpi", pretty_exceptions_enable=False, rich_markup_mode=None)

# ClickException of the copy of click that typer uses.
CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]

ConfigFile = Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml]", help="TOML configuration.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Override one key.")]


def run_command(interrupt: Interrupt | None = None) -> int:
    """Run the command that the arguments name; return the exit code."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False, obj=interrupt)
    except CommandLineError as error:
        message = getattr(error, "format_message", error.__str__)()
        raise UserError(f"{message.rstrip('.')} (try --help)") from error
    return code if isinstance(code, int) else 0


@app.callback(invoke_without_command=True)
def fedmpi_itself(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """A parallel simulator for sampling strategies in federated learning."""
    if version:
        print(f"fedmpi {fedmpi.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def train(
    context: typer.Context,
    config: ConfigFile = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="RUN", parser=named_folder, help="Folder of the run.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in RUN, if there is one.")] = False,
) -> int:
    """Train a model: one process, or many under mpiexec or srun.

    Example: mpiexec -n 3 fedmpi train --set preset=fedavg --set rounds=20 --out runs/first
    """
    if resume and out is None:
        raise UserError("--resume needs --out RUN, the folder of the run to continue")
    with sources_of(config):
        loaded = _load(config, settings)
        if config is not None:
            refuse_other_shards(config, loaded)
        name = config.stem if config is not None else loaded.preset or "run"
        folder = out or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
        return _train(context.obj, loaded, folder, resume)


def _train(interrupt: Interrupt | None, loaded: Config, folder: Path, resume: bool) -> int:
    from fedmpi import api  # slow: after the configuration has been validated
    from fedmpi.records.progress import show_summary

    gc.freeze()  # collecting the garbage of torch's import takes half a second at exit
    stop = interrupt.asked if interrupt else None
    run = api.run(loaded, out=folder, resume=resume, progress=True, stop=stop)
    stopped = run.ending == "stopped"
    if interrupt is not None:
        interrupt.ignore() if stopped else interrupt.restore()
    if world_rank() in (0, None):
        if run.summary["versions"]["mpi"] == "none":
            print("one process: no MPI is installed (pip install 'fedmpi[mpi]' brings one)")
        if stopped:
            print(f"stopped after saving: continue with --resume --out {folder}", flush=True)
        else:
            show_summary(run.summary, str(folder))
    return STOPPED_AFTER_SAVING if stopped else 0


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or folders that contain runs.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Output file.")] = Path("report.html"),
    title: Annotated[str, typer.Option("--title", metavar="TEXT", help="Title of the report.")] = "",
) -> None:
    """Write an HTML page that shows and compares runs. It opens without a network.

    Example: fedmpi report runs/fedavg-0 runs/fedavg-1 runs/fedsampling-0 --out report.html
    """
    from fedmpi.report.page import write_report

    size = write_report(runs, out, title)
    print(f"written to {out} ({size / 1e6:.1f} MB): open it in a browser")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    form: Annotated[str, typer.Option("--format", metavar="FORM", help="Format: safetensors, torchscript or onnx.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Output file [RUN/model.onnx, .pt].")
    ] = None,
) -> None:
    """Export a run's final model for other programs. The command compares the outputs of file and model.

    Example: fedmpi export runs/first --format onnx
    """
    from fedmpi.report.export import export as write

    path, difference = write(run, form, out)
    compared = "" if form == "safetensors" else f"; logits agree to {difference:.1g} of the largest"
    print(f"written to {path}{compared}")


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    interval: Annotated[
        float, typer.Option("--interval", metavar="S", help="Seconds between two lines of plain output.")
    ] = 2.0,
) -> None:
    """Follow a run from another terminal. Ctrl-C stops the command, not the run.

    Example: fedmpi watch runs/first
    """
    from fedmpi.records.progress import watch as follow

    follow(run, interval)


@app.command()
def sweep(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="TOML configuration with a table [sweep].")],
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", parser=named_folder, help="Folder of all runs.")
    ] = None,
    index: Annotated[int | None, typer.Option("--index", metavar="I", help="Start only run I, counted from 0.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", min=1, help="Number of concurrent runs.")] = 1,
    ranks: Annotated[int, typer.Option("--ranks", metavar="R", min=1, help="Number of ranks per run.")] = 1,
    prepare_only: Annotated[bool, typer.Option("--prepare", help="Only prepare the shards.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list the runs; start none.")] = False,
) -> int:
    """Run all runs of a sweep file. If you repeat the command, the sweep resumes.

    Finished runs are skipped. A failing run does not stop the others: the exit code is then 1, and 75 after a signal.
    With --index under mpiexec or srun, all ranks work on the selected run, as with fedmpi train.

    Example: fedmpi sweep docs/examples/sweep.toml --out runs/sweep --dry-run
    """
    from fedmpi.mpi import read_launch
    from fedmpi.sweeps import run as runner
    from fedmpi.sweeps.plan import plan_sweep

    planned = plan_sweep(file, out, settings or [], ranks)
    if index is not None and not 0 <= index < len(planned.runs):
        raise UserError(f"--index {index}: {file} describes runs 0 to {len(planned.runs) - 1}")
    runs = planned.runs if index is None else (planned.runs[index],)
    launched = read_launch() is not None
    if launched and not dry_run and index is None:
        raise UserError(
            "fedmpi sweep starts the ranks of its runs. Start it by itself with --ranks, or name one --index"
        )
    interrupt: Interrupt | None = context.obj
    stop = interrupt.asked if interrupt else lambda: False
    if dry_run:
        runner.show_plan(planned, runs)
        runner.unfinished(runs)
        return 0
    if prepare_only:
        prepared = runner.prepare_shards(runner.unfinished(runs), runner.show_line, stop)
        runner.write_notes(runs)
        print(*(f"run in {run.folder}" for run in runs), sep="\n", flush=True)
        return 0 if prepared else STOPPED_AFTER_SAVING
    if launched:
        [run] = runs
        if runner.is_finished(run):
            if world_rank() in (0, None):
                print(f"{run.folder} holds the finished run")
            return 0
        if world_rank() in (0, None):
            runner.write_notes(runs)
        return _train(interrupt, run.config, run.folder, resume=True)
    outcomes = runner.run_sweep(planned, runs, jobs, stop, runner.show_line)
    runner.show_outcomes(planned, outcomes)
    return runner.exit_code(outcomes)


@app.command()
def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or folders that contain runs.")
    ],
    by: Annotated[str | None, typer.Option("--by", metavar="KEY,...", help="Keys that define the rows.")] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", metavar="KEY", help="Record key to compare [test_accuracy].")
    ] = None,
    target: Annotated[
        float | None, typer.Option("--target", metavar="X", help="Target value; for losses, the value to fall below.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option("--reference", metavar="NAME", help="Reference row [the first].")
    ] = None,
    last: Annotated[int, typer.Option("--last", metavar="N", min=1, help="Average over the last N rounds.")] = 1,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Also write the numbers to FILE.")] = None,
    latex: Annotated[
        Path | None, typer.Option("--latex", metavar="FILE", help="Also write the tables to FILE.")
    ] = None,
) -> None:
    """Compare runs over seeds, with corrected confidence intervals.

    Runs on different data appear in separate tables. Unfinished runs are listed but not compared.

    Example: fedmpi compare runs/sweep --reference FedAvg --target 0.9
    """
    from fedmpi.results.comparison import as_csv, as_latex, compare_runs, print_comparison
    from fedmpi.results.loading import read_runs

    keys = [key.strip() for key in by.split(",") if key.strip()] if by else []
    comparison = compare_runs(read_runs(runs), keys, metric, target, reference, last)
    print_comparison(comparison, console())
    for path, text in ((csv, as_csv), (latex, as_latex)):
        if path is not None:
            write_named(path, text(comparison).encode())
            print(f"written to {path}")


@app.command("presets")
def list_presets() -> None:
    """List all presets, each with paper and example.

    Example: fedmpi presets
    """
    screen = console()
    for preset in presets():
        screen.print(Text(paragraph(preset.title, f"{preset.name}  ", "    "), style="bold"), soft_wrap=True)
        print(paragraph(preset.paper, "    paper: "))
        print(paragraph(_listed(preset.table), "    components: "))
        if preset.digits:
            print(paragraph(f"{_listed(preset.digits)} (on the embedded digits instead)", "    digits: "))
        print(paragraph(preset.example, "    try:   "), end="\n\n")


def _listed(table: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in dotted(table).items())


@app.command("components")
def list_all_components(
    choice: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show only this component: a name or module:object.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help='List only this kind, e.g. "data sampler".')
    ] = None,
) -> None:
    """List all components with their options. Each has kind, name, defaults and source.

    Example: fedmpi components --kind "client sampler"
    """
    one = choice and (describe(choice) if kind is None else resolve(known_kind(kind), choice))
    for part in [one] if one else components(kind):
        print(paragraph(f"{part.kind}, chosen by {', '.join((part.key, *KINDS[part.kind].further))}", f"{part.name}  "))
        if part.title:
            print(paragraph(part.title, "  "))
        for name, field in part.fields.items():
            value = getattr(field.default, "name", field.default)  # the name of a component
            default = "required" if field.is_required() else f"default: {value!r}"
            text = f"{name} ({type_text(field.annotation)}, {default})  {one_line(field.description)}"
            print(paragraph(text.rstrip(), "    ", " " * 8))
        module = getattr(unwrap(part.object), "__module__", "?")
        print(paragraph(str(part.source or module), "  source: "), end="\n\n")


@app.command()
def check(
    choice: Annotated[str, typer.Argument(metavar="NAME", help="Your component as module:object, or a built-in name.")],
    settings: Settings = None,
    kind: Annotated[str | None, typer.Option("--kind", metavar="KIND", help="Kind, if it has no decorator.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the runs on 2 and 3 ranks.")] = False,
) -> int:
    """Check whether a component satisfies its interface. The exit code is 1 if one check fails.

    Example: fedmpi check uniform --kind "client sampler" --quick
    """
    from fedmpi.testing import checks, perform

    failed = False
    given = {key: value for setting in settings or [] for key, value in assignment(setting).items()}
    for result in perform(checks(choice, given, kind, runs=not quick)):
        print(result, flush=True)
        failed = failed or result.outcome == "FAILED"
    return int(failed)


@app.command("config")
def show_config(
    config: ConfigFile = None,
    settings: Settings = None,
    help_keys: Annotated[bool, typer.Option("--help-keys", help="Print all keys with their meaning instead.")] = False,
) -> None:
    """Print the complete configuration as TOML. Preset, file and --set are applied.

    Example: fedmpi config --set preset=fedsampling --set samples.size.epsilon=1
    """
    if help_keys:
        for key, default, description in key_descriptions():
            if key.startswith("["):
                print("\n" + paragraph(description, f"{key}  ", "    "))
            else:
                print(paragraph(f"{key} (default: {default})" if default else key, further="    "))
                print(paragraph(description, "    "))
        return
    with sources_of(config):
        loaded = _load(config, settings)
        for remark in remarks(flat_table(loaded)):
            print(f"# {remark}")
        print(config_toml(loaded), end="")


@app.command()
def inspect(
    shards: Annotated[str, typer.Argument(metavar="SHARDS", help='A folder of shards, or "digits".')],
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Write a figure to FILE.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check the SHA-256 of every file.")] = False,
) -> None:
    """Show clients, sizes, classes and heterogeneity of a data set.

    Example: fedmpi inspect digits
    """
    from fedmpi.data.opening import open_store
    from fedmpi.describe.data import plot_store, show_store

    store = open_store(shards, verify=verify)
    show_store(store, console(), verify)
    if plot is not None:
        plot_store(store, plot)
        print(f"drawn to {plot}")


@app.command()
def estimate(
    sizes: Annotated[str, typer.Option("--sizes", metavar="SHARDS", help='A folder of shards, or "digits".')],
    epsilon: Annotated[float, typer.Option("--epsilon", metavar="E", help="ε of one size report.")],
    threshold: Annotated[
        int, typer.Option("--threshold", metavar="M", help="Size threshold: sizes are clipped to M - 1.")
    ],
    wanted: Annotated[
        int | None, typer.Option("--wanted", metavar="K", help="Sample budget per round [a tenth of the samples].")
    ] = None,
    participants: Annotated[
        int | None, typer.Option("--participants", metavar="m", help="Number of clients queried [all].")
    ] = None,
) -> None:
    """Show the error of private size reports, to choose M and ε.

    Example: fedmpi estimate --sizes digits --epsilon 3 --threshold 300
    """
    from fedmpi.data.opening import open_store
    from fedmpi.describe.estimates import assess, print_assessments

    held = open_store(sizes).sizes
    asked = len(held) if participants is None else participants
    samples = max(1, round(float(held.mean()) * asked / 10)) if wanted is None else wanted
    found = assess(held, epsilon, threshold, samples, participants)
    print_assessments(found, epsilon, threshold, samples, console())


@app.command()
def submit(
    config: ConfigFile = None,
    settings: Settings = None,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", min=1, help="Number of nodes.")] = 1,
    ranks: Annotated[int, typer.Option("--ranks-per-node", metavar="R", min=1, help="Ranks per node.")] = 1,
    gpus: Annotated[int, typer.Option("--gpus-per-node", metavar="G", min=0, help="GPUs per node.")] = 0,
    limit: Annotated[str, typer.Option("--time", metavar="T", help="Time limit in sbatch's format.")] = "01:00:00",
    array: Annotated[
        str,
        typer.Option(
            "--array",
            metavar="SPEC",
            help="Array in sbatch's format; %a in a value is the task index. For a sweep, %N runs N at a time.",
        ),
    ] = "",
    mem: Annotated[str, typer.Option("--mem", metavar="SIZE", help="Memory per node, such as 64G.")] = "",
    cpus: Annotated[int, typer.Option("--cpus-per-rank", metavar="C", min=0, help="CPU cores per rank.")] = 0,
    partition: Annotated[str, typer.Option("--partition", metavar="NAME", help="Partition.")] = "",
    account: Annotated[str, typer.Option("--account", metavar="NAME", help="Account.")] = "",
    qos: Annotated[str, typer.Option("--qos", metavar="NAME", help="Quality of service.")] = "",
    out: Annotated[Path | None, typer.Option("--out", metavar="RUN", help="Folder of the run.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script and submit nothing.")] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Write script and configuration to RUN, and submit nothing.")
    ] = False,
    scripts: Annotated[
        Path | None, typer.Option("--scripts", metavar="DIR", help="Write the job scripts to DIR and submit nothing.")
    ] = None,
) -> None:
    """Submit a run, or the runs of a sweep, to SLURM. They resume after time limits, and RUN contains the script.

    Options such as --mem replace the site settings.

    Example: fedmpi submit run.toml --nodes 2 --ranks-per-node 8 --time 12:00:00 --array 0-3 --set seed=%a --dry-run
    """
    from fedmpi.jobs import submission

    if scripts is not None:
        print("\n".join(map(str, submission.write_scripts(scripts))))
        return
    if config is None and not settings:
        _load(config, settings)  # rejects a wrong configuration
    folder = out or Path("runs") / f"{config.stem if config else 'job'}-{datetime.now():%Y%m%d-%H%M%S}"
    with sources_of(config):
        ready = submission.prepare_submission(
            config, settings or [], folder, nodes, ranks, gpus, limit, array, mem=mem, cpus_per_rank=cpus,
            partition=partition, account=account, qos=qos,
        )  # fmt: skip
    print(*(f"warning: {text}\n" for text in ready.warnings), sep="", end="", file=sys.stderr)
    script = submission.write(ready) if write else None
    if dry_run:
        print(ready.script, end="")
        return
    if script is not None:
        print(f"{ready.words}\nto submit it: sbatch {script}")
        return
    number = submission.submit(ready)
    print(f"job {number}: {ready.words}\nlogs, script and run: {ready.folder}\nto end it for good: scancel {number}")


@app.command()
def doctor() -> int:
    """Show the resources of this machine or allocation. The exit code is 1 if no run can start.

    Example: mpiexec -n 3 fedmpi doctor
    """
    from fedmpi.doctor import examine

    return int(not examine())


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def prepare(context: typer.Context) -> int:
    """Prepare a data set. The arguments are those of `python -m data_prep`.

    Example: fedmpi prepare digits --partition iid --clients 20 --shards 2 --out shards/digits
    """
    from data_prep.__main__ import run

    return run(list(context.args))


def _load(config: Path | None, settings: list[str] | None) -> Config:
    if config is None and not settings:
        raise UserError("nothing to run. Give a CONFIG.toml or --set preset=NAME (`fedmpi presets` lists the names)")
    return load_config(config, settings or [])
