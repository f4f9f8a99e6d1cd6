"""Job scripts: they request what was asked for, wrong input is rejected, and they end as SLURM's facts demand."""

from __future__ import annotations

import os
import re
import shutil
import signal as signals
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedmpi import UserError
from fedmpi.cli import app
from fedmpi.config.site import Site, load_site, site_file
from fedmpi.jobs.submission import Submission, prepare_submission, submit, write, write_scripts

REPOSITORY = Path(__file__).parents[2]
FEDAVG = ("preset=fedavg",)


SWEEP = 'preset = "fedavg"\n[sweep]\nseed = [0, 1, 2]\n"local.lr" = [0.1, 0.2]\n'


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of the site settings, without a file; the working directory is the test's folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "xdg" / "fedmpi" / "site.toml"
    path.parent.mkdir(parents=True)
    return path


def ready(settings: Any = FEDAVG, out: str = "runs/mine", **changes: Any) -> Submission:
    job = {"config": None, "nodes": 2, "ranks_per_node": 4, "gpus_per_node": 0, "time": "12:00:00"} | changes
    return prepare_submission(settings=settings, out=Path(out), **job)


def program(folder: Path, name: str, text: str) -> None:
    """Write a program into the folder `bin`."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / "bin" / name).chmod(0o755)


def run_script(folder: Path, script: str | Path, *words: str, **environ: str) -> list[str]:
    """Run a job script with launchers that write down their arguments; return these."""
    for name in ("srun", "mpiexec", "mylauncher"):
        program(folder, name, f'printf "%s\\0" "${{0##*/}}" "$@" > {folder}/arguments')
    path = f"{folder}/bin:{os.environ['PATH']}"
    command = ["bash", str(script), *words] if isinstance(script, Path) else ["bash", "-c", script]
    done = subprocess.run(
        command, env={**os.environ, "PATH": path, "SLURM_JOB_ID": "1", **environ}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return (folder / "arguments").read_text().split("\0")[:-1]


@pytest.mark.parametrize(
    ("site_text", "changes", "lines", "words"),
    [
        (
            "",
            {},
            "--nodes=2 --ntasks-per-node=4 --cpus-per-task=1 --time=12:00:00 --requeue --signal=B:USR1@120 "
            "--open-mode=append --chdir={0} --output={0}/runs/mine/job-%j.log --job-name=fedmpi-mine",
            "srun --mpi=pmi2 --kill-on-bad-exit=1 {1} -m fedmpi train --set preset=fedavg --out {0}/runs/mine --resume",
        ),
        (
            'partition = "cpu"\ncpus_per_rank = 2\n[gpu]\npartition = "gpu"\ngpu_request = "--gres=gpu:{gpus}"\n',
            {"gpus_per_node": 4},
            "--partition=gpu --gres=gpu:4 --cpus-per-task=2",
            "--set preset=fedavg --set cluster.device=cuda --out",
        ),
        ('partition = "cpu"\n[gpu]\npartition = "gpu"\n', {}, "--partition=cpu", "--set preset=fedavg --out"),
        ("", {"gpus_per_node": 4, "settings": [*FEDAVG, "cluster.device = auto"]}, "--gpus-per-node=4", "= auto --out"),
        (
            "",
            {"settings": (*FEDAVG, "seed=%a"), "array": "0-3"},
            "--array=0-3 --output={0}/runs/mine/job-%A_%a.log",
            "seed=3 --out {0}/runs/mine/3 --resume",
        ),
        (
            "",
            {"settings": (*FEDAVG, "seed=%a"), "array": "3", "out": "r/seed-%a/x"},
            "",
            "--out {0}/r/seed-3/x --resume",
        ),
        (
            'launcher = "mylauncher -n {ranks} --per {ranks_per_node}"\nlauncher_options = ["--quiet"]\n'
            'account = "p1"\nenvironment = ["export A=1", "true"]\nsbatch = ["--qos=long"]\ncommand = "box fedmpi"\n',
            {},
            "--account=p1 --qos=long",
            "mylauncher -n 8 --per 4 --quiet box fedmpi train",
        ),
        (
            'launcher = "mpiexec"\nmpi = "openmpi"\nenvironment = ["true"]\n',
            {},
            "",
            "mpiexec -n 8 --bind-to none fedmpi",
        ),
        ('mpi = "cray"\nenvironment = ["true"]\n', {}, "", "srun --mpi=cray_shasta --kill-on-bad-exit=1 fedmpi train"),
        (
            'account = "p1"\nsbatch = ["--qos=long"]\n[gpu]\ncpus_per_rank = 8\nmem = "9G"\n',
            {"gpus_per_node": 1, "account": "p2", "qos": "short", "partition": "x", "mem": "64G", "cpus_per_rank": 0},
            "--account=p2 --partition=x --mem=64G --cpus-per-task=8 --qos=long --qos=short",
            "",
        ),
        ('srun_mpi = "pmix_v4"\nmpi = "openmpi"\n', {}, "", "srun --mpi=pmix_v4 --kill-on-bad-exit=1"),
    ],
)
def test_the_script_requests_and_starts_what_was_asked_for(
    site_text: str, changes: dict[str, Any], lines: str, words: str, site: Path, tmp_path: Path
) -> None:
    site.write_text(site_text)
    script = ready(**changes).script
    options = {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert set(lines.format(tmp_path).split()) <= options
    assert site_text or changes or not [line for line in options if "gpu" in line or "array" in line or "=\n" in line]
    task = {"SLURM_ARRAY_TASK_ID": "3"} if "array" in changes else {}
    assert words.format(tmp_path, sys.executable) in " ".join(run_script(tmp_path, script, **task))


def test_modules_need_a_login_shell_and_a_line_that_fails_ends_the_job(site: Path) -> None:
    site.write_text('modules = ["no-such-module"]\nmpi = "mpich"\n')
    script = ready().script
    assert script.startswith("#!/bin/bash -l\n") and "\nmodule load no-such-module\n" in script
    failed = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert failed.returncode == 1 and "from site.toml: module load no-such-module" in failed.stderr


def test_names_with_blanks_and_signs_arrive_unchanged_and_the_job_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "my run $HOME.toml"
    config.write_text('preset = "fedavg"\n')
    odd = ready(["model.name='mlp'", "seed=3"], config=config, out='of 50% "x"')
    folder = tmp_path / 'of 50% "x"'
    words = run_script(tmp_path, odd.script)
    assert words[-7:-1] == ["--set", "model.name='mlp'", "--set", "seed=3", "--out", str(folder)]
    assert f"{folder}/job.toml" in words
    assert f'#SBATCH --output="{tmp_path}/of 50%% \\"x\\"/job-%j.log"' in odd.script.splitlines()
    shutil.rmtree(folder, ignore_errors=True)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="no sbatch"):
        submit(odd)
    assert not folder.exists()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin:/usr/bin")
    program(tmp_path, "sbatch", "echo 'sbatch: error: no such partition' >&2; exit 1")
    with pytest.raises(UserError, match=r"\(no such partition\)"):
        submit(odd)
    program(tmp_path, "sbatch", "echo '12;cluster'")
    assert submit(odd) == "12"
    assert (folder / "job.sbatch").read_text() == odd.script
    assert (folder / "job.toml").read_bytes() == config.read_bytes()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("lancher = 1", "lancher"),
        ("[gpu]\npartitoin = 'x'", "gpu.partitoin"),
        ("modules = 'gcc'", "modules"),
        ("mpi = 'mvapich'", "mpi"),
        ("cpus_per_rank = 0", "cpus_per_rank"),
        ("[gpu]\ncpus_per_rank = 0", "gpu.cpus_per_rank"),
        ("launcher = 'x {rank}'", "launcher"),
        ("launcher = ' '", "launcher"),
        ("gpu = 3", "gpu"),
        ("launcher =", "TOML"),
    ],
)
def test_wrong_settings_of_the_site_are_rejected(text: str, key: str, site: Path) -> None:
    site.write_text(text)
    with pytest.raises(UserError, match=re.escape(key)) as rejected:
        ready()
    assert str(site) in str(rejected.value)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"settings": ["local.lrr=1"]}, "local.lrr"),
        ({"settings": ["preset=fedavg", "seed=%a"]}, "--array 0-3"),
        ({"array": "0-3"}, "the tasks of --array 0-3 are all the same run"),
        ({"settings": [*FEDAVG, "rounds=%a"], "array": "1,0-6:3"}, "task 0: rounds = 0"),
        ({"settings": [*FEDAVG, "clients.count=%a"], "array": "5-45:20"}, "task 25: clients.count = 25"),
        ({"settings": [*FEDAVG, "seed=%a"], "array": "3-0"}, "--array 3-0 is not a list of tasks"),
        ({"mem": "64 GB"}, "mem = '64 GB' is not a size"),
        ({"array": "a-b"}, "--array a-b"),
        ({"settings": ["preset=fedavg", "data.source=shards/none"]}, "shards/none"),
        ({"settings": ["preset=fedavg", "clients.count=2000"]}, "the data hold 20 clients"),
        ({"settings": ["preset=fedavg", "model.name=nowhere:net"]}, "nowhere"),
        ({"settings": ["preset=fedavg", "seed=%a"], "array": "0-3%"}, "--array 0-3%"),
    ],
)
def test_wrong_jobs_are_rejected(job: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        ready(**job)


@pytest.mark.parametrize(
    ("given", "started"),
    [
        ("train c.toml --out RUN --set a=1", "train c.toml --out RUN --set a=1 --resume"),
        ("prepare digits --out S", "prepare digits --out S"),
        ("train c.toml --out RUN --set seed=%a", "train c.toml --out RUN/3 --set seed=3 --resume"),
        ("train c.toml --set seed=%a --out r/%a/x", "train c.toml --set seed=3 --out r/3/x --resume"),
        ("sweep s.toml --out RUNS", "sweep s.toml --out RUNS --index 3"),
    ],
)
def test_the_script_for_jobs_by_hand_starts_the_command(given: str, started: str, tmp_path: Path) -> None:
    [path] = write_scripts(tmp_path / "scripts")
    assert path.read_text() == (REPOSITORY / "jobs" / "job.sbatch").read_text()
    for script in (path.read_text(), ready().script):
        for check in (["bash", "-n"], *([["shellcheck", "-"]] if shutil.which("shellcheck") else [])):
            checked = subprocess.run(check, input=script, text=True, capture_output=True)
            assert checked.returncode == 0, checked.stdout + checked.stderr
    program(tmp_path, "fedmpi", 'echo "$@" > prepared; echo "run in RUNS/x"')
    task = {"SLURM_ARRAY_TASK_ID": "3"} if "3" in started else {}
    words = run_script(tmp_path, path, *given.split(), FEDMPI_COMMAND=str(tmp_path / "bin" / "fedmpi"), **task)
    assert " ".join(words[3:]) == started
    assert not given.startswith("sweep") or (tmp_path / "prepared").read_text() == f"{started} --prepare\n"


def test_a_sweep_becomes_an_array_and_its_script_runs_as_written(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text(SWEEP)

    def tasks(array: str, settings: Any = ()) -> list[str]:
        made = ready(settings, "runs", config=file, array=array).script
        return re.findall("#SBATCH --array=(.*)", made)

    assert tasks("") == ["0-5"] and tasks("1,3-5%2", ["rounds=2"]) == ["1,3-5%2"]
    for array, settings, said in (("0-6", (), "task 6, but"), ("", ["seed=%a"], "no effect"), ("x", (), "--array x")):
        with pytest.raises(UserError, match=said):
            tasks(array, settings)
    script = write(ready(["rounds=2"], "runs/all", config=file, array="%2"))
    assert script == tmp_path / "runs" / "all" / "job.sbatch" and not (script.parent / "job.toml").exists()
    assert "--array=0-5%2" in script.read_text()
    words = " ".join(run_script(tmp_path, script, SLURM_ARRAY_TASK_ID="3"))
    assert words.endswith(f"fedmpi sweep {file} --set rounds=2 --out {script.parent} --index 3")
    file.write_text('preset = "fedavg"\n[sweep]\n"clients.count" = [5, 2000]\n')
    with pytest.raises(UserError, match=r"run count=2000: clients\.count = 2000"):
        tasks("")


def test_jobs_with_gpus_that_lack_something_are_warned_of(site: Path) -> None:
    lacking = ready(gpus_per_node=2).warnings
    assert all(
        word in text
        for word, text in zip(("one CPU core", "no memory", "4 ranks of each node share 2 GPUs"), lacking, strict=True)
    )
    site.write_text('sbatch = ["--mem-per-cpu=2G"]\n')
    assert not ready(gpus_per_node=4, cpus_per_rank=4).warnings and not ready().warnings


def test_the_command_writes_the_script_and_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--gpus-per-node 1 --ranks-per-node 2 --cpus-per-rank 4 --mem 8G --qos q --out runs/x --write"
    assert not app(["submit", "--set", "preset=fedavg", *words.split()], standalone_mode=False)
    said, script = capsys.readouterr(), tmp_path / "runs" / "x" / "job.sbatch"
    assert said.err == "warning: the 2 ranks of each node share 1 GPU. Give --ranks-per-node 1\n"
    assert said.out.endswith(f"to submit it: sbatch {script}\n")
    assert {"#SBATCH --mem=8G", "#SBATCH --qos=q", "#SBATCH --cpus-per-task=4"} <= {*script.read_text().splitlines()}


def test_the_site_file_is_where_xdg_says() -> None:
    assert site_file({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}) == Path("/x/fedmpi/site.toml")
    assert site_file({"HOME": "/h"}) == site_file({"XDG_CONFIG_HOME": "relative", "HOME": "/h"})
    assert site_file({"HOME": "/h"}) == Path("/h/.config/fedmpi/site.toml")
    assert load_site(Path("/nowhere/site.toml")) == Site()


RANKS = """trap "exit ${CODE:-75}" USR1
[ -z "${ROUND:-}" ] || echo "{}" >> "$ROUND"
echo started >> "$STARTED"
if [ -n "${HEALS:-}" ]; then
  [ "$(wc -l < "$STARTED")" -ge "$HEALS" ] && exit 0
  [ "$UNSTARTED" = 76 ] || { mkdir -p "${FEDMPI_NOT_STARTED%/*}"; touch "$FEDMPI_NOT_STARTED"; }
  exit ${UNSTARTED%% *}
fi
for ((i = 0; i < 300; i++)); do sleep 0.1; done
exit 9"""
"""Ranks: they exit with CODE when signaled and finish a round if ROUND is given; with HEALS, MPI comes up that late."""


def supervised(folder: Path, facts: str, signal: str, **environ: str) -> tuple[int, str, int, str]:
    """Run a job with the facts of an SLURM, and a signal if any; return code, words for scontrol, starts and output."""
    started, asked = folder / "started", folder / "asked"
    for file in (started, asked):
        file.write_text("")
    program(folder, "ranks", RANKS)
    program(folder, "scontrol", f'[ "$1" = show ] && echo "JobId=1 JobName=x {facts}" || echo "$*" >> {asked}')
    job = subprocess.Popen(
        ["bash", str(REPOSITORY / "jobs" / "job.sbatch"), "train", "x.toml", "--out", str(folder / "RUN")],
        env={
            **os.environ,
            **{"PATH": f"{folder}/bin:{os.environ['PATH']}", "FEDMPI_LAUNCH": str(folder / "bin" / "ranks")},
            **{"STARTED": str(started), "SLURM_JOB_ID": "1", **environ},
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signals.signal(signals.SIGINT, signals.SIG_DFL),  # ignored in background jobs
    )
    while signal and not started.read_text() and job.poll() is None:
        pass
    if signal:
        job.send_signal(getattr(signals, f"SIG{signal}"))
    output, _ = job.communicate(timeout=60)
    return job.returncode, asked.read_text().strip(), started.read_text().count("started"), output


RUNNING = "JobState=RUNNING Reason=None Restarts=0 PreemptTime=None"
ENDING = "JobState=COMPLETING Reason=None Restarts=0 PreemptTime=None"


@pytest.mark.parametrize(
    ("facts", "signal", "code", "requeues"),
    [
        (RUNNING, "USR1", 75, True),
        (RUNNING, "USR1", 0, False),
        (RUNNING, "TERM", 75, True),
        (ENDING, "TERM", 75, False),
        (ENDING.replace("Restarts=0", "Restarts=1"), "TERM", 75, False),
        (ENDING.replace("Reason=None", "Reason=TimeLimit"), "TERM", 137, True),
        (ENDING.replace("PreemptTime=None", "PreemptTime=2030-01-01T00:00:00"), "TERM", 75, True),
        ("", "TERM", 75, False),
    ],
)
def test_the_facts_of_slurm_decide_whether_a_job_is_queued_again(
    facts: str, signal: str, code: int, requeues: bool, tmp_path: Path
) -> None:
    """The facts of each case are those of SLURM 22.05; tests/slurm tries the cases themselves."""
    ended, asked, _, output = supervised(tmp_path, facts, signal, CODE=str(code))
    assert (ended, asked) == (code, "requeue 1" if requeues else ""), output


def test_a_job_that_never_finishes_a_round_is_not_queued_again_forever(tmp_path: Path) -> None:
    """Five restarts without a round are enough; a round, or submitting the job again, resets the count."""
    (tmp_path / "RUN").mkdir()

    def ends(restarts: int, **more: str) -> bool:
        facts = RUNNING.replace("Restarts=0", f"Restarts={restarts}")
        code, asked, _, output = supervised(tmp_path, facts, "USR1", SLURM_RESTART_COUNT=str(restarts), **more)
        assert code == 75 and ("not queued again" in output) != (asked == "requeue 1"), output
        return not asked

    assert [ends(restarts) for restarts in range(6)] == [False] * 5 + [True]
    assert not ends(0)
    (tmp_path / "RUN" / "restarts").write_text("5")
    assert not ends(6, ROUND=str(tmp_path / "RUN" / "metrics.jsonl"))
    assert (tmp_path / "RUN" / "restarts").read_text() == "0\n"


@pytest.mark.parametrize(("sign", "heals", "code", "starts"), [("143 and a mark", "3", 0, 3), ("76", "9", 76, 4)])
def test_ranks_are_started_again_if_mpi_does_not_start(
    sign: str, heals: str, code: int, starts: int, tmp_path: Path
) -> None:
    """The exit code of the launcher says so, or a mark that a rank has left."""
    ended = supervised(tmp_path, RUNNING, "", HEALS=heals, UNSTARTED=sign)
    assert ended[:3] == (code, "", starts)
    assert not (tmp_path / "RUN" / "not-started").exists()
    assert ended[3].count("MPI did not start: the ranks are started again") == min(starts, 4) - 1
