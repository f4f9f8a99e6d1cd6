"""Options of samplers that need strata of the clients or the norms of their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fedmpi.common.options import not_with, only_with
from fedmpi.common.registry import SERVICES
from fedmpi.config.base import Count, Table, Variants, WholeOrZero

if TYPE_CHECKING:
    from fedmpi.config.tables import ConfigTables


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
    refresh_clients: Annotated[
        Literal["all", "selected"], not_with("features", "label-histogram"), not_with("refresh", 0)
    ] = "all"
    """Clients whose gradients are measured again: all, or those selected in the previous round (the others' become
    stale)."""
    projection_above: Annotated[Count, not_with("features", "label-histogram")] = 20_000_000
    """Feature values (clients × parameters) above which a Johnson–Lindenstrauss projection is clustered instead."""


class Strata(Norms):
    """Grouping of the clients into strata."""

    initial_step: bool = False
    """Round 0 is one step of every client, from which the strata are made, too (FedSSO, Algorithm 1, lines 1-3)."""
    clustering: Clustering = KMeansClustering()
    """Method that groups clients into strata: k-means, or OPTICS."""
    strata: Annotated[Count, only_with("clustering", "kmeans")] = 10
    """H, the number of strata of k-means."""
    spread: Annotated[Literal["std", "pairwise"], only_with("allocation", "neyman")] = "std"
    """Neyman's S_h: standard deviation within the stratum, or the mean pairwise distance of the authors' code."""


class Residuals(Table):
    """Values that compression loses."""

    error_feedback: bool = False
    """Clients add what was lost of their last update to the next. Memory and checkpoints hold a vector per client."""


SERVICES.update(norms=Norms, strata=Strata, residuals=Residuals)


def probe_of(config: ConfigTables) -> Literal["full", "batch", "sample"]:
    """Return how much of a client's data a probe of its gradient uses."""
    features = stratification(config).features
    return "full" if isinstance(features, LabelHistogram) else features.probe


def stratification(config: ConfigTables) -> Strata:
    """Return how clients are measured and grouped for the sampler of a configuration."""
    services = config.clients.sampler.services
    if isinstance(services, Strata):
        return services
    return Strata(**({} if services is None else {name: getattr(services, name) for name in Norms.model_fields}))
