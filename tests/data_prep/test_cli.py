"""The command line: lists, errors with one sentence and exit code 2, files in the folder."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data_prep.datasets import DATASETS
from data_prep.parts import flag
from fedmpi import UserError, components
from fedmpi.data.opening import open_store
from fedmpi.data.schema import MANIFEST, PARTIAL, read_manifest
from tests.data_prep.command import main

REPOSITORY = Path(__file__).resolve().parents[2]
Output = pytest.CaptureFixture[str]


def test_list_shows_every_data_set_and_every_partition_with_its_options(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    headings = [line for line in lines if line.partition(" (")[0].isupper()]
    assert [heading.partition(" (")[0] for heading in headings] == ["DATA SETS", "PARTITIONS", "OPTIONS OF DATA SETS"]
    for name, data_set in DATASETS.items():
        assert name in lines
        for source in data_set.sources:
            assert source.url in shown or source.url.rpartition("/")[0] in shown
    for part in components("partition"):
        assert part.name in lines and all(f"    {flag(option.name)}: " in shown for option in part.options)
    assert max(map(len, lines)) <= 80 or max(lines, key=len).strip().startswith("http")


def test_sizes_of_images_are_widths_and_heights() -> None:
    reading = DATASETS["imagefolder"].reading
    assert [reading.checked({"image_size": text}) for text in ("6x4", "5")] == [
        {"image_size": (6, 4)},
        {"image_size": (5, 5)},
    ]


def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    words = ["digits", "--partition", "iid", "--clients", "10", "--shards", "2", "--out", str(tmp_path / "s")]
    done = subprocess.run(
        [sys.executable, "-m", "data_prep", *words], capture_output=True, text=True, timeout=170, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr
    assert open_store(tmp_path / "s", verify=True).clients == 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("mnst --partition iid --clients 3 --out o", "no data set 'mnst'; did you mean mnist?"),
        ("digits --partition dirichlt --clients 3 --out o", "did you mean 'dirichlet'?"),
        ("digits --partition iid --alpha 1 --clients 3 --out o", "--alpha is no option of digits and iid"),
        (
            "digits --partition dirichlet --alhpa 1 --clients 3 --out o",
            "--alhpa is no option of digits and dirichlet; did you mean --alpha?",
        ),
        ("digits --partition dirichlet --alpha --clients 3 --out o", "--alpha needs a value"),
        ("digits --partition dirichlet --clients 3 --out o", "needs --alpha"),
        ("digits --partition iid --out o", "needs the number of clients"),
        ("digits --partition iid --clients 0 --out o", "--clients 0 is impossible"),
        ("digits --partition iid --clients 3 --shards 0 --out o", "--shards 0 is impossible"),
        ("digits --partition iid --clients 3 --val 1 --out o", "--val 1.0 is impossible"),
        ("digits --partition iid --clients 3", "--out"),
        ("digits --partition user --out o", "names its users"),
        ("digits --partition iid --clients 3 --seed -1 --out o", "--seed"),
        ("digits --partition iid --clients 3 --out o surplus", "what is 'surplus' for?"),
        ("digits --raw . --partition iid --clients 3 --out o", "digits is built in"),
        ("mnist --partition iid --clients 3 --out o", "where is mnist? give --raw DIR or --download"),
        ("mnist --raw . --download --partition iid --clients 3 --out o", "exclude each other"),
        ("mnist --raw missing --partition iid --clients 3 --out o", "--raw missing does not exist"),
        ("mnist --raw . --partition iid --clients 3 --out o", "no train-images-idx3-ubyte in ."),
        ("mind --download --partition iid --clients 3 --out o", "fetch it by hand (from https://msnews.github.io)"),
        ("arrays --raw . --partition iid --clients 3 --out o", "There is no table in ."),
        ("arrays --raw . --task sound --partition iid --clients 3 --out o", "--task = 'sound' does not suit arrays"),
        (
            "amazon --raw . --split stars --partition iid --clients 3 --out o",
            "--split stars is unknown for amazon. Choose rows",
        ),
        ("imagefolder --raw . --image-size 3by4 --partition iid --clients 3 --out o", "--image-size = '3by4'"),
        ("--seed 3 digits", "the data set comes first"),
        ("digits", "Missing option '--partition'"),
    ],
)
def test_wrong_input_is_rejected_with_one_sentence(
    words: str, message: str, capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "o").exists()


def test_a_prepared_folder_is_replaced_only_when_asked(capsys: Output, tmp_path: Path) -> None:
    words = ["digits", "--partition", "iid", "--out", str(tmp_path / "s"), "--clients"]
    assert main([*words, "5"]) == 0
    assert main([*words, "6"]) == 2
    assert str(tmp_path / "s") in capsys.readouterr().err
    assert main([*words, "6", "--overwrite", "--dry-run"]) == 0
    assert open_store(tmp_path / "s").clients == 5
    assert main([*words, "6", "--overwrite"]) == 0
    assert open_store(tmp_path / "s").clients == 6


def test_the_manifest_keeps_the_command_and_the_options(tmp_path: Path) -> None:
    words = ["digits", "--partition", "dirichlet", "--alpha=0.5", "--by", "client", "--clients", "12", "--seed", "9"]
    assert main([*words, "--out", str(tmp_path / "s s")]) == 0
    manifest = read_manifest(tmp_path / "s s")
    assert manifest.command == f"python -m data_prep {' '.join(words)} --out '{tmp_path / 's s'}'"
    assert manifest.partition_options["alpha"] == 0.5 and manifest.partition_options["by"] == "client"
    assert (manifest.seed, manifest.clients) == (9, 12)


def test_vocabulary_and_vectors_are_stored_beside_the_shards(tmp_path: Path, capsys: Output) -> None:
    rows = "".join(f"N{row}\t{'ab'[row % 2]}\t\tword{row % 3} common\t\t\t[]\t[]\n" for row in range(20))
    (tmp_path / "news.tsv").write_text(rows + "broken\n")
    (tmp_path / "glove.txt").write_text("common 1 2\nword1 3 4\n")
    words = ["mind", "--raw", str(tmp_path), "--length", "4", "--vocabulary", "3", "--partition", "iid"]
    words += ["--clients", "4", "--vectors", str(tmp_path / "glove.txt"), "--out", str(tmp_path / "s")]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "rows that cannot be read, left out: 1. The first" in shown and "line 21" in shown
    store = open_store(tmp_path / "s")
    assert store.vocabulary == ("<pad>", "<unk>", "common", "word0", "word1")
    assert store.description.vocabulary == 5 and store.client(0)[0].shape[1:] == (4,)
    vectors = np.load(tmp_path / "s" / "vectors.npy")
    assert vectors.dtype == np.float32 and vectors[2].tolist() == [1, 2]
    assert vectors[3:].tolist() == [[0, 0], [3, 4]]
    assert main([*words, "--overwrite", "--strict"]) == 2
    assert "line 21" in capsys.readouterr().err


REPEAT = "interrupted: repeat the command to start again"


@pytest.mark.parametrize(
    ("number", "code", "words_said"),
    [(signal.SIGKILL, -9, ""), (signal.SIGTERM, 143, REPEAT), (signal.SIGINT, 130, REPEAT)],
)
def test_a_preparation_that_is_ended_is_repeated_by_the_same_command(
    tmp_path: Path, number: signal.Signals, code: int, words_said: str
) -> None:
    """Ended after the first of 60 shards: no manifest, the folder cannot be read, and the next attempt is whole."""
    words = ["digits", "--partition", "iid", "--clients", "60", "--shards", "60", "--out", str(tmp_path / "s")]
    program = [
        sys.executable,
        "-c",
        KEEP_SIGINT + STAY_AT_THE_THIRD_SHARD + "from data_prep.__main__ import main; main()",
        *words,
    ]
    with subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=REPOSITORY) as process:
        while not (tmp_path / "s" / "train-00000.h5").exists():
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(number)
        assert words_said in process.communicate()[1].decode()
    assert process.returncode == code
    left = {path.name for path in (tmp_path / "s").iterdir()}
    assert MANIFEST not in left and (number == signal.SIGKILL or not any(name.endswith(PARTIAL) for name in left))
    with pytest.raises(UserError, match="interrupted or is still running"):
        open_store(tmp_path / "s")
    assert main(words) == 0
    assert open_store(tmp_path / "s", verify=True).clients == 60 and len(list((tmp_path / "s").iterdir())) == 62


# A shell gives its background jobs an ignored SIGINT, and children inherit it.
KEEP_SIGINT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
STAY_AT_THE_THIRD_SHARD = """
import time
from data_prep import writer
fill = writer._fill_shard
def stay(plan, index, *others):
    while index == 2:
        time.sleep(0.01)
    return fill(plan, index, *others)
writer._fill_shard = stay
"""
