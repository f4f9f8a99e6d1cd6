"""Where a run uses clients' sizes as they are although it asks for them privately: the answers then protect nobody.

Randomised answers keep n_k from the server only as long as nothing else tells it: weights made of n_k, draws by size,
class counts (whose sum is n_k).
"""

from __future__ import annotations

from dataclasses import dataclass

from fedmpi.config import Config
from fedmpi.config.choices import chosen

SEES_NO_SIZES = ("all", "uniform", "importance", "stratified")
"""The samplers that are known not to look at the clients' sizes."""

WEIGHED_BY_SIZE = ("normalised", "unbiased", "literal")


@dataclass(frozen=True)
class Exposure:
    """A setting that tells the server sizes."""

    setting: str  # The key and its value
    all_clients: bool  # Whether it tells the sizes of all clients, not only of the participants
    remedy: str  # What to set instead

    @property
    def message(self) -> str:
        """One sentence for the log."""
        whose = "every client" if self.all_clients else "every participant"
        return (
            f"{self.setting} tells the server the size of {whose} as it is, so that samples.size_estimate does not "
            f"protect them and their size_epsilon is infinite; {self.remedy}"
        )


def exposure(config: Config) -> Exposure | None:
    """The setting that tells most sizes beside a private `samples.size_estimate`; None where nothing does."""
    part, weights = config.participation, config.aggregation.weights
    by_samples = config.aggregation.population == "samples"
    if part.clients not in SEES_NO_SIZES:
        name = chosen(config, "client sampler").name
        return Exposure(f'participation.clients = "{name}"', True, 'set it to "uniform"')
    if config.rebalance.enabled:
        return Exposure("rebalance.enabled = true", True, "switch it off")
    if part.clients == "stratified" and part.features == "label-histogram":
        return Exposure('participation.features = "label-histogram"', True, "choose features made of gradients")
    if weights in WEIGHED_BY_SIZE and by_samples:
        remedy = 'set aggregation.population = "clients"'
        return Exposure(f'aggregation.weights = "{weights}" with population = "samples"', True, remedy)
    if (own := chosen(config, "weights")).foreign:
        remedy = 'set it to "uniform" or "gradient-sum"'
        return Exposure(f'aggregation.weights = "{own.name}", which sees all sizes,', True, remedy)
    if (
        part.clients == "stratified"
        and part.opening
        and weights in ("samples", "gradient-sum", "gradient-sum-squared")
        and by_samples
    ):
        return Exposure("participation.opening = true", True, "switch it off or choose equal aggregation.weights")
    if config.topology.kind == "mediators" and config.topology.scheduling != "random":
        name = chosen(config, "scheduling").name
        return Exposure(f'topology.scheduling = "{name}"', False, 'set it to "random"')
    if weights == "samples":
        return Exposure('aggregation.weights = "samples"', False, 'set it to "uniform" or "gradient-sum"')
    return None
