"""A complete run as typed tables: what a user can choose, in the words of the configuration file.

Every published method is a choice of these (a preset). Any other choice is valid unless its keys contradict each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from fedmpi.common.calling import calling
from fedmpi.common.errors import UserError
from fedmpi.common.options import OWN, not_with, only_with
from fedmpi.common.registry import DIGITS, MARKS, SERVICES, SOURCE, Component
from fedmpi.common.task_kinds import KINDS
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

PLAIN = "plain"
OF_GRADIENTS = not_with("clients.sampler.features", "label-histogram")
BERNOULLI = only_with("samples.sampler", "bernoulli")
PRIVATE = not_with("samples.size.estimate", "exact")
WEIGHED_BY_SIZE = only_with("server.weights", "samples", "normalized", "unbiased", "literal")
WARPED = only_with("rebalance.mode", "virtual")
CLIPPED = not_with("privacy.clip_norm", None)
VIEWING = not_with("evaluation.clients", None)
PATIENT = not_with("evaluation.patience", None)
IN_ROUNDS = not_with("topology", "async")


class DataTable(Table):
    """The data."""

    source: Annotated[Component, chooses(SOURCE, DIGITS)] = Component(SOURCE, DIGITS)
    """Folder written by `python -m data_prep`; digits: the 1,797 embedded handwritten digits of scikit-learn (options
    clients, partition, alpha, seed); or a custom "package.module:function": function(**options) returns
    ClientArrays."""
    verify: bool = False
    """Check the SHA-256 of every shard before training."""
    normalize: bool = True
    """Standardize features by the data set's mean and standard deviation; false: only scale bytes to [0, 1]."""


class LoraTable(Table):
    """Small matrices that are trained instead of a model's parameters."""

    rank: Annotated[Count, Field(le=65_536)] = 4
    """r, rows of A and columns of B."""
    alpha: Positive = 8.0
    """α: the product of the matrices is multiplied by α / r."""
    targets: tuple[str, ...] = ()
    """Linear layers with such matrices: names as in the state dict, ends of these names, or patterns (* and ?).
    No names = all."""


class ModelOptions(Table):
    """Options that every model has."""

    lora: LoraTable = LoraTable()
    copies: Annotated[Count, Field(le=1000)] = 1


def _model(value: Any) -> Component:
    """Return the chosen model; its options are checked when it is built, except for those of every model."""
    chosen = Component.read("model", value, "mlp")
    common = {name: chosen.given[name] for name in ModelOptions.model_fields if chosen.given.get(name) is not None}
    if not common:
        return chosen
    checked = ModelOptions.model_validate(common).model_dump(include={*common})
    return Component("model", chosen.choice, {**chosen.given, **checked})


class TaskTable(Table):
    """The task: its kind, loss and metrics."""

    kind: Literal["classification", "tokens", "multilabel", "regression"] = "classification"
    """classification: one of C classes per sample; tokens: a class at each position, -1 at positions that do not count
    (next word, next character); multilabel: any of C labels; regression: numbers. The data must have such targets."""
    loss: Annotated[Component, chooses("loss", "cross-entropy")] = Component("loss", "cross-entropy")
    """Loss. Classification: cross-entropy (option class_weights); label-smoothing (option smoothing). Tokens: the same
    without class_weights. Multilabel: bce, binary cross-entropy of each label. Regression: mse. The first of each is
    the default. Or a custom "package.module:function": function(outputs (b, …), targets (b, …)) -> (b,), one value per
    sample."""
    metrics: Annotated[tuple[Component, ...], chooses("metric")] = ()
    """Metrics of the global model in addition to those of its kind (classification: accuracy and macro-f1; tokens:
    accuracy and perplexity; multilabel: accuracy, macro-f1, mean-average-precision; regression: mae, rmse, r2): top-k
    (option k); perplexity; or a custom "package.module:function": function(outputs, targets) -> dict of sums over the
    samples, recorded as means: test_NAME, val_NAME."""

    @model_validator(mode="before")
    @classmethod
    def _loss_of_kind(cls, given: Any) -> Any:
        """The kind's own loss where none is named."""
        if isinstance(given, Mapping) and "loss" not in given:
            kind = KINDS.get(str(given.get("kind", "")))
            return given if kind is None else {**given, "loss": kind.loss}
        return given


class ClientsTable(Table):
    """Client selection, availability and failures."""

    sampler: Annotated[Component, chooses("client sampler", "uniform")] = Component("client sampler", "uniform")
    """all; uniform without replacement; shuffled (once per epoch); weighted by n_k; importance (by gradient norm);
    stratified; power-of-choice (by loss); clustered-md (by size); one of the gallery, such as oort; or a custom
    "package.module:object"."""
    count: Annotated[Count | None, not_with("clients.sampler", "all"), IN_ROUNDS] = None
    """Number of clients selected per round, m. Give this or `fraction`."""
    fraction: Annotated[Probability | None, not_with("clients.sampler", "all"), IN_ROUNDS] = None
    """Share of all clients selected per round."""
    availability: Annotated[Component, chooses("availability", "always")] = Component("availability", "always")
    """always; bernoulli: with a probability in every round; label-group: by the client's most frequent class;
    intervals: of simulated time, from a table; or a custom "package.module:object": (view) -> a probability for each
    client."""
    failure_rate: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that a selected client's update is lost after training."""
    over_selection: Annotated[float, Field(ge=1, le=1e6), not_with("devices", None)] = 1.0
    """Invite this many times the required clients, and use the updates that arrive first in simulated time."""
    attack_fraction: Annotated[Share, not_with("attack", "none")] = 0.2
    """Share of attackers among all clients; they attack whenever they are selected."""


class SizeTable(Table):
    """Estimate of the total number of samples, Ñ, for Bernoulli samples."""

    estimate: Literal["exact", "randomized-response", "duchi", "piecewise"] = "exact"
    """Source of the total size on the server: exact, or an estimate from ε-LDP size reports."""
    epsilon: Annotated[Positive, Field(ge=1e-6, le=500), PRIVATE] = 3.0
    """ε of one size report."""
    max_size: Annotated[Count, Field(ge=3), PRIVATE] = 300
    """M: sizes are clipped to M − 1."""
    clip: Annotated[bool, only_with("samples.size.estimate", "randomized-response")] = True
    """Clip sizes to M − 1 (paper); false: report larger sizes unclipped and without ε, as the published code does."""
    query: Literal["all", "selected"] = "all"
    """Clients that report their size."""
    reuse_reports: Annotated[bool, PRIVATE] = False
    """Each client repeats its first report, so ε is spent once."""


class SamplesTable(Table):
    """Data sampling within the selected clients."""

    sampler: Annotated[Component, chooses("data sampler", "all")] = Component("data sampler", "all")
    """all; bernoulli: each sample with K/Ñ (FedSampling); ratio: a fixed share of every client; exact: exactly K of the
    pooled samples; fedbalancer: by a threshold of the loss; sample-importance: by the norm of the gradient; or a custom
    data sampler, "package.module:object"."""
    budget: Annotated[
        Count | None, only_with("samples.sampler", "bernoulli", "exact", "fedbalancer", "sample-importance", OWN)
    ] = None
    """K, the number of samples per round."""
    size: Annotated[SizeTable, BERNOULLI] = SizeTable()
    """Estimation of Ñ: { estimate, epsilon, max_size, clip, query, reuse_reports }."""


class LocalTable(Table):
    """Local training of a selected client."""

    algorithm: Annotated[Component, chooses("local algorithm", "plain")] = Component("local algorithm", "plain")
    """plain: the optimizer's steps on the client's own loss; scaffold, feddyn, fednova; fedrep, ditto, per-fedavg; or a
    custom "package.module:class", a fedmpi.LocalAlgorithm."""
    optimizer: Annotated[Component, chooses("local optimizer", "sgd")] = Component("local optimizer", "sgd")
    """sgd (options momentum, nesterov, weight_decay); adam; or a custom "package.module:object": object(parameters,
    lr=η, **options) returns an object with step(), as a torch.optim.Optimizer, new for every client and round. Clients
    are then trained sequentially. If its first parameter is called named_parameters, it receives pairs (name,
    parameter)."""
    lr: Positive = 0.05
    """Learning rate η of round 0."""
    schedule: Annotated[Component, chooses("schedule", "constant")] = Component("schedule", "constant")
    """constant; inverse: η/(1 + t); cosine to zero over all rounds; step: times `factor` every `every` rounds; or a
    custom "package.module:function": (lr, round, rounds) -> the round's learning rate."""
    schedule_unit: Literal["round", "step"] = "round"
    """Unit in which `schedule` and `warmup` count. step: a client with S local steps in a round calls the schedule
    before step s of round t with t · S + s for the round and T · S for the rounds."""
    warmup: WholeOrZero = 0
    """Number of first rounds (or steps) in which the rate is multiplied by a factor that rises linearly to 1."""
    warmup_from: Annotated[Share, not_with("local.warmup", 0)] = 0.1
    """Factor at the start of the warm-up."""
    clip_norm: Positive | None = None
    """Norm to which the gradient of each batch is scaled down, as by torch.nn.utils.clip_grad_norm_, before a proximal
    term, a correction or weight decay is added. Unset = no clipping."""
    epochs: Annotated[Count, Field(le=10**5)] | None = None
    """E, passes over the local data. Give this or `steps`; default 1 epoch."""
    steps: Annotated[Count, Field(le=10**6)] | None = None
    """Number of local steps, each on newly drawn samples."""
    batch_size: Count | Literal["all"] = 10
    """B, or "all": the whole (sampled) local set as one batch."""
    drop_last: bool = False
    """Omit an epoch's last batch if it has fewer than B samples. A client with fewer samples than B keeps its only
    batch. If the model has batch norm, a client with one sample does not train and counts as one without samples."""
    proximal_mu: NonNegative = 0.0
    """μ of FedProx (Li et al. 2020, Eq 2)."""
    personal: tuple[str, ...] = ()
    """Parameters and buffers that stay on each client: patterns (* and ?) of their names, as "head.*", or of classes of
    layers, as "BatchNorm*". They are trained and checkpointed, but neither sent nor averaged. They start with the
    model's initial values."""
    engine: Literal["auto", "sequential", "batched"] = "auto"
    """Training engine. auto: chosen for the model; the run log gives the engine and the reason."""
    precision: Annotated[Literal["float32", "tf32"], not_with("server.exact", True)] = "float32"
    """Arithmetic of float32 products on a GPU: float32, or the faster TensorFloat-32 with relative errors around 1e-3.
    Without effect on a CPU."""


class Probe(Table):
    """Measurement of clients' gradients."""

    probe: Literal["full", "batch", "sample"] = "full"
    """Local data that a probe uses: all of it, one batch, one sample."""


class KMeansClustering(Table):
    """k-means with `strata` clusters."""

    name: Literal["kmeans"] = "kmeans"


class OpticsClustering(Table):
    """OPTICS with the ξ method, which finds the number of clusters (FedSSO)."""

    name: Literal["optics"] = "optics"
    min_samples: Annotated[Count, Field(ge=2)] = 2
    """Neighbors that define a core client."""
    xi: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Steepness that bounds a cluster."""
    outliers: Literal["nearest", "singletons", "stratum", "drop"] = "nearest"
    """Clients in no cluster join the stratum of the nearest clustered client, become single-client strata, form one
    common stratum, or are left out (β and the mean are then those of the others)."""


class Norms(Table):
    """Measurement of gradients for samplers that draw by their norms."""

    features: Annotated[Component, chooses("feature", "compressed-gradient")] = Component(
        "feature", "compressed-gradient"
    )
    """Measurement of a client: one-step-change (FedSSO), full-gradient, compressed-gradient (FedSTS), label-histogram;
    or a custom "package.module:function": (gradients (k, d)) or (class counts (k, C)) -> vectors (k, f)."""
    refresh: WholeOrZero = 1
    """Rounds between two measurements, with new strata; 0 = once, before the first round."""
    refresh_clients: Annotated[Literal["all", "selected"], OF_GRADIENTS, not_with("clients.sampler.refresh", 0)] = "all"
    """Clients whose gradients are measured again: all, or those selected in the previous round (the others keep their
    last gradient)."""
    projection_above: Annotated[Count, OF_GRADIENTS] = 20_000_000
    """Feature values (clients × parameters) above which a Johnson–Lindenstrauss projection is clustered instead."""


class Strata(Norms):
    """Grouping of the clients into strata."""

    initial_step: bool = False
    """Every client takes one step in round 0, and these steps give the strata (FedSSO, Algorithm 1, lines 1-3)."""
    clustering: Annotated[KMeansClustering | OpticsClustering, Variants("kmeans")] = KMeansClustering()
    """Method that groups clients into strata: k-means, or OPTICS."""
    strata: Annotated[Count, only_with("clients.sampler.clustering", "kmeans")] = 10
    """H, the number of strata of k-means."""
    spread: Annotated[Literal["std", "pairwise"], only_with("clients.sampler.allocation", "neyman")] = "std"
    """Neyman's S_h: standard deviation within the stratum, or the mean pairwise distance of the authors' code."""


class Residuals(Table):
    """Values that compression loses."""

    error_feedback: bool = False
    """Clients add the part that compression removed from their last update to the next one. Memory and checkpoints
    contain a vector per client."""


SERVICES.update(norms=Norms, strata=Strata, residuals=Residuals, gradient=Probe)


class Star(Table):
    """Every selected client sends its update to the server."""

    name: Literal["star"] = "star"


class Mediators(Table):
    """Mediators, whose groups of clients train sequentially (Astraea)."""

    name: Literal["mediators"] = "mediators"
    clients_per_mediator: Count = 10
    """γ, the largest number of clients per mediator."""
    epochs: Annotated[Count, Field(le=10_000)] = 1
    """E_m, number of visits of a mediator's model to its clients in a round."""
    regroup: Literal["once", "every-round"] = "every-round"
    """once: group all clients once, and in every round the available ones of a group share a mediator (needs
    clients.sampler = "all"); every-round: group each round's selected clients."""
    scheduling: Annotated[Component, chooses("scheduling", "greedy")] = Component("scheduling", "greedy")
    """Astraea's greedy KL (Algorithm 3); greedy followed by exchanges; random groups as a control; or a
    custom "package.module:function": (class_counts (m, C), clients_per_mediator, generator, target (C,)) -> mediator of
    each selected client (m,), from 0."""
    target: Annotated[Literal["uniform", "test"], not_with("topology.scheduling", "random")] = "uniform"
    """Class distribution that a mediator should approximate."""
    keep_optimizer: Annotated[bool, only_with("local.optimizer", "adam")] = False
    """Pass the local optimizer's state (of Adam) from client to client inside a mediator."""


class Async(Table):
    """Clients train all the time; the server steps when enough updates have arrived (FedAsync, FedBuff)."""

    name: Literal["async"] = "async"
    in_flight: Count = 64
    """Number of clients that train at the same simulated time. A client that finishes is replaced by another."""
    buffer: Count | None = None
    """K, updates per server step; 1 is FedAsync. Give this or `period`; default 10."""
    period: Positive | None = None
    """Simulated seconds between two server steps, each with all updates that have arrived."""
    staleness: Annotated[Component, chooses("staleness", "polynomial")] = Component("staleness", "polynomial")
    """Weight of an update by its staleness, the server steps since its client received the model: constant; polynomial:
    (1 + staleness)^-a; hinge; or a custom "package.module:function": (staleness) -> weight."""
    average: Literal["updates", "models"] = "updates"
    """updates: move the model by the mean update (FedBuff); models: towards the mean of the clients' models
    (FedAsync)."""

    @property
    def size(self) -> float:
        """Updates that complete a step; infinite with a period."""
        return self.buffer or (10 if self.period is None else math.inf)


class RebalanceTable(Table):
    """Astraea's augmentation of scarce classes (Algorithm 2)."""

    alpha: Annotated[float, Field(ge=0, le=2)] = 0.67
    """α: (C̄/C_y)^α copies of every sample of class y; 2 is the largest that the paper tries."""
    copies: Literal["ratio", "ratio-minus-one"] = "ratio"
    """(C̄/C_y)^α extra copies per sample, or one less (the original counted among them)."""
    mode: Literal["virtual", "stored"] = "virtual"
    """virtual: make copies while reading, store nothing; stored: data.source contains the copies, written by
    `python -m data_prep augment`."""
    weights: Annotated[Literal["augmented", "original"], WEIGHED_BY_SIZE] = "augmented"
    """Samples that n_k of the aggregation weights counts: with copies (augmented) or without (original)."""
    rotation: Annotated[NonNegative, Field(le=180), WARPED] = 15.0
    """Copies are rotated by up to this angle, in degrees, to either side."""
    shear: Annotated[float, Field(ge=0, lt=90), WARPED] = 10.0
    """Largest angle of the shear, in degrees."""
    shift: Annotated[NonNegative, Field(le=1), WARPED] = 0.1
    """Largest shift along each axis, as a share of the image's height or width."""
    zoom: Annotated[Decay, WARPED] = 0.1
    """Each axis is sampled with a factor in [1 − zoom, 1 + zoom]."""


class ServerTable(Table):
    """Computation of the next global model from the updates."""

    weights: Annotated[Component, chooses("weights", "samples")] = Component("weights", "samples")
    """samples: n_k used; uniform: 1/m; gradient-sum: |S_k|/K (-squared: |S_k|²/K); stratified: N_h/N · mean (FedSTaS);
    normalized: n_k/π_k, normalized, strata in their shares (FedSSO); unbiased: Horvitz–Thompson; literal: the next
    model is (N/K) Σ ρ_k w_k (FedSSO, Eq 3)."""
    aggregator: Annotated[Component, chooses("aggregator", "mean")] = Component("aggregator", "mean")
    """mean, the weighted sum; median, trimmed-mean and krum, which ignore weights; norm-clip; or a custom
    "package.module:object"."""
    optimizer: Annotated[Component, chooses("server optimizer", "sgd")] = Component("server optimizer", "sgd")
    """sgd, momentum, adagrad, adam or yogi, applied to the mean update (Reddi et al. 2020, Algorithm 2); or a custom
    "package.module:object"."""
    exact: bool = False
    """Sum in 64-bit fixed point: bit-identical results on any number of ranks with CPUs of one type, but slower."""


class PowerTable(Table):
    """Power of the clients' devices in watts. The record of a round then has the joules of all invited clients."""

    download: Annotated[Component, chooses("device rate", "constant", "devices.power.download")] = Component(
        "device rate", "constant"
    )
    """Watts while a client receives: constant (1), lognormal, classes, table, or a custom function."""
    training: Annotated[Component, chooses("device rate", "constant", "devices.power.training")] = download
    """Watts while a client trains: constant (3), lognormal, classes, table, or a custom function."""
    upload: Annotated[Component, chooses("device rate", "constant", "devices.power.upload")] = download
    """Watts while a client sends: constant (1), lognormal, classes, table, or a custom function."""


class DevicesTable(Table):
    """Simulated time: `virtual_seconds` of a round is the time at which its last used update arrived."""

    speed: Annotated[Component, chooses("device rate", "constant")] = Component("device rate", "constant")
    """Samples trained per second: constant (1,000); lognormal; classes; table, a column of a file; or a custom
    "package.module:function": (view) -> the rate of each client (N,)."""
    upload: Annotated[Component, chooses("device rate", "constant", "devices.upload")] = speed
    """Bytes per second from a client: constant (1,000,000), lognormal, classes, table, or a custom function."""
    download: Annotated[Component, chooses("device rate", "constant", "devices.download")] = speed
    """Bytes per second to a client: constant (4,000,000), lognormal, classes, table, or a custom function."""
    power: Annotated[PowerTable | None, switch(PowerTable)] = None
    """Watts of the devices; absent or false = energy is not recorded, true = with the defaults."""
    deadline: Positive | None = None
    """Simulated seconds after which a round ends. Unset = the server waits for all updates that it uses."""
    late: Annotated[Literal["lost", "partial"], not_with("devices.deadline", None)] = "lost"
    """Updates that would arrive after the deadline. lost: they are not used; partial: the client does only the first
    local steps that fit before the deadline, and its update is lost if not even one fits."""


class AdaptiveClipTable(Table):
    """Clipping norm that follows a quantile of the norms of updates (Andrew et al. 2021)."""

    quantile: Share = 0.5
    """γ: share of the updates that the norm should leave unclipped."""
    lr: Positive = 0.2
    """η: the norm is multiplied by exp(−η (b̃ − γ)) per round, where b̃ is the noisy share of unclipped updates."""
    count_noise: NonNegative | None = None
    """σ_b: standard deviation of the noise on the number of unclipped updates, more than half of noise_multiplier.
    Unset = m/20 for m selected clients."""


class PrivacyTable(Table):
    """Client-level differential privacy of the updates."""

    clip_norm: Positive | None = None
    """C: clip every client's update to this Euclidean norm. The sum is divided by the planned number of selected
    clients (N with clients.sampler = "all"). Unset = no privacy of updates."""
    noise_multiplier: Annotated[NonNegative, Field(le=1e6), CLIPPED] = 0.0
    """σ: Gaussian noise of standard deviation σ · clip_norm is added to the sum of the clipped updates. The ε reported
    is that of replacing one client's data, which moves the sum by up to 2 · clip_norm. 0 = no noise, no ε."""
    noise: Annotated[Literal["independent", "tree"], not_with("privacy.noise_multiplier", 0.0)] = "independent"
    """independent: each round has its own noise; tree: noise of binary trees, which adds up to little over an epoch of
    clients.sampler = "shuffled" (DP-FTRL, Kairouz et al. 2021), and whose ε needs no amplification by sampling."""
    adaptive_clip: Annotated[AdaptiveClipTable | None, switch(AdaptiveClipTable), CLIPPED] = None
    """Adapt the clipping norm, from clip_norm on, to a quantile of the norms of updates (Andrew et al. 2021): true, or
    { quantile, lr, count_noise }. The ε stays that of noise_multiplier."""
    delta: Annotated[float, Field(ge=1e-100, lt=1), CLIPPED] = 1e-5
    """δ of the reported ε; choose it well below 1/N for N clients."""


class ClusterTable(Table):
    """Computation and communication of the ranks."""

    device: str = "auto"
    """auto (a GPU per rank, if there are GPUs), cpu, cuda, cuda:1, …; the same kind on all ranks."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Threads per rank. 0 = the cores of the job on a node divided by its ranks, or one if a step is too small for
    more. Set a number if two runs must agree bit for bit; with server.exact it is one."""
    stall_timeout: Annotated[NonNegative, Field(le=10**7)] = 3600.0
    """Seconds without a finished round after which a job of several ranks ends with exit code 1. The ranks print the
    line that each thread executes. Loading the data counts as a round. 0 = never."""
    server_trains: Literal["auto", "never", "always"] = "auto"
    """Training of clients on rank 0 of several ranks. auto: it trains if all ranks can read all data
    (cluster.placement) and no node has more ranks than cores or GPUs. A single process always trains."""
    placement: Literal["auto", "owner", "shared", "mediator"] = "auto"
    """Rank that trains a selected client. owner: the rank that owns its data; shared (star): any rank, so that all have
    equal work in every round; mediator: one rank for all clients of a mediator. auto: shared in a star if the data fits
    in every rank's memory, else owner."""
    balance: Annotated[
        Literal["planned", "measured"], only_with("topology", "star"), only_with("cluster.placement", "auto", "shared")
    ] = "planned"
    """Assignment of a shared cohort to the ranks. planned: equal samples and steps; measured: the speed of
    every worker is learned from the seconds of past rounds. Two runs with "measured" agree only up to
    floating-point rounding, since other workers may train other clients. With server.exact they agree bit for bit."""
    state_memory: Annotated[NonNegative, Field(le=10**6)] = 2.0
    """GiB of each rank's memory for client states of local.algorithm and local.personal; the rest is in a temporary
    file in the run folder, or in the system's temporary folder without one."""
    reduction: Literal["auto", "window", "allreduce", "device"] = "auto"
    """Sum updates in the node's shared memory (window), by MPI's Allreduce in host memory (allreduce), or by Allreduce
    in device memory (device; on GPUs with a CUDA-aware MPI only). auto: device if every rank has a GPU that MPI reads,
    else by the size of the model."""


class EvaluationTable(Table):
    """Evaluation of the global model."""

    every: Count = 1
    """Rounds between two evaluations (the last round is always evaluated)."""
    on: Literal["auto", "test", "val", "both"] = "auto"
    """test: the test set; val: the clients' validation samples (data_prep --val); both; auto: both if there are
    validation samples, else test. The best round has the highest accuracy on val if it is evaluated, else on test."""
    batch_size: Count | Literal["auto"] = "auto"
    """Samples evaluated at once. auto: 2,000. On a CPU auto takes fewer if the outputs of the model's widest layer
    exceed 8 MiB, since larger passes do not fit into the caches."""
    target_accuracy: Probability | None = None
    """The summary reports the first round that reached this test accuracy (with on = "val": validation accuracy)."""
    patience: Count | None = None
    """Number of evaluations in a row without an improvement after which the run ends. The score is the one that chooses
    the best round. Unset = run all rounds."""
    min_delta: Annotated[NonNegative, PATIENT] = 0.0
    """Improvements of the score up to this amount do not count."""
    clients: Count | Literal["all", "participants"] | None = None
    """Clients on whose samples the global model is evaluated separately: all; participants, the selected clients; or a
    number of clients, drawn once by the seed. Uses their validation samples (data_prep --val), or their training
    samples if there are none. Unset = none."""
    clients_every: Annotated[Count, VIEWING] = 10
    """Rounds between two evaluations on clients (they are always evaluated after the last round)."""
    fine_tune: Annotated[int, Field(ge=0, le=10_000), VIEWING] = 0
    """E: also evaluate the global model after E epochs of fine-tuning on each client's training samples, with the run's
    local settings, at local.lr if schedules count steps. The run does not use the fine-tuned models. 0 = no."""

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
    """Record drift, gradient diversity, update norms, participation fairness and the decrease of local losses. Clients
    are then not merged, and each needs two more passes over its data."""
    participants: bool = False
    """Record the selected clients of each round (key `clients`: ascending numbers and ranges, "0-9 12 15"). With
    devices and without mediators, also record bytes, and joules with devices.power, of each invited client."""


class ConfigTables(Table):
    """All tables of a configuration, each value in its range; `loading.Config` checks that they go together."""

    preset: str | None = None
    """A published method that chooses the components below. The file and --set override it."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of all random numbers of the run."""
    rounds: Annotated[Count, Field(le=99_999_999)] = 50
    """T, the number of rounds."""
    data: DataTable = DataTable()
    model: Annotated[Component, BeforeValidator(_model)] = Component("model", "mlp")
    """Built-in model (mlp, cnn, …) or a custom "package.module:function": function(description, **options). `lora` =
    { rank, alpha, targets }: train and send only small matrices beside Linear layers (Hu et al. 2022). `copies` = k:
    k global models; each client trains the one with the lowest loss on its training samples (IFCA)."""
    task: TaskTable = TaskTable()
    clients: ClientsTable = ClientsTable()
    samples: SamplesTable = SamplesTable()
    local: LocalTable = LocalTable()
    topology: Annotated[Star | Mediators | Async, Variants("star")] = Star()
    """star: every selected client sends its update to the server; mediators: groups of clients train sequentially
    (Astraea); async: clients train all the time in simulated time (FedAsync, FedBuff)."""
    rebalance: Annotated[RebalanceTable | None, switch(RebalanceTable)] = None
    """Astraea's augmentation of scarce classes; absent or false = off, true = on with the defaults."""
    server: ServerTable = ServerTable()
    attack: Annotated[Component, chooses("attack", "none")] = Component("attack", "none")
    """Attack of a share of the clients (clients.attack_fraction): none; sign-flip; noise; label-flip; or a custom
    "package.module:function": (update (d,), generator) -> the update that an attacker sends."""
    compression: Annotated[Component, chooses("compressor", "none")] = Component("compressor", "none")
    """Lossy upload of updates, simulated: none; float16; bfloat16; int8; top-k; or a custom
    "package.module:function": (update (d,), generator) -> the update that the server receives."""
    privacy: PrivacyTable = PrivacyTable()
    devices: Annotated[DevicesTable | None, switch(DevicesTable)] = None
    """Simulated time; absent or false = none, true = with the defaults."""
    cluster: ClusterTable = ClusterTable()
    evaluation: EvaluationTable = EvaluationTable()
    checkpoint: CheckpointTable = CheckpointTable()
    logging: LoggingTable = LoggingTable()


def local_algorithm(config: ConfigTables) -> tuple[Component, Any] | None:
    """Return the component that `local.algorithm` chooses and an instance of it; None for plain local steps."""
    part = config.local.algorithm
    if part.name == PLAIN:
        return None
    if getattr(part.object, MARKS, {}).get("kind") != part.kind:
        raise UserError(f"local.algorithm = {part.name!r} is no subclass of fedmpi.LocalAlgorithm. Make it one")
    with calling(part):
        return part, part.make()


def probe_of(config: ConfigTables) -> Literal["full", "batch", "sample"]:
    """Return how much of a client's data a probe of its gradient uses."""
    probe: Literal["full", "batch", "sample"] = stratification(config).features.values.get("probe", "full")
    return probe


def of_labels(config: ConfigTables) -> bool:
    """Check whether the clients are measured by their class counts, not by their gradients."""
    return "labels" in stratification(config).features.marks.get("needs", ())


def stratification(config: ConfigTables) -> Strata:
    """Return how clients are measured and grouped for the sampler of a configuration."""
    services = config.clients.sampler.services
    if isinstance(services, Strata):
        return services
    return Strata(**({} if services is None else {name: getattr(services, name) for name in Norms.model_fields}))


def copies_of(config: ConfigTables) -> int:
    """Return the number of copies of the model."""
    copies: int = config.model.given.get("copies", 1)
    return copies


def further_vectors(config: ConfigTables) -> tuple[int, int, int]:
    """Count the values sent in addition to a client's model and update: vectors (d,) down, vectors up, numbers up."""
    found, chooses_copy = local_algorithm(config), int(copies_of(config) > 1)  # and sends its number
    if found is None:
        return 0, 0, chooses_copy
    sent = "server_state" if found[1].sent is None else "sent"
    down, up, numbers = (len(names_in(*found, field)) for field in (sent, "sums", "numbers"))
    return down, up, numbers


def names_in(part: Component, algorithm: Any, field: str) -> tuple[str, ...]:
    """Return the names that an algorithm declares in a field. A single name needs no tuple."""
    declared = getattr(algorithm, field)
    if isinstance(declared, str):
        return (declared,)
    if not isinstance(declared, Sequence):
        raise UserError(f'{part.key} = {part.name!r} has {field} = {declared!r}. List names, as in {field} = ("c",)')
    return tuple(declared)
