"""Speed and memory of the preparation at scale: `python -m benchmarks.data_scale`; needs about 25 GB of free disk.

Writes gigabytes of images with the real writer, compared with the disk's own speed. Then prepares a million clients as
a whole command and runs `fedmpi inspect` on them. Every measured part is a separate process, so that its peak memory is
its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.partitions import partition
from data_prep.raw import RawDataset
from data_prep.writer import write_shards
from fedmpi.common.streams import Purpose, Streams

IMAGE = (3, 32, 32)
POOL = 4096  # distinct generated images; the source must cost less than the writer
BLOCK = 64 << 20
CLASSES = 10
MILLION_ROWS = 4_000_000


def image_source(rows: int) -> RawDataset:
    """Return `rows` uint8 images drawn from a pool of random ones, so that reading costs one copy."""
    generator = np.random.default_rng(0)
    pool = generator.integers(0, 256, (POOL, *IMAGE), np.uint8)
    labels = generator.integers(0, CLASSES, rows)
    return RawDataset(
        name="generated",
        task="image",
        classes=CLASSES,
        class_names=tuple(map(str, range(CLASSES))),
        feature_shape=IMAGE,
        dtype="uint8",
        mean=(0.5,) * 3,
        std=(0.3,) * 3,
        labels=labels,
        users=None,
        user_names=None,
        read=lambda wanted: pool.take(wanted % POOL, axis=0),
        test_x=pool[:100],
        test_y=labels[:100],
        skipped=0,
        licence="none",
        citation="none",
    )


def write_images(out: Path, gigabytes: float, clients: int, shards: int) -> dict[str, float]:
    """Partition and write the images; return the total seconds and the bytes of features."""
    rows = int(gigabytes * 1e9 / np.prod(IMAGE))
    started = time.perf_counter()
    raw = image_source(rows)
    made = partition("dirichlet", raw.labels, CLASSES, clients, Streams(0).generator(Purpose.PARTITION), alpha=0.5)
    partitioned = time.perf_counter()
    write_shards(raw, made, out, shards, 0, "python -m benchmarks.data_scale")
    ended = time.perf_counter()
    return {
        "partition_seconds": partitioned - started,
        "write_seconds": ended - partitioned,
        "bytes": float(rows * np.prod(IMAGE)),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
        "cpu_seconds": time.process_time(),
    }


def disk_speed(folder: Path, gigabytes: float) -> float:
    """Return the bytes per second of one plain file, written in large blocks and flushed to the disk."""
    block = np.random.default_rng(0).bytes(BLOCK)
    blocks = max(1, int(gigabytes * 1e9) // BLOCK)
    path = folder / "plain"
    started = time.perf_counter()
    with path.open("wb") as stream:
        for _ in range(blocks):
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return blocks * BLOCK / seconds


def command(words: list[str]) -> dict[str, float]:
    """Return wall seconds, CPU seconds and peak memory of a whole command."""
    started = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"{' '.join(words)} failed")
    return {"seconds": seconds, "cpu_seconds": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss * 1024.0}


def measure_images(folder: Path, gigabytes: float) -> list[str]:
    """Measure writing the images, and the disk before and after."""
    before = disk_speed(folder, gigabytes)
    words = ["write-images", str(folder / "images"), str(gigabytes)]
    done = subprocess.run([sys.executable, "-m", __spec__.name, *words], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    shutil.rmtree(folder / "images")
    after = disk_speed(folder, gigabytes)
    return [
        f"disk, one plain file of {gigabytes:g} GB with fsync: {before / 1e6:.0f} MB/s before, {after / 1e6:.0f} after",
        f"images, {gigabytes:g} GB, dirichlet, 1,000 clients, 40 shards, with fsync and sha256: "
        f"{found['bytes'] / found['write_seconds'] / 1e6:.0f} MB/s ({found['write_seconds']:.1f} s; partition "
        f"{found['partition_seconds']:.1f} s; CPU {found['cpu_seconds']:.1f} s), "
        f"peak {found['peak_bytes'] / 2**20:.0f} MiB",
    ]


def measure_million(folder: Path, clients: int) -> list[str]:
    """Measure a million clients of log-normal size, from an .npz file to the report and its inspection."""
    generator = np.random.default_rng(0)
    rows, source, out = 4 * clients, folder / "rows.npz", folder / "million"
    np.savez(
        source,
        x=generator.random((rows, 4), np.float32),
        y=generator.integers(0, CLASSES, rows).astype(np.uint8),
        x_test=generator.random((100, 4), np.float32),
        y_test=np.arange(100, dtype=np.uint8) % CLASSES,
    )
    law = ["--partition", "lognormal", "--mean", "2", "--sigma", "1", "--clients", str(clients), "--shards", "8"]
    made = command(["data_prep", "arrays", "--raw", str(source), *law, "--out", str(out)])
    inspected = [command(["fedmpi", "inspect", str(out)]) for _ in range(5)]
    best = min(inspected, key=lambda found: found["seconds"])
    return [
        f"{clients:,} clients, whole command: {made['seconds']:.1f} s ({made['cpu_seconds']:.1f} s CPU), "
        f"peak {made['peak_bytes'] / 2**20:.0f} MiB",
        f"fedmpi inspect, best of {len(inspected)}: {best['seconds']:.2f} s ({best['cpu_seconds']:.2f} s CPU), "
        f"peak {best['peak_bytes'] / 2**20:.0f} MiB",
    ]


def main() -> None:
    """Measure everything in a new folder below --folder, which is removed at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="a place on the disk to measure"
    )
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=1_000_000)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{len(os.sched_getaffinity(0))} cores, load {load:.1f}", flush=True)
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="data-scale-") as name:
        for line in [*measure_million(Path(name), given.clients), *measure_images(Path(name), given.gigabytes)]:
            print(line, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["write-images"]:
        print(json.dumps(write_images(Path(sys.argv[2]), float(sys.argv[3]), clients=1000, shards=40)))
    else:
        main()
