"""The parts of a run as typed tables: what a user can choose, in the words of the configuration file.

Every published system is a choice of these parts (a preset); any other choice is legal unless it contradicts itself.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Part(BaseModel):
    """Base of all tables: unknown keys are errors, values are immutable, docstrings describe the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=False)


class DataPart(Part):
    """Which data."""

    shards: str = "digits"
    """Folder written by `python -m data_prep`, or "digits": the 1,797 embedded handwritten digits of scikit-learn
    ("digits:clients=50,partition=dirichlet,alpha=0.1" chooses how they are dealt out)."""
    verify: bool = False
    """Check every shard's sha256 before training."""
    normalise: bool = True
    """Standardise features by the data set's mean and deviation; false: bytes become [0, 1], other numbers stay."""


class ModelPart(BaseModel):
    """Which model; keys other than `name` are options of the model itself (e.g. hidden = [200, 200] of the MLP)."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    name: str = "mlp"
    """A built-in model (mlp, cnn, …), or "package.module:function" of your own: function(description, **options)."""

    @property
    def options(self) -> dict[str, Any]:
        """The model's own options: every key but `name`."""
        return dict(self.model_extra or {})


class ParticipationPart(Part):
    """Which clients take part in a round."""

    clients: Literal["all", "uniform", "weighted", "importance", "stratified"] = "uniform"
    """all; uniform without replacement; weighted by n_k; importance (by gradient norm); stratified."""
    count: Count | None = None
    """Clients drawn per round, m. Give this or `fraction`."""
    fraction: Probability | None = None
    """Share of all clients drawn per round."""
    replace: bool = True
    """Weighted draws: with replacement (a client drawn twice counts twice; Li et al. 2020, scheme I) or without."""
    features: Literal["one-step-change", "full-gradient", "compressed-gradient", "label-histogram"] = (
        "compressed-gradient"
    )
    """What the strata are made from: FedSSO's one-step model change, the local gradient, FedSTS's compressed gradient,
    label shares."""
    levels: Annotated[int, Field(ge=2, le=255)] = 9
    """d', the number of values a compressed gradient keeps (FedSTaS, IS())."""
    restore: bool = True
    """Cluster the restored compressed gradients (the paper) or, if false, the d' sorted centres (the authors' code)."""
    probe: Literal["full", "batch", "sample"] = "full"
    """How much local data a probe sees: all of it, one batch, one sample."""
    refresh: Annotated[int, Field(ge=0)] = 1
    """Rounds between two stratifications; 0 = once, before the first round."""
    refresh_who: Literal["all", "participants"] = "all"
    """Whose gradients are measured anew: all, or those of the last round's participants (the others' grow stale)."""
    opening: bool = False
    """Round 0 is one step of every client, from which the strata are made too (FedSSO, Algorithm 1, lines 1-3)."""
    clustering: Literal["kmeans", "optics"] = "kmeans"
    """How clients are grouped into strata."""
    strata: Count = 10
    """H, the number of strata of k-means."""
    min_samples: Annotated[int, Field(ge=2)] = 2
    """OPTICS: neighbours that make a core client."""
    xi: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """OPTICS: steepness that bounds a cluster."""
    noise: Literal["singletons", "stratum", "drop"] = "stratum"
    """OPTICS: clients in no cluster become strata of their own, one common stratum, or are left out."""
    projection_above: Count = 20_000_000
    """Feature values (clients × model values) above which a Johnson–Lindenstrauss projection is clustered instead."""
    allocation: Literal["proportional", "neyman", "equal"] = "neyman"
    """How m is split over the strata."""
    spread: Literal["std", "pairwise"] = "std"
    """Neyman's S_h: standard deviation within the stratum, or the mean pairwise distance of the authors' code."""
    draw: Literal["uniform", "importance"] = "importance"
    """Inside a stratum: uniform, or with p_k proportional to the norm of the (compressed) gradient."""
    design: Literal["systematic", "sequential"] = "systematic"
    """Importance draws: systematic PPS, whose inclusion probabilities are known, or one client after another (the
    paper's words)."""


class SamplesPart(Part):
    """Which of the participants' data is used."""

    rule: Literal["all", "bernoulli", "ratio", "exact"] = "all"
    """all; bernoulli: each sample with K/Ñ (FedSampling); ratio: a fixed share of every client; exact: exactly K of the
    pooled samples."""
    wanted: Count | None = None
    """K, the number of samples wanted per round."""
    ratio: Probability | None = None
    """The naive rule's fixed share r."""
    size_estimate: Literal["exact", "randomised-response", "duchi", "piecewise"] = "exact"
    """How the server learns the total size: exactly, or from ε-LDP answers."""
    epsilon: Positive = 3.0
    """ε of one client's size answer."""
    threshold: Annotated[int, Field(ge=3)] = 300
    """M: answers lie in 1 … M − 1; larger clients are clipped."""
    clip: bool = True
    """Clip sizes at M − 1 (paper), or answer unclipped as the published code does (no ε for larger clients)."""
    asked: Literal["all", "participants"] = "all"
    """Who is asked for its size."""
    memoise: bool = False
    """Each client answers once and repeats that answer: ε is spent once."""


class LocalPart(Part):
    """What a participant does with its data."""

    optimizer: Literal["sgd", "adam"] = "sgd"
    """The local optimizer."""
    lr: Positive = 0.05
    """Learning rate η of round 0."""
    lr_schedule: Literal["constant", "inverse", "cosine", "step"] = "constant"
    """constant; inverse: η/(1 + t); cosine to zero over all rounds; step: times lr_factor every lr_every rounds."""
    lr_every: Count = 30
    """Rounds between two steps of the step schedule."""
    lr_factor: Positive = 0.1
    """Factor of the step schedule."""
    epochs: Count | None = None
    """E, passes over the local data. Give this or `steps`; default 1 epoch."""
    steps: Count | None = None
    """Number of local steps, each on freshly drawn rows."""
    batch_size: Count | Literal["all"] = 10
    """B, or "all": the whole (sampled) local set as one batch."""
    proximal_mu: NonNegative = 0.0
    """μ of FedProx (Li et al. 2020, Eq 2)."""
    beta1: Decay = 0.9
    """Adam: decay of the first moment."""
    beta2: Decay = 0.999
    """Adam: decay of the second moment."""
    epsilon: Positive = 1e-8
    """Adam: added to the root of the second moment."""
    engine: Literal["auto", "sequential", "merged", "batched"] = "auto"
    """Which of the engines trains: auto chooses, the run log says which and why."""


class TopologyPart(Part):
    """Who aggregates."""

    kind: Literal["star", "mediators"] = "star"
    """star: every participant sends to the server; mediators: groups of clients train one after another (Astraea)."""
    clients_per_mediator: Count = 10
    """γ, the largest group."""
    mediator_epochs: Count = 1
    """E_m, how often a mediator's model visits its clients in a round."""
    reschedule: Literal["static", "every-round"] = "every-round"
    """Group the clients once (needs all clients in every round) or in every round."""
    scheduling: Literal["greedy", "exchange", "random"] = "greedy"
    """Astraea's greedy KL (Algorithm 3); greedy followed by exchanges; random groups as a control."""
    target: Literal["uniform", "test"] = "uniform"
    """Class distribution a mediator should come close to."""
    placement: Literal["auto", "owner", "shared", "mediator"] = "auto"
    """Which rank trains a participant. owner: the one that owns its data; shared (star): any rank may map any shard, so
    that all have equal work in every round; mediator: one rank maps all shards of a mediator. auto: shared in a star
    whose data is small enough for every rank to keep, else owner."""
    keep_optimizer: bool = False
    """Hand the local optimizer's state from client to client inside a mediator."""


class RebalancePart(Part):
    """Astraea's augmentation of scarce classes (Algorithm 2)."""

    enabled: bool = False
    """Augment the classes that are rarer than the average."""
    alpha: NonNegative = 0.67
    """α: (C̄/C_y)^α copies of every sample of class y."""
    copies: Literal["ratio", "ratio-minus-one"] = "ratio"
    """(C̄/C_y)^α extra copies per sample, or one less (the original counted among them)."""
    mode: Literal["virtual", "stored"] = "virtual"
    """virtual: copies are made while they are read, nothing is stored; stored: data.shards was written by
    `python -m data_prep.augment` and holds them."""
    weights: Literal["augmented", "original"] = "augmented"
    """The n_k of the aggregation weights: samples with their copies, or without."""
    rotation: NonNegative = 15.0
    """Copies are rotated by up to this angle, in degrees, to either side."""
    shear: Annotated[float, Field(ge=0, lt=90)] = 10.0
    """Largest angle of the shear, in degrees."""
    shift: NonNegative = 0.1
    """Largest shift along each axis, as a share of the image's height or width."""
    zoom: Decay = 0.1
    """Each axis is sampled with a factor in [1 − zoom, 1 + zoom]."""


class AggregationPart(Part):
    """How updates become the next global model."""

    weights: Literal["samples", "uniform", "gradient-sum", "stratified", "normalised", "unbiased", "literal"] = (
        "samples"
    )
    """samples: n_k used; uniform: 1/m; gradient-sum: |S_k|/K; stratified: N_h/N · mean (FedSTaS);
    normalised: n_k/π_k, normalised (FedSSO); unbiased: Horvitz–Thompson; literal: (N/K) ρ_k (FedSSO, Eq 3)."""
    population: Literal["samples", "clients"] = "samples"
    """What normalised, unbiased and literal weights estimate: the mean over all samples, or over all clients."""
    optimizer: Literal["sgd", "momentum", "adagrad", "adam", "yogi"] = "sgd"
    """The server optimizer on the mean update (Reddi et al. 2020, Algorithm 2)."""
    lr: Positive = 1.0
    """Server learning rate η."""
    beta1: Decay = 0.9
    """Decay of the server's first moment."""
    beta2: Decay = 0.99
    """Decay of the server's second moment."""
    tau: Positive = 1e-3
    """τ, adaptivity of the server optimizer."""
    exact: bool = False
    """Order-independent sums (64-bit fixed point): the same bits on any number of ranks, slower."""


class SystemPart(Part):
    """Who is there, who drops out, and how fast the simulated devices are."""

    availability: Literal["always", "bernoulli", "time-of-day", "label-group"] = "always"
    """always; bernoulli: with `probability` in every round; time-of-day: swinging between `lowest` and `probability`;
    label-group: by the client's most frequent class."""
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
    over_selection: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """Ask this many times the participants wanted and take the first to arrive (on the virtual clock)."""
    clock: bool = False
    """Keep a virtual clock: `virtual_seconds` of a round is when its last update taken arrived."""
    speed: Literal["constant", "lognormal", "classes"] = "constant"
    """Law of the devices' speeds."""
    speed_median: Positive = 1000.0
    """Samples trained per second (median of the law)."""
    speed_sigma: NonNegative = 1.0
    """Standard deviation of the logarithm of the speed (lognormal)."""
    speed_rates: tuple[Positive, ...] = ()
    """Samples per second of each class of devices (classes)."""
    speed_shares: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    """Share of each class of devices (classes)."""
    upload: Positive = 1e6
    """Median bytes per second from a client."""
    download: Positive = 4e6
    """Median bytes per second to a client."""
    bandwidth_sigma: NonNegative = 0.0
    """Standard deviation of the logarithm of both bandwidths."""


class TransportPart(Part):
    """How a client's update travels to the server: simulated, what gets lost included."""

    kind: Literal["float32", "float16", "bfloat16", "int8", "topk"] = "float32"
    """float32; float16 and bfloat16, rounded at random without bias; int8: 255 levels a bucket of 512 values, likewise;
    topk: the largest values only, with their places."""
    fraction: Probability = 0.01
    """topk: share of the values that is sent."""
    error_feedback: bool = False
    """Clients add what got lost of their last update to the next. Memory: a vector per client, 2 GiB at most."""


class PrivacyPart(Part):
    """Client-level differential privacy of the updates."""

    clip_norm: Positive | None = None
    """Clip every client's update to this Euclidean norm; unset = no differential privacy of updates."""
    noise_multiplier: NonNegative = 0.0
    """σ: Gaussian noise of standard deviation σ · clip_norm is added to the sum of the clipped updates."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """δ at which the ε spent so far is reported."""


class ServerPart(Part):
    """What rank 0 does besides serving."""

    trains: Literal["auto", "never", "always"] = "auto"
    """always: rank 0 of several trains clients too; never; auto: it does when data is shared (topology.placement) and
    every rank of a node has a core (or GPU) of its own, which would idle otherwise. A single process always trains."""


class ClusterPart(Part):
    """How the ranks compute and communicate."""

    device: str = "auto"
    """auto (a GPU per rank where there are some), cpu, cuda, cuda:1, …"""
    threads: Annotated[int, Field(ge=0)] = 0
    """Threads of one rank; 0 = the node's cores divided by its ranks."""
    reduction: Literal["auto", "window", "allreduce"] = "auto"
    """Sum updates in the node's shared memory, by MPI's Allreduce, or as measured sizes suggest."""


class EvaluationPart(Part):
    """How the global model is evaluated."""

    every: Count = 1
    """Rounds between two evaluations on the test set (the last round is always evaluated)."""
    batch_size: Count = 2000
    """Test samples evaluated at once."""
    target_accuracy: Probability | None = None
    """The summary reports the first round that reached this test accuracy."""


class CheckpointPart(Part):
    """How much work a killed run can lose."""

    every: Annotated[int, Field(ge=0)] = 10
    """Rounds between two checkpoints; 0 = only when stopped by a signal."""
    keep: Count = 2
    """How many checkpoints are kept."""


class LoggingPart(Part):
    """What is shown and written."""

    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    interval: NonNegative = 2.0
    """Seconds between two progress lines when the output is no terminal."""
    diagnostics: bool = False
    """Record drift, gradient diversity, Γ, update norms, how evenly clients and samples are used (each client's own
    update is then needed: no merging; two more passes over a participant's data)."""
    reference: str | None = None
    """A model.safetensors, e.g. of centralised training: records tell the distance from it, ‖w − w_ref‖/‖w_ref‖."""


class Config(Part):
    """A complete run."""

    preset: str | None = None
    """A published system that fills the parts below; the file and --set override it."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Every random number of the run follows from it."""
    rounds: Count = 50
    """T, the number of rounds."""
    data: DataPart = DataPart()
    model: ModelPart = ModelPart()
    participation: ParticipationPart = ParticipationPart()
    samples: SamplesPart = SamplesPart()
    local: LocalPart = LocalPart()
    topology: TopologyPart = TopologyPart()
    rebalance: RebalancePart = RebalancePart()
    aggregation: AggregationPart = AggregationPart()
    transport: TransportPart = TransportPart()
    privacy: PrivacyPart = PrivacyPart()
    system: SystemPart = SystemPart()
    server: ServerPart = ServerPart()
    cluster: ClusterPart = ClusterPart()
    evaluation: EvaluationPart = EvaluationPart()
    checkpoint: CheckpointPart = CheckpointPart()
    logging: LoggingPart = LoggingPart()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        from fedmpi.config.checks import contradiction

        reason = contradiction(self)
        if reason is not None:
            raise ValueError(reason)
        return self
