"""Timing on devices with their own work queue, device descriptions, and programs that reject input."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedmpi import UserError
from fedmpi.mpi.device import choose_device

CPU = torch.device("cpu")


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device: torch.device) -> float:
    """Return seconds: CPU time on the CPU, which other programs disturb less; else the time once all work is done."""
    if device.type == "cpu":
        return time.process_time()
    wait_for(device)
    return time.perf_counter()


def described(device: torch.device) -> str:
    """Describe the device and the torch settings that affect its speed."""
    if device.type != "cuda":
        return f"{device}, torch {torch.__version__}, {torch.get_num_threads()} thread(s)"
    facts = torch.cuda.get_device_properties(device)
    rounded = {True: "TensorFloat-32", False: "float32"}
    return (
        f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, {facts.multi_processor_count} multiprocessors; "
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}; products in "
        f"{rounded[torch.backends.cuda.matmul.allow_tf32]}, convolutions in {rounded[torch.backends.cudnn.allow_tf32]}"
    )


@contextmanager
def refusing() -> Iterator[None]:
    """End the program with one sentence and exit code 2 if input is rejected."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """Describe the named device, or reject it with exit code 2."""
    parser = argparse.ArgumentParser(description="What is to be told of a device beside a measurement.")
    parser.add_argument("device")
    with refusing():
        device = choose_device(parser.parse_args().device, 0)
    torch.set_num_threads(1)
    print(described(device))


if __name__ == "__main__":
    main()
