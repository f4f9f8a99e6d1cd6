"""The tables about clients: their data, the model, who takes part, with which samples, and the local work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedmpi.common.data_choices import DIGITS
from fedmpi.common.registry import resolve
from fedmpi.common.task_kinds import KINDS
from fedmpi.config.base import (
    OWN,
    PLANNED,
    Choice,
    Choices,
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

OF_GRADIENTS = not_with("features", "label-histogram")
ESTIMATED = only_with("rule", "bernoulli")
PRIVATE = not_with("size_estimate", "exact")


class DataTable(OpenTable):
    """Which data; keys not listed here are options of what makes them: the digits, or a function of your own."""

    in_config = "data"

    shards: Choice = DIGITS
    """Folder written by `python -m data_prep`, or "digits": the 1,797 embedded handwritten digits of scikit-learn
    (options clients, partition, alpha, seed, beside it or in the name: "digits:clients=50,alpha=0.1"), or
    "package.module:function" of your own: function(**options) gives ClientArrays."""
    verify: bool = False
    """Check every shard's sha256 before training."""
    normalise: bool = True
    """Standardise features by the data set's mean and deviation; false: bytes become [0, 1], other numbers stay."""


class LoraTable(Table):
    """Small matrices that are trained in place of a model's values."""

    rank: Annotated[Count, limits(1, 65_536, "no layer is that wide")] = 4
    """r, rows of A and columns of B."""
    alpha: Positive = 8.0
    """α: what the matrices add is multiplied by α / r."""
    targets: tuple[str, ...] = ()
    """Linear layers beside which they stand: names as in the state dict, last parts of them, or patterns (* and ?);
    none named = all."""


class ModelTable(BaseModel):
    """Which model; keys other than `name` are options of the model itself (e.g. hidden = [200, 200] of the MLP)."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    name: Choice = "mlp"
    """A built-in model (mlp, cnn, …), or "package.module:function" of your own: function(description, **options)."""

    lora: LoraTable | None = None
    """Small matrices beside Linear layers that alone are trained and sent, {rank, alpha, targets}; the other values
    stay as they are (Hu et al. 2022)."""

    @property
    def options(self) -> dict[str, Any]:
        """The model's own options: every key but `name`; and `lora` where it is set."""
        return dict(self.model_extra or {}) | ({"lora": self.lora.model_dump()} if self.lora else {})


class TaskTable(OpenTable):
    """What is learned; keys not listed here are options of the loss and of the metrics."""

    in_config = "task"

    kind: Literal["classification", "tokens", "multilabel", "regression"] = "classification"
    """classification: one of C classes a sample; tokens: one at each of its positions, -1 where none counts (next word,
    next character); multilabel: any of C labels; regression: numbers. The data say which they are for."""
    loss: Choice = "cross-entropy"
    """Of classification and tokens: cross-entropy; label-smoothing (option smoothing); focal (option gamma). Of
    multilabel: bce, binary cross-entropy of each label. Of regression: mse; l1; huber (option delta). The first of each
    unless another is named. Or your own "package.module:function": function(outputs (b, …), targets (b, …)) -> (b,),
    one value a sample."""
    metrics: Choices = ()
    """What else the global model is evaluated by, beside what its kind always measures (classification: accuracy and
    macro-f1; tokens: accuracy and perplexity; multilabel: accuracy, macro-f1, mean-average-precision; regression: mae,
    rmse, r2): top-5; top-k (option k); perplexity; calibration-error (option bins); or your own
    "package.module:function": function(outputs, targets) -> dict of sums over the samples, recorded as means:
    test_NAME, val_NAME."""

    @model_validator(mode="before")
    @classmethod
    def _loss_of_kind(cls, given: Any) -> Any:
        """The kind's own loss where none is named."""
        if isinstance(given, Mapping) and "loss" not in given:
            kind = KINDS.get(str(given.get("kind", "")))
            return given if kind is None else {**given, "loss": kind.loss}
        return given


class ParticipationTable(OpenTable):
    """Which clients take part in a round; other keys are options of the sampler (`fedmpi parts`)."""

    in_config = "participation"

    clients: Choice = "uniform"
    """all; uniform without replacement; weighted by n_k; importance (by gradient norm); stratified; power-of-choice,
    oort (by loss); clustered-md (by size); or "package.module:object", a sampler of your own."""
    count: Annotated[Count | None, not_with("clients", "all")] = None
    """Clients drawn per round, m. Give this or `fraction`."""
    fraction: Annotated[Probability | None, not_with("clients", "all")] = None
    """Share of all clients drawn per round."""
    replace: bool = True
    """Weighted draws: with replacement (a client drawn twice counts twice; Li et al. 2020, scheme I) or without."""
    features: Literal["one-step-change", "full-gradient", "compressed-gradient", "label-histogram"] = (
        "compressed-gradient"
    )
    """What the strata are made from: FedSSO's one-step model change, the local gradient, FedSTS's compressed gradient,
    label shares."""
    levels: Annotated[int, Field(ge=2, le=255), only_with("features", "compressed-gradient")] = 9
    """d', the number of values a compressed gradient keeps (FedSTaS, IS())."""
    restore: Annotated[bool, only_with("features", "compressed-gradient")] = True
    """Cluster the restored compressed gradients (the paper) or, if false, the d' sorted centres (the authors' code)."""
    probe: Annotated[Literal["full", "batch", "sample"], OF_GRADIENTS] = "full"
    """How much local data a probe sees: all of it, one batch, one sample."""
    refresh: WholeOrZero = 1
    """Rounds between two stratifications; 0 = once, before the first round."""
    refresh_who: Annotated[Literal["all", "participants"], OF_GRADIENTS, not_with("refresh", 0)] = "all"
    """Whose gradients are measured anew: all, or those of the last round's participants (the others' grow stale)."""
    opening: bool = False
    """Round 0 is one step of every client, from which the strata are made too (FedSSO, Algorithm 1, lines 1-3)."""
    clustering: Literal["kmeans", "optics"] = "kmeans"
    """How clients are grouped into strata."""
    strata: Annotated[Count, only_with("clustering", "kmeans")] = 10
    """H, the number of strata of k-means."""
    min_samples: Annotated[Count, Field(ge=2), only_with("clustering", "optics")] = 2
    """OPTICS: neighbours that make a core client."""
    xi: Annotated[float, Field(gt=0, lt=1), only_with("clustering", "optics")] = 0.25
    """OPTICS: steepness that bounds a cluster."""
    noise: Annotated[Literal["nearest", "singletons", "stratum", "drop"], only_with("clustering", "optics")] = "nearest"
    """OPTICS: clients in no cluster join the stratum of the nearest client in one, become strata of their own, one
    common stratum, or are left out (β and the mean are then those of the others)."""
    projection_above: Annotated[Count, OF_GRADIENTS] = 20_000_000
    """Feature values (clients × model values) above which a Johnson–Lindenstrauss projection is clustered instead."""
    allocation: Literal["proportional", "neyman", "equal"] = "neyman"
    """How m is split over the strata."""
    spread: Annotated[Literal["std", "pairwise"], only_with("allocation", "neyman")] = "std"
    """Neyman's S_h: standard deviation within the stratum, or the mean pairwise distance of the authors' code."""
    every_stratum: Annotated[bool, only_with("allocation", "neyman")] = True
    """Neyman: every stratum has a participant at least while m is no smaller than H; if false, a round may leave some
    out, and m_h is m N_h S_h / Σ N_h S_h in expectation."""
    draw: Literal["uniform", "importance"] = "importance"
    """Inside a stratum: uniform, or with p_k proportional to the norm of the (compressed) gradient."""
    design: Annotated[Literal["systematic", "sequential"], only_with("draw", "importance")] = "systematic"
    """Importance draws: systematic PPS, whose inclusion probabilities are known, or one client after another (the
    paper's words)."""

    def refusal(self) -> str | None:
        sampler = resolve("client sampler", self.clients)
        if self.clients != "all" and self.count is None and self.fraction is None:
            return (
                f'participation.clients = "{sampler.name}" needs to know how many: set participation.count or .fraction'
            )
        if self.count is not None and self.fraction is not None:
            return (
                f"participation.count = {self.count} and participation.fraction = {self.fraction} say the same in two "
                "ways. Keep one of them"
            )
        by_norm = "norms" in sampler.marks.get("needs", ()) or (sampler.name, self.draw) == ("stratified", "importance")
        if by_norm and self.features == "label-histogram":
            return (
                'importance draws need the norms of gradients, which participation.features = "label-histogram" lacks: '
                'set participation.draw = "uniform"'
            )
        return None


class SamplesTable(OpenTable):
    """Which of the participants' data is used; other keys are options of the rule (`fedmpi parts`)."""

    in_config = "samples"

    rule: Choice = "all"
    """all; bernoulli: each sample with K/Ñ (FedSampling); ratio: a fixed share of every client; exact: exactly K of the
    pooled samples; or "package.module:object", a rule of your own."""
    wanted: Annotated[Count | None, only_with("rule", "bernoulli", "exact", OWN)] = None
    """K, the number of samples wanted per round."""
    ratio: Probability | None = None
    """The naive rule's fixed share r."""
    size_estimate: Annotated[Literal["exact", "randomized-response", "duchi", "piecewise"], ESTIMATED] = "exact"
    """How the server learns the total size: exactly, or from ε-LDP answers."""
    epsilon: Annotated[
        Positive,
        limits(1e-6, 500.0, "below, answers say nothing of the sizes; above they tell them (size_estimate = exact)"),
        ESTIMATED,
        PRIVATE,
    ] = 3.0
    """ε of one client's size answer."""
    threshold: Annotated[Count, Field(ge=3), ESTIMATED, PRIVATE] = 300
    """M: answers lie in 1 … M − 1; larger clients are clipped."""
    clip: Annotated[bool, ESTIMATED, only_with("size_estimate", "randomized-response")] = True
    """Clip sizes at M − 1 (paper), or answer unclipped as the published code does (no ε for larger clients)."""
    asked: Annotated[Literal["all", "participants"], ESTIMATED] = "all"
    """Who is asked for its size."""
    memoise: Annotated[bool, ESTIMATED, PRIVATE] = False
    """Each client answers once and repeats that answer: ε is spent once."""

    def refusal(self) -> str | None:
        if self.rule in ("bernoulli", "exact") and self.wanted is None:
            return f'samples.rule = "{self.rule}" needs samples.wanted, the number K of samples per round'
        return None


class LocalTable(OpenTable):
    """What a participant does with its data; keys not listed here are options of the algorithm."""

    in_config = "local"

    algorithm: Choice = "plain"
    """plain: the optimizer's steps on the client's own loss; scaffold, feddyn, fednova; or "package.module:class" of
    your own, a fedmpi.LocalAlgorithm."""
    optimizer: Choice = "sgd"
    """sgd; adam; or "package.module:object" of your own: object(parameters, lr=η, **options) returns what has a step(),
    as a torch.optim.Optimizer, afresh for every client and round. Clients are then trained one at a time."""
    lr: Positive = 0.05
    """Learning rate η of round 0."""
    lr_schedule: Literal["constant", "inverse", "cosine", "step"] = "constant"
    """constant; inverse: η/(1 + t); cosine to zero over all rounds; step: times lr_factor every lr_every rounds."""
    lr_every: Annotated[Count, only_with("lr_schedule", "step")] = 30
    """Rounds between two steps of the step schedule."""
    lr_factor: Annotated[Positive, only_with("lr_schedule", "step")] = 0.1
    """Factor of the step schedule."""
    epochs: Annotated[Count, limits(0, 10**5, "a client's batches are laid out before it trains")] | None = None
    """E, passes over the local data. Give this or `steps`; default 1 epoch."""
    steps: Annotated[Count, PLANNED] | None = None
    """Number of local steps, each on freshly drawn rows."""
    batch_size: Count | Literal["all"] = 10
    """B, or "all": the whole (sampled) local set as one batch."""
    drop_last: bool = False
    """Leave out an epoch's last batch where it has fewer than B samples. A client with fewer samples than B keeps its
    only batch. Where the model computes batch statistics (BatchNorm), a client with one sample does not train: it
    counts as a client without samples."""
    proximal_mu: NonNegative = 0.0
    """μ of FedProx (Li et al. 2020, Eq 2)."""
    beta1: Decay = 0.9
    """Adam: decay of the first moment."""
    beta2: Decay = 0.999
    """Adam: decay of the second moment."""
    epsilon: Positive = 1e-8
    """Adam: added to the root of the second moment."""
    on_divergence: Literal["stop", "drop"] = "stop"
    """What is done about a client whose loss or update is not finite, or too large for anything to be learned. stop:
    the run ends and names it; drop: the round goes on without its update, and the record counts it as `diverged`. Such
    a client does not count where weights are normalised, and counts as unchanged where they are not (stratified)."""
    engine: Literal["auto", "sequential", "merged", "batched"] = "auto"
    """Which of the engines trains: auto chooses, the run log says which and why."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: matrix products of the local training run in it (torch.autocast). Weights, losses, updates and sums
    stay float32, as do evaluation and the gradients that strata and importance draws look at. Rejected before the first
    round where torch cannot train the model in it on this device, as LSTMs on CPUs without AVX-512."""

    def refusal(self) -> str | None:
        if self.epochs is not None and self.steps is not None:
            both = f"local.epochs = {self.epochs} and local.steps = {self.steps}"
            return f"{both} say the same in two ways. Keep one of them"
        return None
