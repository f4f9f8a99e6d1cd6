"""What does not go with noised updates, whose ε holds where one client's data changes its own update alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedmpi.config.choices import chosen

if TYPE_CHECKING:
    from fedmpi.config.tables import ConfigTables

_DRAWN_BY = {
    "all": "",
    "uniform": "",
    "weighted": "their private sizes n_k",
    "importance": "the norms of their gradients",
    "stratified": "strata of their gradients or labels",
}


def privacy_refusals(c: ConfigTables) -> list[tuple[bool, str]]:
    """Choices under which one client's data changes more than its own update, so that no ε would hold."""
    p, s = c.participation, c.samples
    noised = c.privacy.clip_norm is not None and c.privacy.noise_multiplier > 0
    sampler, rows, law = chosen(c, "client sampler"), chosen(c, "row rule"), chosen(c, "availability")
    drawn_by = _DRAWN_BY.get(p.clients, "what it sees of their data")
    draws = "may draw" if sampler.foreign else "draws"
    return [
        (
            noised and bool(drawn_by),
            f'participation.clients = "{sampler.name}" {draws} clients by {drawn_by}: one client changes who else '
            'takes part, for which no ε holds. With privacy.noise_multiplier set it to "uniform" or "all"',
        ),
        (
            noised and law.foreign,
            f'system.availability = "{law.name}" sees the data of all clients, so that one may change which others are '
            "there, for which no ε holds. With privacy.noise_multiplier set a built-in law",
        ),
        (
            noised and (s.rule == "exact" or (s.rule == "bernoulli" and s.size_estimate == "exact")),
            f'samples.rule = "{s.rule}" makes the rows that one client uses depend on the exact sizes of the others, '
            'for which no ε holds. With privacy.noise_multiplier set samples.rule = "all" or "ratio", or "bernoulli" '
            "with a private samples.size_estimate",
        ),
        (
            noised and rows.foreign and bool(rows.marks.get("pooled")),
            f'samples.rule = "{rows.name}" sees the sizes of the whole cohort, so that one client can change the rows '
            'of others, for which no ε holds. With privacy.noise_multiplier set samples.rule = "all" or "ratio"',
        ),
        (
            noised and rows.foreign and s.wanted is not None,
            f'samples.wanted tells samples.rule = "{rows.name}" how many rows are expected of a client, its share of '
            "the exact size of the whole cohort, so that one client can change the rows of others, for which no ε "
            'holds. With privacy.noise_multiplier leave it out, or set samples.rule = "bernoulli" with a private '
            "samples.size_estimate",
        ),
        (
            noised and s.rule == "bernoulli" and not s.clip,
            "samples.clip = false lets one large client change the share of rows that all others use, for which no ε "
            "holds. With privacy.noise_multiplier leave it true",
        ),
        (
            noised and c.rebalance.enabled,
            "rebalance.enabled copies samples by the class counts of all clients together, so that one client changes "
            "the others' data, for which no ε holds: switch it off or set privacy.noise_multiplier = 0",
        ),
    ]
