"""Seconds on a device that works through a queue of its own, what is told of it, and programs that refuse."""

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
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device: torch.device) -> float:
    """Seconds: processor time on the processor, which others stretch less; elsewhere the time when all is done."""
    if device.type == "cpu":
        return time.process_time()
    wait_for(device)
    return time.perf_counter()


def described(device: torch.device) -> str:
    """The device, and what of torch decides its speed."""
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
    """Within: what is refused ends the program with its sentence and exit code 2."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """Describe the device that is named, or refuse it with exit code 2."""
    parser = argparse.ArgumentParser(description="What is to be told of a device beside a measurement.")
    parser.add_argument("device")
    with refusing():
        device = choose_device(parser.parse_args().device, 0)
    torch.set_num_threads(1)
    print(described(device))


if __name__ == "__main__":
    main()
