"""Tables for clients: data, model, task, client selection, strata, data sampling, and local training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from fedmpi.common.options import OWN, not_with, only_with
from fedmpi.common.registry import DIGITS, SERVICES, SOURCE, Chosen
from fedmpi.common.task_kinds import KINDS
from fedmpi.config.base import (
    Count,
    NonNegative,
    Positive,
    Probability,
    Share,
    Table,
    Variants,
    WholeOrZero,
    chooses,
    chooses_several,
)

OF_GRADIENTS = not_with("clients.sampler.features", "label-histogram")
BERNOULLI = only_with("samples.sampler", "bernoulli")
PRIVATE = not_with("samples.size.estimate", "exact")


class DataTable(Table):
    """The data."""

    source: Annotated[Chosen, chooses(SOURCE, DIGITS)] = Chosen(SOURCE, DIGITS)
    """Folder written by `python -m data_prep`; digits: the 1,797 embedded handwritten digits of scikit-learn (options
    clients, partition, alpha, seed); or a custom "package.module:function": function(**options) returns
    ClientArrays."""
    verify: bool = False
    """Check the SHA-256 of every shard before training."""
    normalize: bool = True
    """Standardize features by the data set's mean and deviation; false: bytes become [0, 1], other numbers stay."""


class LoraTable(Table):
    """Small matrices that are trained instead of a model's parameters."""

    rank: Annotated[Count, Field(le=65_536)] = 4
    """r, rows of A and columns of B."""
    alpha: Positive = 8.0
    """α: what the matrices add is multiplied by α / r."""
    targets: tuple[str, ...] = ()
    """Linear layers that get such matrices: names as in the state dict, the ends of such names, or patterns (* and ?).
    No names = all."""


class ModelOptions(Table):
    """Options that every model has."""

    lora: LoraTable


def _model(value: Any) -> Chosen:
    """Return the chosen model; its options are checked when it is built, except for those of LoRA."""
    chosen = Chosen.read("model", value, "mlp")
    if chosen.given.get("lora") is None:
        return chosen
    common = ModelOptions.model_validate({"lora": chosen.given["lora"]})
    return Chosen("model", chosen.choice, {**chosen.given, **common.model_dump()})


Model = Annotated[Chosen, BeforeValidator(_model)]


class TaskTable(Table):
    """The task: its kind, loss and metrics."""

    kind: Literal["classification", "tokens", "multilabel", "regression"] = "classification"
    """classification: one of C classes a sample; tokens: one at each of its positions, -1 where none counts (next word,
    next character); multilabel: any of C labels; regression: numbers. The data say which they are for."""
    loss: Annotated[Chosen, chooses("loss", "cross-entropy")] = Chosen("loss", "cross-entropy")
    """Loss. Classification and tokens: cross-entropy; label-smoothing (option smoothing). Multilabel: bce, binary
    cross-entropy of each label. Regression: mse. The first of each is the default. Or a custom
    "package.module:function": function(outputs (b, …), targets (b, …)) -> (b,), one value per sample."""
    metrics: Annotated[tuple[Chosen, ...], chooses_several("metric")] = ()
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

    sampler: Annotated[Chosen, chooses("client sampler", "uniform")] = Chosen("client sampler", "uniform")
    """all; uniform without replacement; weighted by n_k; importance (by gradient norm); stratified; power-of-choice,
    oort (by loss); clustered-md (by size); or a custom sampler, "package.module:object"."""
    count: Annotated[Count | None, not_with("clients.sampler", "all")] = None
    """Number of clients selected per round, m. Give this or `fraction`."""
    fraction: Annotated[Probability | None, not_with("clients.sampler", "all")] = None
    """Share of all clients selected per round."""
    availability: Annotated[Chosen, chooses("availability", "always")] = Chosen("availability", "always")
    """always; bernoulli: with a probability in every round; label-group: by the client's most frequent
    class; or a custom "package.module:object": (view) -> a probability for each client."""
    failure_rate: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that a selected client's update is lost after training."""
    over_selection: Annotated[
        float,
        Field(ge=1, le=1e6),
        not_with("devices", None),
    ] = 1.0
    """Invite this many times the clients needed and take the first updates to arrive on the simulated clock (any of
    those that arrive together)."""
    attack_fraction: Annotated[Share, not_with("attack", "none")] = 0.2
    """Share of all clients that attack whenever they are selected."""


class SizeTable(Table):
    """Estimate of the total number of samples, Ñ, for Bernoulli samples."""

    estimate: Literal["exact", "randomized-response", "duchi", "piecewise"] = "exact"
    """Estimation of the total size by the server: exactly, or from ε-LDP answers."""
    epsilon: Annotated[
        Positive,
        Field(ge=1e-6, le=500),
        PRIVATE,
    ] = 3.0
    """ε of one client's size answer."""
    max_size: Annotated[Count, Field(ge=3), PRIVATE] = 300
    """M: answers lie in 1 … M − 1; larger clients are clipped."""
    clip: Annotated[bool, only_with("samples.size.estimate", "randomized-response")] = True
    """Clip sizes at M − 1 (paper), or answer unclipped as the published code does (no ε for larger clients)."""
    query: Literal["all", "selected"] = "all"
    """Clients that report their size."""
    reuse_reports: Annotated[bool, PRIVATE] = False
    """Each client answers once and repeats that answer: ε is spent once."""


class SamplesTable(Table):
    """Data sampling within the selected clients."""

    sampler: Annotated[Chosen, chooses("data sampler", "all")] = Chosen("data sampler", "all")
    """all; bernoulli: each sample with K/Ñ (FedSampling); ratio: a fixed share of every client; exact: exactly K of the
    pooled samples; or a custom data sampler, "package.module:object"."""
    budget: Annotated[Count | None, only_with("samples.sampler", "bernoulli", "exact", OWN)] = None
    """K, the number of samples per round."""
    size: Annotated[SizeTable, BERNOULLI] = SizeTable()
    """Estimation of Ñ: { estimate, epsilon, max_size, clip, query, reuse_reports }."""


class LocalTable(Table):
    """Local training of a selected client."""

    algorithm: Annotated[Chosen, chooses("local algorithm", "plain")] = Chosen("local algorithm", "plain")
    """plain: the optimizer's steps on the client's own loss; scaffold, feddyn, fednova; or a custom
    "package.module:class", a fedmpi.LocalAlgorithm."""
    optimizer: Annotated[Chosen, chooses("local optimizer", "sgd")] = Chosen("local optimizer", "sgd")
    """sgd; adam; or a custom "package.module:object": object(parameters, lr=η, **options) returns an object with
    step(), as a torch.optim.Optimizer, new for every client and round. Clients are then trained sequentially."""
    lr: Positive = 0.05
    """Learning rate η of round 0."""
    schedule: Annotated[Chosen, chooses("schedule", "constant")] = Chosen("schedule", "constant")
    """constant; inverse: η/(1 + t); cosine to zero over all rounds; step: times `factor` every `every` rounds; or a
    custom "package.module:function": (lr, round, rounds) -> the round's learning rate."""
    epochs: Annotated[Count, Field(le=10**5)] | None = None
    """E, passes over the local data. Give this or `steps`; default 1 epoch."""
    steps: Annotated[Count, Field(le=10**6)] | None = None
    """Number of local steps, each on freshly drawn rows."""
    batch_size: Count | Literal["all"] = 10
    """B, or "all": the whole (sampled) local set as one batch."""
    drop_last: bool = False
    """Leave out an epoch's last batch where it has fewer than B samples. A client with fewer samples than B keeps its
    only batch. Where the model computes batch statistics (BatchNorm), a client with one sample does not train: it
    counts as a client without samples."""
    proximal_mu: NonNegative = 0.0
    """μ of FedProx (Li et al. 2020, Eq 2)."""
    engine: Literal["auto", "sequential", "batched"] = "auto"
    """Training engine. auto: chosen for the model; the run log gives the engine and the reason."""
    precision: Annotated[Literal["float32", "tf32"], not_with("server.exact", True)] = "float32"
    """Arithmetic of float32 products on a GPU: float32, or the faster TensorFloat-32 with relative errors around 1e-3.
    Without effect on a CPU."""


class LabelHistogram(Table):
    """Shares of the classes among a client's samples."""

    name: Literal["label-histogram"] = "label-histogram"


class GradientFeatures(Table):
    """FedSSO's model change after one step, or the local gradient."""

    name: Literal["one-step-change", "full-gradient"]
    probe: Literal["full", "batch", "sample"] = "full"
    """Local data that a probe uses: all of it, one batch, one sample."""


class CompressedGradient(Table):
    """FedSTS's compressed gradient: every value is replaced by the nearest of d' centers (IS())."""

    name: Literal["compressed-gradient"] = "compressed-gradient"
    codebook_size: Annotated[int, Field(ge=2, le=255)] = 9
    """d', the number of values that a compressed gradient keeps (FedSTaS, IS())."""
    decompress: bool = True
    """Cluster the decompressed gradients (the paper) or, if false, the d' sorted centers (the authors' code)."""
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


Features = Annotated[LabelHistogram | GradientFeatures | CompressedGradient, Variants("compressed-gradient")]
Clustering = Annotated[KMeansClustering | OpticsClustering, Variants("kmeans")]


class Norms(Table):
    """Measurement of gradients for samplers that draw by their norms."""

    features: Features = CompressedGradient()
    """Measurement of a client: FedSSO's one-step model change, the local gradient, FedSTS's compressed gradient,
    label shares."""
    refresh: WholeOrZero = 1
    """Rounds between two stratifications; 0 = once, before the first round."""
    refresh_clients: Annotated[Literal["all", "selected"], OF_GRADIENTS, not_with("clients.sampler.refresh", 0)] = "all"
    """Clients whose gradients are measured again: all, or those selected in the previous round (the others' become
    stale)."""
    projection_above: Annotated[Count, OF_GRADIENTS] = 20_000_000
    """Feature values (clients × parameters) above which a Johnson–Lindenstrauss projection is clustered instead."""


class Strata(Norms):
    """Grouping of the clients into strata."""

    initial_step: bool = False
    """Round 0 is one step of every client, from which the strata are made, too (FedSSO, Algorithm 1, lines 1-3)."""
    clustering: Clustering = KMeansClustering()
    """Method that groups clients into strata: k-means, or OPTICS."""
    strata: Annotated[Count, only_with("clients.sampler.clustering", "kmeans")] = 10
    """H, the number of strata of k-means."""
    spread: Annotated[Literal["std", "pairwise"], only_with("clients.sampler.allocation", "neyman")] = "std"
    """Neyman's S_h: standard deviation within the stratum, or the mean pairwise distance of the authors' code."""


class Residuals(Table):
    """Values that compression loses."""

    error_feedback: bool = False
    """Clients add what was lost of their last update to the next. Memory and checkpoints hold a vector per client."""


SERVICES.update(norms=Norms, strata=Strata, residuals=Residuals)
