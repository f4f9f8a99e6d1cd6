"""The tables about the server and the run: topology, rebalancing, aggregation, system, privacy, ranks, records."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from fedmpi.config.base import (
    Choice,
    Count,
    Decay,
    NonNegative,
    Positive,
    Probability,
    Table,
    WholeOrZero,
    limits,
    not_with,
    only_with,
)
from fedmpi.config.open_table import OpenTable


def _viewed(value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if value is None or value in ("all", "participants") or whole:
        return value
    raise ValueError('give "all", "participants", or how many clients (1 or more)')


SPREAD = limits(0, 50, "rates of devices would differ by hundreds of orders of magnitude")

MEDIATED = only_with("kind", "mediators")
REBALANCED = only_with("enabled", True)
WARPED = only_with("mode", "virtual")
WEIGHED_BY_SIZE = only_with("aggregation.weights", "samples", "normalised", "unbiased", "literal")
CLOCKED = only_with("clock", True)
CLIPPED = not_with("clip_norm", None)
VIEWING = not_with("clients", None)


class TopologyTable(OpenTable):
    """Who aggregates; other keys are options of the scheduling (`fedmpi parts`)."""

    in_config = "topology"

    kind: Literal["star", "mediators"] = "star"
    """star: every participant sends to the server; mediators: groups of clients train one after another (Astraea)."""
    clients_per_mediator: Annotated[Count, MEDIATED] = 10
    """γ, the largest group."""
    mediator_epochs: Annotated[
        Count, limits(0, 10_000, "every visit of a round is planned before it begins"), MEDIATED
    ] = 1
    """E_m, how often a mediator's model visits its clients in a round."""
    reschedule: Annotated[Literal["static", "every-round"], MEDIATED] = "every-round"
    """static: group all clients once, and in every round those of a group that are there share a mediator (needs
    participation.clients = "all"); every-round: group each round's participants."""
    scheduling: Annotated[Choice, MEDIATED] = "greedy"
    """Astraea's greedy KL (Algorithm 3); greedy followed by exchanges; random groups as a control; or
    "package.module:function" of your own: (class_counts (m, C), most, generator, target (C,)) -> mediator of each
    participant (m,), from 0."""
    target: Annotated[Literal["uniform", "test"], MEDIATED, not_with("scheduling", "random")] = "uniform"
    """Class distribution a mediator should come close to."""
    placement: Literal["auto", "owner", "shared", "mediator"] = "auto"
    """Which rank trains a participant. owner: the one that owns its data; shared (star): any rank may map any shard, so
    that all have equal work in every round; mediator: one rank maps all shards of a mediator. auto: shared in a star
    whose data is small enough for every rank to keep, else owner."""
    balance: Annotated[
        Literal["planned", "measured"],
        only_with("kind", "star"),
        only_with("placement", "auto", "shared"),
        only_with("transport.error_feedback", False),
    ] = "planned"
    """How a shared cohort is spread. planned: equal rows and steps; measured: what a step costs and how fast every
    worker is are learned from the seconds of past rounds. Two runs with "measured" agree to rounding only (to the bit
    with aggregation.exact), since other workers may train other clients."""
    keep_optimizer: Annotated[bool, MEDIATED, only_with("local.optimizer", "adam")] = False
    """Hand the local optimizer's state from client to client inside a mediator."""

    def refusal(self) -> str | None:
        if self.placement == "mediator" and self.kind != "mediators":
            return 'topology.placement = "mediator" needs topology.kind = "mediators"'
        if self.placement == "shared" and self.kind == "mediators":
            return 'topology.placement = "shared" is for a star: with mediators choose "owner" or "mediator"'
        return None


class RebalanceTable(Table):
    """Astraea's augmentation of scarce classes (Algorithm 2)."""

    enabled: bool = False
    """Augment the classes that are rarer than the average."""
    alpha: Annotated[float, Field(ge=0, le=2), REBALANCED] = 0.67
    """α: (C̄/C_y)^α copies of every sample of class y; 2 is the largest that the paper tries."""
    copies: Annotated[Literal["ratio", "ratio-minus-one"], REBALANCED] = "ratio"
    """(C̄/C_y)^α extra copies per sample, or one less (the original counted among them)."""
    mode: Annotated[Literal["virtual", "stored"], REBALANCED] = "virtual"
    """virtual: copies are made while they are read, nothing is stored; stored: data.shards was written by
    `python -m data_prep.augment` and holds them."""
    weights: Annotated[
        Literal["augmented", "original"], REBALANCED, WEIGHED_BY_SIZE, only_with("aggregation.population", "samples")
    ] = "augmented"
    """The n_k of the aggregation weights: samples with their copies, or without."""
    rotation: Annotated[
        NonNegative, limits(0, 180, "a half turn to either side reaches every angle"), REBALANCED, WARPED
    ] = 15.0
    """Copies are rotated by up to this angle, in degrees, to either side."""
    shear: Annotated[float, Field(ge=0, lt=90), REBALANCED, WARPED] = 10.0
    """Largest angle of the shear, in degrees."""
    shift: Annotated[
        NonNegative, limits(0, 1, "a shift by the whole side leaves nothing of the image"), REBALANCED, WARPED
    ] = 0.1
    """Largest shift along each axis, as a share of the image's height or width."""
    zoom: Annotated[Decay, REBALANCED, WARPED] = 0.1
    """Each axis is sampled with a factor in [1 − zoom, 1 + zoom]."""


class AggregationTable(OpenTable):
    """How updates become the next global model; other keys are options of the chosen parts (`fedmpi parts`)."""

    in_config = "aggregation"

    weights: Choice = "samples"
    """samples: n_k used; uniform: 1/m; gradient-sum: |S_k|/K (-squared: |S_k|²/K); stratified: N_h/N · mean (FedSTaS);
    normalised: n_k/π_k, normalised, strata in their shares (FedSSO); unbiased: Horvitz–Thompson; literal: the next
    model is (N/K) Σ ρ_k w_k (FedSSO, Eq 3)."""
    population: Literal["samples", "clients"] = "samples"
    """What normalised, unbiased and literal weights estimate: the mean over all samples, or over all clients."""
    rule: Choice = "mean"
    """mean, the weighted sum; median, trimmed-mean, krum (of the clients, whatever their weights), norm-clip."""
    optimizer: Choice = "sgd"
    """sgd, momentum, adagrad, adam, yogi: the server optimizer on the mean update (Reddi et al. 2020, Algorithm 2)."""
    lr: Positive = 1.0
    """Server learning rate η."""
    beta1: Decay = 0.9
    """Decay of the server's first moment."""
    beta2: Decay = 0.99
    """Decay of the server's second moment."""
    tau: Annotated[Positive, limits(1e-15, 1e15, "its square stands in single precision")] = 1e-3
    """τ, adaptivity of the server optimizer."""
    exact: bool = False
    """Order-independent sums (64-bit fixed point): the same bits on any number of ranks of like processors, slower."""


class AttackTable(Table):
    """Clients that lie, to try aggregation rules with."""

    kind: Literal["none", "sign-flip", "noise", "label-flip"] = "none"
    """sign-flip: sends −scale · Δ; noise: sends normal noise of deviation scale instead of Δ; label-flip: trains on
    labels C − 1 − y."""
    fraction: Annotated[float, Field(ge=0, le=1), not_with("kind", "none")] = 0.2
    """Share of all clients that attack, whenever they take part."""
    scale: Annotated[Positive, only_with("kind", "sign-flip", "noise")] = 1.0
    """Length of the flipped update in that of the honest one; standard deviation of the noise."""


class SystemTable(OpenTable):
    """Who is there, who drops out, and how fast the simulated devices are."""

    in_config = "system"

    availability: Choice = "always"
    """always; bernoulli: with `probability` in every round; time-of-day: swinging between `lowest` and `probability`;
    label-group: by the client's most frequent class; or "package.module:object" of your own: (view) -> a probability
    for each client."""
    probability: Probability = 1.0
    """Probability of being available (its highest value for time-of-day)."""
    lowest: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Lowest probability of time-of-day."""
    period: Positive = 24.0
    """Rounds of one day."""
    by_label: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    """label-group: probability of each class's clients."""
    drop_out: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that a participant's update is lost after training."""
    over_selection: Annotated[
        float, Field(ge=1, allow_inf_nan=False), limits(0, 1e6, "no larger part of the clients takes part"), CLOCKED
    ] = 1.0
    """Ask this many times the participants wanted and take the first to arrive (on the virtual clock; any of those that
    arrive together)."""
    clock: bool = False
    """Keep a virtual clock: `virtual_seconds` of a round is when its last update taken arrived."""
    speed: Annotated[Literal["constant", "lognormal", "classes"], CLOCKED] = "constant"
    """Law of the devices' speeds."""
    speed_median: Annotated[Positive, CLOCKED, not_with("speed", "classes")] = 1000.0
    """Samples trained per second (median of the law)."""
    speed_sigma: Annotated[NonNegative, SPREAD, CLOCKED, only_with("speed", "lognormal")] = 1.0
    """Standard deviation of the logarithm of the speed (lognormal)."""
    speed_rates: Annotated[tuple[Positive, ...], CLOCKED, only_with("speed", "classes")] = ()
    """Samples per second of each class of devices (classes)."""
    speed_shares: Annotated[
        tuple[Annotated[float, Field(ge=0, le=1)], ...], CLOCKED, only_with("speed", "classes")
    ] = ()
    """Share of each class of devices (classes)."""
    upload: Annotated[Positive, CLOCKED] = 1e6
    """Median bytes per second from a client."""
    download: Annotated[Positive, CLOCKED] = 4e6
    """Median bytes per second to a client."""
    bandwidth_sigma: Annotated[NonNegative, SPREAD, CLOCKED] = 0.0
    """Standard deviation of the logarithm of both bandwidths."""


class TransportTable(Table):
    """How a client's update travels to the server: simulated, what gets lost included."""

    kind: Literal["float32", "float16", "bfloat16", "int8", "topk"] = "float32"
    """float32; float16 and bfloat16, rounded at random without bias; int8: 255 levels a bucket of 512 values, likewise;
    topk: the largest values only, with their places."""
    fraction: Annotated[Probability, only_with("kind", "topk")] = 0.01
    """topk: share of the values that is sent."""
    error_feedback: Annotated[bool, not_with("kind", "float32")] = False
    """Clients add what got lost of their last update to the next. Memory: a vector per client, 2 GiB at most."""


class PrivacyTable(Table):
    """Client-level differential privacy of the updates."""

    clip_norm: Positive | None = None
    """C: clip every client's update to this Euclidean norm. Their sum is divided by the planned number of participants
    (N with participation.clients = "all"), whoever is there and returns. Unset = no privacy of updates."""
    noise_multiplier: Annotated[
        NonNegative, limits(1e-6, 1e6, "less hides nothing (0 says so), more leaves nothing of the updates"), CLIPPED
    ] = 0.0
    """σ: Gaussian noise of standard deviation σ · clip_norm is added to the sum of the clipped updates. The ε reported
    is that of replacing one client's data, which moves the sum by up to 2 · clip_norm. 0 = no noise, no ε."""
    delta: Annotated[float, Field(gt=0, lt=1), limits(1e-100, 1, "no account is that fine"), CLIPPED] = 1e-5
    """δ at which the ε spent so far is reported; well below one over the number of clients to mean anything."""


class ServerTable(Table):
    """What rank 0 does besides serving."""

    trains: Literal["auto", "never", "always"] = "auto"
    """always: rank 0 of several trains clients too; never; auto: it does when data is shared (topology.placement) and
    every rank of a node has a core (or GPU) of its own, which would idle otherwise. A single process always trains."""


class ClusterTable(Table):
    """How the ranks compute and communicate."""

    device: str = "auto"
    """auto (a GPU per rank where there are some), cpu, cuda, cuda:1, …; of one kind on all ranks."""
    threads: Annotated[int, Field(ge=0), limits(0, 1024, "no node has as many cores for one rank")] = 0
    """Threads of one rank. 0 = the node's cores (those that the job may use) divided by its ranks, less what other
    processes keep busy at the start, and one where a step is too small for more. Name it where two runs shall agree in
    their last bits; with aggregation.exact it is one."""
    stall_timeout: Annotated[NonNegative, limits(0, 10**7, "ten million seconds are four months")] = 3600.0
    """Seconds without a finished round after which a rank of several prints where each of its threads is and ends the
    job with exit code 1; --resume continues from the last checkpoint. Loading the data counts as a round. 0 = never."""
    state_memory: Annotated[NonNegative, limits(0, 10**6, "a pebibyte is more than any node has")] = 2.0
    """GiB of each rank's memory for what local.algorithm keeps of its clients; more goes to a temporary file in the run
    folder, or without one in the system's folder for temporary files."""
    reduction: Literal["auto", "window", "allreduce", "device"] = "auto"
    """Sum updates in the node's shared memory (window), by MPI's Allreduce, or by Allreduce on tensors where they lie
    (device: on GPUs only with a CUDA-aware MPI). auto: device where every rank has a GPU and MPI reads it, else as
    measured sizes suggest."""


class EvaluationTable(Table):
    """How the global model is evaluated."""

    every: Count = 1
    """Rounds between two evaluations (the last round is always evaluated)."""
    on: Literal["auto", "test", "val", "both"] = "auto"
    """The test part; val: the samples held out of the clients (data_prep --val); both; auto: both where there are
    validation samples, else test. The best round is the one with the highest accuracy on val where that is evaluated,
    else on test."""
    batch_size: Count | Literal["auto"] = "auto"
    """Samples evaluated at once. auto: 2,000, and on a processor fewer where the model's widest layer makes more than 8
    MiB of so many: those passes would leave the caches."""
    target_accuracy: Probability | None = None
    """The summary reports the first round that reached this test accuracy (with on = "val": validation accuracy)."""
    clients: Annotated[int | str | None, BeforeValidator(_viewed)] = None
    """Clients whose own rows the global model is evaluated on, each by itself: all; participants, those of the round;
    or a number of them, the same ones every time, drawn by the seed. Rows are those held out of them (data_prep --val),
    or without any their training rows. Unset = none."""
    clients_every: Annotated[Count, VIEWING] = 10
    """Rounds between two evaluations on clients (they are always evaluated after the last round)."""
    fine_tune: Annotated[int, Field(ge=0), limits(0, 10_000, "every epoch is planned before it begins"), VIEWING] = 0
    """E: also evaluate a model of each such client's own, trained for E epochs from the global one on its training rows
    with the run's local settings; nothing of it flows back. 0 = no."""

    def parts(self, validation: bool) -> tuple[str, ...]:
        """The parts evaluated on, of "test" and "val", for data with or without validation samples."""
        if self.on == "both" or (self.on == "auto" and validation):
            return ("test", "val")
        return ("test",) if self.on == "auto" else (self.on,)


class CheckpointTable(Table):
    """How much work a killed run can lose."""

    every: WholeOrZero = 10
    """Rounds between two checkpoints; 0 = only when stopped by a signal."""
    keep: Count = 2
    """How many checkpoints are kept."""


class LoggingTable(Table):
    """What is shown and written."""

    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    interval: NonNegative = 2.0
    """Seconds between two progress lines when the output is no terminal."""
    diagnostics: bool = False
    """Record drift, gradient diversity, Γ, update norms, how evenly clients and samples are used (each client's own
    update is then needed: no merging; two more passes over a participant's data)."""
    participants: bool = False
    """Record who took part in each round (key `clients`, numbers in ascending order, "0-9 12 15" for runs of them)."""
    reference: str | None = None
    """A model.safetensors, e.g. of centralised training: records tell the distance from it, ‖w − w_ref‖/‖w_ref‖."""
