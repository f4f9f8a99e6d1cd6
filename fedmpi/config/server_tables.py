"""Tables for the server and the run: topology, rebalancing, aggregation, devices, privacy, ranks, records."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedmpi.common.options import not_with, only_with
from fedmpi.common.registry import Chosen
from fedmpi.config.base import (
    Count,
    Decay,
    NonNegative,
    Positive,
    Probability,
    Share,
    Table,
    Variants,
    WholeOrZero,
    chooses,
    switch,
)

WEIGHED_BY_SIZE = only_with("server.weights", "samples", "normalized", "unbiased", "literal")
WARPED = only_with("rebalance.mode", "virtual")
CLIPPED = not_with("privacy.clip_norm", None)
VIEWING = not_with("evaluation.clients", None)


class Star(Table):
    """Every selected client sends its update to the server."""

    name: Literal["star"] = "star"


class Mediators(Table):
    """Mediators, whose groups of clients train sequentially (Astraea)."""

    name: Literal["mediators"] = "mediators"
    clients_per_mediator: Count = 10
    """γ, the size of the largest group."""
    epochs: Annotated[Count, Field(le=10_000)] = 1
    """E_m, number of visits of a mediator's model to its clients in a round."""
    regroup: Literal["once", "every-round"] = "every-round"
    """once: group all clients once, and in every round the available ones of a group share a mediator (needs
    clients.sampler = "all"); every-round: group each round's selected clients."""
    scheduling: Annotated[Chosen, chooses("scheduling", "greedy")] = Chosen("scheduling", "greedy")
    """Astraea's greedy KL (Algorithm 3); greedy followed by exchanges; random groups as a control; or a
    custom "package.module:function": (class_counts (m, C), most, generator, target (C,)) -> mediator of each
    selected client (m,), from 0."""
    target: Annotated[Literal["uniform", "test"], not_with("topology.scheduling", "random")] = "uniform"
    """Class distribution that a mediator should approximate."""
    keep_optimizer: Annotated[bool, only_with("local.optimizer", "adam")] = False
    """Pass the local optimizer's state (of Adam) from client to client inside a mediator."""


Topology = Annotated[Star | Mediators, Variants("star")]


class RebalanceTable(Table):
    """Astraea's augmentation of scarce classes (Algorithm 2)."""

    alpha: Annotated[float, Field(ge=0, le=2)] = 0.67
    """α: (C̄/C_y)^α copies of every sample of class y; 2 is the largest that the paper tries."""
    copies: Literal["ratio", "ratio-minus-one"] = "ratio"
    """(C̄/C_y)^α extra copies per sample, or one less (the original counted among them)."""
    mode: Literal["virtual", "stored"] = "virtual"
    """virtual: copies are made while they are read, nothing is stored; stored: data.source was written by
    `python -m data_prep augment` and holds them."""
    weights: Annotated[Literal["augmented", "original"], WEIGHED_BY_SIZE] = "augmented"
    """The n_k of the aggregation weights: samples with their copies, or without."""
    rotation: Annotated[NonNegative, Field(le=180), WARPED] = 15.0
    """Copies are rotated by up to this angle, in degrees, to either side."""
    shear: Annotated[float, Field(ge=0, lt=90), WARPED] = 10.0
    """Largest angle of the shear, in degrees."""
    shift: Annotated[NonNegative, Field(le=1), WARPED] = 0.1
    """Largest shift along each axis, as a share of the image's height or width."""
    zoom: Annotated[Decay, WARPED] = 0.1
    """Each axis is sampled with a factor in [1 − zoom, 1 + zoom]."""


Rebalance = Annotated[RebalanceTable | None, switch(RebalanceTable)]


class ServerTable(Table):
    """Computation of the next global model from the updates."""

    weights: Annotated[Chosen, chooses("weights", "samples")] = Chosen("weights", "samples")
    """samples: n_k used; uniform: 1/m; gradient-sum: |S_k|/K (-squared: |S_k|²/K); stratified: N_h/N · mean (FedSTaS);
    normalized: n_k/π_k, normalized, strata in their shares (FedSSO); unbiased: Horvitz–Thompson; literal: the next
    model is (N/K) Σ ρ_k w_k (FedSSO, Eq 3)."""
    aggregator: Annotated[Chosen, chooses("aggregator", "mean")] = Chosen("aggregator", "mean")
    """mean, the weighted sum; median, trimmed-mean, krum (of the clients, whatever their weights), norm-clip."""
    optimizer: Annotated[Chosen, chooses("server optimizer", "sgd")] = Chosen("server optimizer", "sgd")
    """sgd, momentum, adagrad, adam, yogi: the server optimizer on the mean update (Reddi et al. 2020, Algorithm 2)."""
    exact: bool = False
    """Order-independent sums (64-bit fixed point): bit-identical on any number of ranks with equal CPUs, but slower."""


class ConstantRate(Table):
    """The same rate for all clients."""

    name: Literal["constant"] = "constant"
    median: Positive | None = None
    """The rate per second: samples of a device, bytes of a link."""


class LognormalRate(Table):
    """Lognormal rates."""

    name: Literal["lognormal"] = "lognormal"
    median: Positive | None = None
    """Median of the rates per second."""
    sigma: Annotated[float, Field(ge=0, le=50)] = 1.0
    """Standard deviation of the logarithm of the rate."""


class RateClasses(Table):
    """Classes of devices with a rate each."""

    name: Literal["classes"] = "classes"
    rates: tuple[Positive, ...]
    """Rate per second of each class."""
    shares: tuple[Share, ...]
    """Share of each class, which sum to 1."""

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        if not self.rates or len(self.shares) != len(self.rates) or abs(sum(self.shares) - 1) > 1e-6:
            raise ValueError("give as many shares as rates; shares sum to 1")
        return self


Rate = Annotated[ConstantRate | LognormalRate | RateClasses, Variants("constant")]


class DevicesTable(Table):
    """Simulated clock: `virtual_seconds` of a round is when its last update taken arrived."""

    speed: Rate = ConstantRate()
    """Samples trained per second: constant (1,000), lognormal or classes."""
    upload: Rate = ConstantRate()
    """Bytes per second from a client: constant (1,000,000), lognormal or classes."""
    download: Rate = ConstantRate()
    """Bytes per second to a client: constant (4,000,000), lognormal or classes."""


Devices = Annotated[DevicesTable | None, switch(DevicesTable)]


class PrivacyTable(Table):
    """Client-level differential privacy of the updates."""

    clip_norm: Positive | None = None
    """C: clip every client's update to this Euclidean norm. Their sum is divided by the planned number of participants
    (N with clients.sampler = "all"), whichever are available and return. Unset = no privacy of updates."""
    noise_multiplier: Annotated[NonNegative, Field(le=1e6), CLIPPED] = 0.0
    """σ: Gaussian noise of standard deviation σ · clip_norm is added to the sum of the clipped updates. The ε reported
    is that of replacing one client's data, which moves the sum by up to 2 · clip_norm. 0 = no noise, no ε."""
    delta: Annotated[float, Field(ge=1e-100, lt=1), CLIPPED] = 1e-5
    """δ at which the ε spent so far is reported; well below one over the number of clients to mean anything."""


class ClusterTable(Table):
    """Computation and communication of the ranks."""

    device: str = "auto"
    """auto (a GPU per rank where there are some), cpu, cuda, cuda:1, …; of one kind on all ranks."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Threads of one rank. 0 = the node's cores (those that the job may use) divided by its ranks, and one where a step
    is too small for more. Name it where two runs shall agree in their last bits; with server.exact it is one."""
    stall_timeout: Annotated[NonNegative, Field(le=10**7)] = 3600.0
    """Seconds without a finished round after which a rank of several prints where each of its threads is and ends the
    job with exit code 1; --resume continues from the last checkpoint. Loading the data counts as a round. 0 = never."""
    server_trains: Literal["auto", "never", "always"] = "auto"
    """always: rank 0 of several trains clients too; never; auto: it does when data is shared (cluster.placement) and
    every rank of a node has a core (or GPU) that would idle otherwise. A single process always trains."""
    placement: Literal["auto", "owner", "shared", "mediator"] = "auto"
    """Rank that trains a selected client. owner: the one that owns its data; shared (star): any rank may map any
    shard, so that all have equal work in every round; mediator: one rank maps all shards of a mediator. auto: shared in
    a star whose data is small enough for every rank to keep, else owner."""
    balance: Annotated[
        Literal["planned", "measured"], only_with("topology", "star"), only_with("cluster.placement", "auto", "shared")
    ] = "planned"
    """Assignment of a shared cohort to the ranks. planned: equal samples and steps; measured: the speed of
    every worker is learned from the seconds of past rounds. Two runs with "measured" agree only up to
    floating-point rounding, since other workers may train other clients. With server.exact they agree bit for bit."""
    state_memory: Annotated[NonNegative, Field(le=10**6)] = 2.0
    """GiB of each rank's memory for what local.algorithm keeps of its clients; more goes to a temporary file in the run
    folder, or without one in the system's folder for temporary files."""
    reduction: Literal["auto", "window", "allreduce", "device"] = "auto"
    """Sum updates in the node's shared memory (window), by MPI's Allreduce, or by Allreduce on tensors where they lie
    (device: on GPUs only with a CUDA-aware MPI). auto: device where every rank has a GPU and MPI reads it, else as
    measured sizes suggest."""


class EvaluationTable(Table):
    """Evaluation of the global model."""

    every: Count = 1
    """Rounds between two evaluations (the last round is always evaluated)."""
    on: Literal["auto", "test", "val", "both"] = "auto"
    """The test part; val: the samples held out of the clients (data_prep --val); both; auto: both where there are
    validation samples, else test. The best round is the one with the highest accuracy on val where that is evaluated,
    else on test."""
    batch_size: Count | Literal["auto"] = "auto"
    """Samples evaluated at once. auto: 2,000. On a CPU auto takes fewer if the outputs of the model's widest layer
    exceed 8 MiB, since larger passes do not fit into the caches."""
    target_accuracy: Probability | None = None
    """The summary reports the first round that reached this test accuracy (with on = "val": validation accuracy)."""
    clients: Count | Literal["all", "participants"] | None = None
    """Clients whose own rows the global model is evaluated on, each by itself: all; participants, those of the round;
    or a number of them, the same ones every time, drawn by the seed. Rows are those held out of them (data_prep --val),
    or without any their training rows. Unset = none."""
    clients_every: Annotated[Count, VIEWING] = 10
    """Rounds between two evaluations on clients (they are always evaluated after the last round)."""
    fine_tune: Annotated[int, Field(ge=0, le=10_000), VIEWING] = 0
    """E: also evaluate a model of each such client's own, trained for E epochs from the global one on its training rows
    with the run's local settings; nothing of it flows back. 0 = no."""

    def parts(self, validation: bool) -> tuple[str, ...]:
        """The parts evaluated on, of "test" and "val", for data with or without validation samples."""
        if self.on == "both" or (self.on == "auto" and validation):
            return ("test", "val")
        return ("test",) if self.on == "auto" else (self.on,)


class CheckpointTable(Table):
    """Frequency and number of checkpoints."""

    every: WholeOrZero = 10
    """Rounds between two checkpoints; 0 = only when stopped by a signal."""
    keep: Count = 2
    """Number of checkpoints to keep."""


class LoggingTable(Table):
    """Output to terminal and files."""

    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    interval: NonNegative = 2.0
    """Seconds between two progress lines when the output is no terminal."""
    diagnostics: bool = False
    """Record drift, gradient diversity, Γ, update norms, how evenly clients and samples are used (each client's own
    update is then needed: no merging; two more passes over a participant's data)."""
    participants: bool = False
    """Record the clients that participate in each round (key `clients`: ascending numbers and ranges, "0-9 12 15")."""
