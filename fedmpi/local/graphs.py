"""CUDA graphs of local steps: one call of the host starts all kernels of a step on a GPU.

A graph repeats the captured kernels on the same memory, with the same numbers from Python. A step must therefore read
what changes between two uses from tensors that stay: samples, weights, masks, the learning rate. It must not wait for
values. Without graphs, the kernels start one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch

from fedmpi.common.arithmetic import second_stream
from fedmpi.common.errors import raised

log = logging.getLogger("fedmpi")

Step = Callable[[], None]


class Graphs:
    """Captured steps of one device by key. Steps of equal keys do the same with the same memory.

    Without `possible`, all steps are eager: custom code may do something else in each step, or use other memory.
    """

    def __init__(self, device: torch.device, possible: bool = True):
        self.device = device
        self._replays: dict[Hashable, Step | None] = {}  # None = used once, eagerly
        self._pool: Any = None  # memory that all graphs share: no result stays in it
        self._failed = not possible

    def run(self, key: Hashable, step: Step) -> None:
        """Run a step. Its first use is eager, which fills torch's caches; the second captures it."""
        if self._failed or self.device.type == "cpu" or key not in self._replays:
            self._replays.setdefault(key)
            step()
            return
        replay = self._replays[key]
        if replay is None:
            try:
                replay = self._replays[key] = self.capture(step)
            except Exception as error:  # an error of the step itself occurs again in the eager step
                log.warning("cannot capture local steps as CUDA graphs (%s); they start one by one", raised(error))
                self._failed = True
                replay = step
        replay()

    def capture(self, step: Step) -> Step:
        """Record a step without computing it. Return the function that computes it."""
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with (
            torch.cuda.device(self.device),
            torch.cuda.stream(torch.cuda.current_stream(self.device)),  # a capture that fails does not return to it
            torch.cuda.graph(graph, self._pool, second_stream(self.device), "thread_local"),
        ):
            step()
        return graph.replay
