"""Job scripts: what is asked for stands in them, wrong input is refused before; those in jobs/ are the package's."""

from __future__ import annotations

import json
import os
import shutil
import signal as signals
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedmpi import UserError
from fedmpi.jobs.site import Site, load_site, site_file
from fedmpi.jobs.submission import (
    SCRIPTS,
    Submission,
    fill_template,
    prepare_submission,
    seconds_of,
    shown_time,
    submit,
    tasks_of,
    write_scripts,
)

REPOSITORY = Path(__file__).parents[2]
FEDAVG = ("preset=fedavg",)


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of the site's settings, empty; the working directory is a folder of the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "xdg" / "fedmpi" / "site.toml"
    path.parent.mkdir(parents=True)
    return path


def ready(
    settings: Sequence[str] = FEDAVG,
    config: Path | None = None,
    out: str = "runs/mine",
    nodes: int = 2,
    ranks: int = 4,
    gpus: int = 0,
    time: str = "12:00:00",
    array: str = "",
) -> Submission:
    return prepare_submission(config, settings, Path(out), nodes, ranks, gpus, time, array)


def lines(submission: Submission) -> list[str]:
    return submission.script.splitlines()


def words_of(submission: Submission, tmp_path: Path, task: str = "") -> list[list[str]]:
    """What the script starts and with which options, told by a launcher that only writes down its arguments."""
    arguments = tmp_path / "arguments"
    fake = tmp_path / "bin"
    fake.mkdir(exist_ok=True)
    for name in ("srun", "mpiexec", "mylauncher"):
        (fake / name).write_text(f'#!/bin/bash\nprintf "%s\\0" "${{0##*/}}" "$@" > {arguments}\nexit 0\n')
        (fake / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{fake}:{os.environ['PATH']}", "SLURM_JOB_ID": "1"}
    environ |= {"SLURM_ARRAY_TASK_ID": task} if task else {}
    done = subprocess.run(["bash", "-c", submission.script], env=environ, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return [arguments.read_text().split("\0")[:-1]]


def test_the_script_asks_for_what_was_asked_for(tmp_path: Path) -> None:
    options = [line.removeprefix("#SBATCH ") for line in lines(ready()) if line.startswith("#SBATCH")]
    assert {"--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=1", "--time=12:00:00", "--requeue"} <= set(options)
    assert {"--signal=B:USR1@120", "--open-mode=append", f"--chdir={tmp_path}"} <= set(options)
    assert f"--output={tmp_path}/runs/mine/job-%j.log" in options and "--job-name=fedmpi-mine" in options
    assert not [option for option in options if "gpu" in option or "array" in option or "account" in option]
    [[launcher, *words]] = words_of(ready(), tmp_path)
    assert launcher == "srun" and "--mpi=pmi2" in words and "--kill-on-bad-exit=1" in words
    command = words[words.index(sys.executable) :]
    assert command == [
        *(sys.executable, "-m", "fedmpi", "train", "--set", "preset=fedavg"),
        *("--out", f"{tmp_path}/runs/mine", "--resume"),
    ]


def test_gpus_are_asked_for_and_used(site: Path, tmp_path: Path) -> None:
    site.write_text(
        'partition = "cpu"\ncpus_per_rank = 2\n[gpu]\npartition = "gpu"\ngpu_request = "--gres=gpu:{gpus}"\n'
    )
    with_gpus = ready(gpus=4)
    assert {"#SBATCH --partition=gpu", "#SBATCH --gres=gpu:4", "#SBATCH --cpus-per-task=2"} <= set(lines(with_gpus))
    assert "cluster.device=cuda" in words_of(with_gpus, tmp_path)[0]
    assert "cluster.device=cuda" not in ready((*FEDAVG, 'cluster.device="auto"'), gpus=4).script
    assert "#SBATCH --partition=cpu" in lines(ready())
    site.write_text("")
    assert "#SBATCH --gpus-per-node=4" in lines(ready(gpus=4))


def test_each_task_of_an_array_has_its_folder_and_its_settings(tmp_path: Path) -> None:
    array = ready((*FEDAVG, "seed=%a"), array="0-3")
    assert "#SBATCH --array=0-3" in lines(array)
    assert f"#SBATCH --output={tmp_path}/runs/mine/job-%A_%a.log" in lines(array)
    [words] = words_of(array, tmp_path, task="3")
    assert "seed=3" in words and words[words.index("--out") + 1] == f"{tmp_path}/runs/mine/3"
    placed = ready((*FEDAVG, "seed=%a"), array="7", out="runs/seed-%a/x")
    [words] = words_of(placed, tmp_path, task="7")
    assert words[words.index("--out") + 1] == f"{tmp_path}/runs/seed-7/x"


def test_names_with_blanks_and_signs_arrive_as_they_are(tmp_path: Path) -> None:
    config = tmp_path / "my run $HOME.toml"
    config.write_text('preset = "fedavg"\n')
    odd = ready(["model.name='mlp'", "seed=3"], config=config, out='of 50% "x"')
    [words] = words_of(odd, tmp_path)
    folder = f'{tmp_path}/of 50% "x"'
    assert words[-7:-1] == ["--set", "model.name='mlp'", "--set", "seed=3", "--out", folder]
    assert f"{folder}/job.toml" in words and odd.configuration == config.read_bytes()
    assert f'#SBATCH --output="{tmp_path}/of 50%% \\"x\\"/job-%j.log"' in lines(odd)


def test_the_site_says_launcher_modules_environment_and_account(site: Path, tmp_path: Path) -> None:
    site.write_text(
        'launcher = "mylauncher -n {ranks} --per {ranks_per_node}"\nlauncher_options = ["--quiet"]\naccount = "p1"\n'
        'environment = ["export FEDMPI_TRIED=1", "command -v true"]\nsbatch = ["--qos=long"]\n'
        'command = "box run fedmpi"\n'
    )
    submission = ready()
    [words] = words_of(submission, tmp_path)
    assert words[:9] == ["mylauncher", "-n", "8", "--per", "4", "--quiet", "box", "run", "fedmpi"]
    assert {"#SBATCH --account=p1", "#SBATCH --qos=long", "export FEDMPI_TRIED=1"} <= set(lines(submission))
    site.write_text('modules = ["cray-python"]\nmpi = "cray"\n')
    assert lines(ready())[0] == "#!/bin/bash -l"
    assert {"module load cray-python", "fedmpi=(fedmpi)"} <= set(lines(ready()))
    assert "launch=(srun --mpi=cray_shasta --kill-on-bad-exit=1)" in lines(ready())
    site.write_text('launcher = "mpiexec"\nmpi = "openmpi"\nenvironment = ["false"]\n')
    assert "launch=(mpiexec -n 8 --bind-to none)" in lines(ready())
    failed = subprocess.run(["bash", "-c", ready().script], capture_output=True, text=True, timeout=30)
    assert failed.returncode == 1 and "failed in the job, from site.toml: false" in failed.stderr
    site.write_text('srun_mpi = "pmix_v4"\nmpi = "openmpi"\n')
    assert "launch=(srun --mpi=pmix_v4 --kill-on-bad-exit=1)" in lines(ready())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lancher = 1", "unknown key lancher in {}; did you mean launcher?"),
        ("zzzz = 1", "unknown key zzzz in {}; there are launcher, mpi,"),
        ("[gpu]\npartitoin = 'x'", "unknown key gpu.partitoin in {}; did you mean gpu.partition?"),
        ("modules = 'gcc'", "give a list of texts"),
        ("mpi = 'mvapich'", "mpi = 'mvapich'"),
        ("cpus_per_rank = 0", "cpus_per_rank = 0"),
        ("[gpu]\ncpus_per_rank = 0", "gpu.cpus_per_rank = 0"),
        ("launcher = 'x {rank}'", "in braces stand"),
        ("launcher = ' '", "at least one word"),
        ('account = "a\\nb"', "give one line"),
        ("sbatch = ['qos=long']", "is no option of sbatch"),
        ("gpu = 3", "gpu is a table"),
        ("launcher =", "is not valid TOML"),
    ],
)
def test_wrong_settings_of_the_site_are_refused(text: str, said: str, site: Path) -> None:
    site.write_text(text)
    with pytest.raises(UserError) as refused:
        ready()
    assert said.format(site) in str(refused.value) and str(site) in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"settings": ["local.lrr=1"]}, "unknown key local.lrr in --set local.lrr=1; did you mean local.lr?"),
        ({"settings": ["preset=fedavg", "seed=%a"]}, "give --array"),
        ({"array": "0-3"}, "its 4 tasks would all be the same run"),
        ({"settings": ["rounds=%a"], "array": "0-2"}, "rounds = 0"),
        ({"array": "3-1"}, "--array 3-1: give numbers and ranges"),
        ({"array": "1%0"}, "--array 1%0: give"),
        ({"time": "soon"}, "--time soon: give minutes"),
        ({"time": "0"}, "--time 0"),
        ({"time": "3"}, "told to save 120 s before the end"),
        ({"nodes": 0}, "--nodes 0"),
        ({"ranks": 0}, "--ranks-per-node 0"),
        ({"gpus": -1}, "--gpus-per-node -1"),
        ({"settings": ["preset=fedavg", "data.source=shards/none"]}, "shards/none"),
    ],
)
def test_wrong_jobs_are_refused(asked: dict[str, object], said: str) -> None:
    with pytest.raises(UserError) as refused:
        ready(**asked)  # type: ignore[arg-type]
    assert said in str(refused.value)


def test_times_and_arrays_are_read_as_sbatch_does() -> None:
    times = {"90": 5400, "90:30": 5430, "2:00:00": 7200, "1-12": 129600, "1-12:30": 131400, "1-00:00:01": 86401}
    assert {time: seconds_of(time) for time in times} == times
    assert [shown_time(seconds) for seconds in (5430, 131400)] == ["01:30:30", "1-12:30:00"]
    assert tasks_of("0-6:3,2,2%5") == [0, 2, 3, 6]


def test_submitting_keeps_script_and_configuration_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "run.toml"
    config.write_text('preset = "fedavg"\n')
    asked = ready((), config=config)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="there is no sbatch on the PATH"):
        submit(asked)
    assert not (tmp_path / "runs").exists()
    fake = tmp_path / "bin"
    fake.mkdir()
    for said, code in (("echo 12;", 0), ("echo sbatch: error: no such partition >&2; ", 1)):
        (fake / "sbatch").write_text(f"#!/bin/bash\n{said}exit {code}\n")
        (fake / "sbatch").chmod(0o755)
        monkeypatch.setenv("PATH", f"{fake}:/bin:/usr/bin")
        if code == 0:
            assert submit(asked) == "12"
            assert (tmp_path / "runs/mine/job.sbatch").read_text() == asked.script
            assert (tmp_path / "runs/mine/job.toml").read_bytes() == config.read_bytes()
        else:
            with pytest.raises(UserError, match=r"sbatch refuses the job \(no such partition\)"):
                submit(asked)


def test_the_scripts_for_use_by_hand_are_those_of_the_package(tmp_path: Path) -> None:
    for path in write_scripts(tmp_path / "scripts"):
        assert path.read_text() == (REPOSITORY / "jobs" / path.name).read_text(), "run: fedmpi submit --scripts jobs"
    written = [fill_template(name) for name in SCRIPTS] + [ready().script, ready(gpus=1).script]
    for script in written:
        assert not [line for line in script.splitlines() if line.startswith("@")]
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert (checked.returncode, checked.stderr) == (0, "")
        if shutil.which("shellcheck"):
            checked = subprocess.run(["shellcheck", "-"], input=script, text=True, capture_output=True)
            assert checked.returncode == 0, checked.stdout


def test_the_site_file_lies_where_xdg_says() -> None:
    assert site_file({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}) == Path("/x/fedmpi/site.toml")
    assert site_file({"HOME": "/h"}) == site_file({"XDG_CONFIG_HOME": "relative", "HOME": "/h"})
    assert site_file({"HOME": "/h"}) == Path("/h/.config/fedmpi/site.toml")
    assert load_site(Path("/nowhere/site.toml")) == Site()


def test_a_user_without_a_home_has_no_settings_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert site_file({}) == Path("/.config/fedmpi/site.toml")
    assert site_file({"XDG_CONFIG_HOME": "/x"}) == Path("/x/fedmpi/site.toml")


def rank_that_saves(folder: Path) -> Path:
    """A program in the place of the launcher and its ranks: saves when told to, and ends with the code in CODE.

    In ROUND it has finished a round; with HEALS the MPI of its ranks comes up in that start only, and ends as
    UNSTARTED says before.
    """
    path = folder / "launcher"
    path.write_text(
        '#!/bin/bash\ntrap "exit ${CODE:-75}" USR1\n'
        'if [ -n "${ROUND:-}" ]; then echo "{}" >> "$ROUND"; fi\n'
        'echo started >> "$STARTED"\n'
        'if [ -n "${HEALS:-}" ]; then [ "$(wc -l < "$STARTED")" -ge "$HEALS" ] && exit 0\n'
        '[ "$UNSTARTED" = 76 ] || { mkdir -p "${FEDMPI_NOT_STARTED%/*}"; touch "$FEDMPI_NOT_STARTED"; }\n'
        "exit ${UNSTARTED%% *}; fi\n"
        "for ((i = 0; i < 300; i++)); do sleep 0.1; done\nexit 9\n"
    )
    path.chmod(0o755)
    return path


FACTS = {
    "running": "JobState=RUNNING Reason=None Restarts=0 PreemptTime=None",
    "cancelled": "JobState=COMPLETING Reason=None Restarts=0 PreemptTime=None",
    "requeued": "JobState=COMPLETING Reason=None Restarts=1 PreemptTime=None",
    "time limit": "JobState=COMPLETING Reason=TimeLimit Restarts=0 PreemptTime=None",
    "preempted": "JobState=COMPLETING Reason=None Restarts=0 PreemptTime=2030-01-01T00:00:00",
    "silent": "",
}


@pytest.mark.parametrize(
    ("facts", "signal", "code", "asks"),
    [
        ("running", "USR1", 75, True),
        ("running", "USR1", 137, True),
        ("running", "USR1", 0, False),
        ("running", "USR1", 1, False),
        ("running", "TERM", 75, True),
        ("running", "TERM", 137, False),
        ("running", "INT", 75, False),
        ("cancelled", "TERM", 75, False),
        ("cancelled", "USR1", 75, False),
        ("requeued", "TERM", 75, False),
        ("time limit", "TERM", 137, True),
        ("preempted", "TERM", 75, True),
        ("silent", "TERM", 75, False),
    ],
)
def test_what_slurm_says_of_a_job_decides_whether_it_is_queued_again(
    facts: str, signal: str, code: int, asks: bool, tmp_path: Path
) -> None:
    """What the facts look like in each case was taken from SLURM 22.05; tests/slurm tries the cases themselves."""
    job = supervised(tmp_path, FACTS[facts], signal, CODE=str(code))
    assert job.code == code, job.output
    assert job.asked == ("requeue 1\n" if asks else ""), job.output


@dataclass(frozen=True)
class Ended:
    """How a script ended: code, words, what it asked scontrol for, and how often it started the ranks."""

    code: int
    output: str
    asked: str
    starts: int


def supervised(folder: Path, facts: str, signal: str, **environ: str) -> Ended:
    """Run jobs/train.sbatch with ranks in play that save, an SLURM that says `facts`, and a signal, if any."""
    started, asked, fake = folder / "started", folder / "asked", folder / "bin"
    fake.mkdir(exist_ok=True)
    for file in (started, asked):
        file.unlink(missing_ok=True)
    (fake / "scontrol").write_text(
        f'#!/bin/bash\n[ "$1" = show ] && echo "JobId=1 JobName=x {facts}" || echo "$*" >> {asked}\n'
    )
    (fake / "scontrol").chmod(0o755)
    job = subprocess.Popen(
        ["bash", str(REPOSITORY / "jobs" / "train.sbatch"), "x.toml", str(folder / "RUN")],
        env={
            **os.environ,
            **{"PATH": f"{fake}:{os.environ['PATH']}", "FEDMPI_LAUNCH": str(rank_that_saves(folder))},
            **{"STARTED": str(started), "SLURM_JOB_ID": "1", **environ},
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signals.signal(signals.SIGINT, signals.SIG_DFL),  # ignored by what runs in the background
    )
    while signal and not started.exists() and job.poll() is None:
        pass
    if signal:
        job.send_signal(getattr(signals, f"SIG{signal}"))
    output, _ = job.communicate(timeout=60)
    return Ended(
        job.returncode, output, asked.read_text() if asked.exists() else "", started.read_text().count("started")
    )


def test_a_job_that_never_finishes_a_round_is_not_queued_again_for_ever(tmp_path: Path) -> None:
    """Five restarts without a round are enough; one more round, or submitting the job again, starts the count anew."""
    (tmp_path / "RUN").mkdir()

    def ends(restarts: int, **more: str) -> bool:
        facts = f"JobState=RUNNING Reason=None Restarts={restarts} PreemptTime=None"
        job = supervised(tmp_path, facts, "USR1", CODE="75", SLURM_RESTART_COUNT=str(restarts), **more)
        assert job.code == 75
        assert ("not queued again" in job.output) != (job.asked == "requeue 1\n"), job.output
        return not job.asked

    assert [ends(restarts) for restarts in range(6)] == [False] * 5 + [True]
    assert not ends(0)
    assert [ends(restarts) for restarts in (1, 2, 3, 4)] == [False] * 4
    assert not ends(5, ROUND=str(tmp_path / "RUN" / "metrics.jsonl"))
    assert [ends(restarts) for restarts in range(6, 12)] == [False] * 5 + [True]


@pytest.mark.parametrize("sign", ["76", "143 and a mark"])
@pytest.mark.parametrize(("heals", "code", "starts"), [("3", 0, 3), ("9", 76, 4)])
def test_ranks_whose_mpi_does_not_start_are_started_again(
    heals: str, code: int, starts: int, sign: str, tmp_path: Path
) -> None:
    """The launcher's code says so, or, where it ends the other ranks, a mark that a rank has left."""
    job = supervised(tmp_path, FACTS["running"], "", HEALS=heals, UNSTARTED=sign)
    assert (job.code, job.starts, job.asked) == (code, starts, "")
    assert not (tmp_path / "RUN" / "not-started").exists()
    assert job.output.count("MPI did not start: the ranks are started again") == min(starts, 4) - 1


def test_prepare_is_data_prep(tmp_path: Path) -> None:
    """In one process: the command hands its arguments over as they are."""
    words = ["digits", "--partition", "iid", "--clients", "4", "--shards", "1", "--out", str(tmp_path / "digits")]
    done = subprocess.run(
        [sys.executable, "-m", "fedmpi", "prepare", *words], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "digits" / "manifest.json").read_text())["clients"] == 4
