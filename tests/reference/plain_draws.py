"""Available clients, selected clients, strata, size reports and sampled rows of the plain loop."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np

from fedmpi import Config
from tests.reference.plain_data import (
    BATCH_ORDER,
    CLUSTERING,
    COHORT,
    PROBE,
    PROJECTION,
    SAMPLES,
    SIZE_ANSWER,
    Drawn,
    Grouping,
    Network,
    Population,
    stream,
)

# ---- available clients, selected clients ----------------------------------------------------------------------------


def presence(config: Config, t: int, population: Population) -> np.ndarray:
    """Every client's probability to be there in round t (FedSSO, §2.1: unequal availability)."""
    law, n = config.clients.availability, population.clients
    system = SimpleNamespace(**law.options)
    if law.name == "bernoulli":
        return np.full(n, system.probability)
    if law.name == "label-group":
        groups = [int(np.argmax(counts)) % len(system.by_label) for counts in population.class_counts]
        return np.array([system.by_label[g] for g in groups])
    return np.ones(n)


def wanted_clients(config: Config, n: int) -> int:
    """m: the count given, or the share of all clients rounded half up, at least one."""
    part = config.clients
    return part.count if part.count is not None else max(1, math.floor(part.fraction * n + 0.5))


def proportional_to(norms: np.ndarray, m: int) -> list[float]:
    """π_k = min(1, c · norm_k) with Σ π_k = m; where fewer than m have a norm, the others share what is left."""
    positive = int((norms > 0).sum())
    if positive <= m:
        rest = (m - positive) / max(len(norms) - positive, 1)
        return [1.0 if norm > 0 else rest for norm in norms]
    order = sorted(norms.tolist(), reverse=True)
    for certain in range(m + 1):  # the largest `certain` are surely drawn, the others share m − certain
        share = (m - certain) / sum(order[certain:])
        if order[certain] * share < 1 or certain == m:
            break
    return [min(1.0, share * norm) if norm * share < 1 else 1.0 for norm in norms.tolist()]


def draw_by_norm(norms: np.ndarray, m: int, generator: np.random.Generator, design: str) -> list[int]:
    """m places: clients that cover start, start + 1, … of the π_k laid end to end at random; or an exponential race."""
    if design == "sequential":
        times = generator.standard_exponential(len(norms))
        arrival = [(norm <= 0, time / (norm if norm > 0 else 1.0)) for norm, time in zip(norms, times, strict=True)]
        return sorted(sorted(range(len(norms)), key=lambda k: arrival[k])[:m])
    inclusion = proportional_to(norms, m)
    order, start = generator.permutation(len(norms)), generator.random()
    chosen = {k for k, pi in enumerate(inclusion) if pi >= 1}
    end, points = 0.0, 0
    open_ = [int(k) for k in order if 0 < inclusion[k] < 1]
    count = m - len(chosen)
    scale = count / sum(inclusion[k] for k in open_) if open_ else 0.0
    for k in open_:
        end += inclusion[k] * scale
        if points < count and start + points < end:
            chosen.add(k)
            points += 1
    return sorted(chosen)


def draw_cohort(config: Config, t: int, there: list[int], sizes: np.ndarray, norms: np.ndarray | None) -> Drawn:
    """Return the invited clients of round t without strata."""
    name, n = config.clients.sampler.name, len(sizes)
    part = SimpleNamespace(**config.clients.sampler.options)
    if name == "all":
        return Drawn(there, [1] * len(there), [1.0] * len(there))
    generator = stream(config.seed, COHORT, t)
    m = min(n, math.ceil(wanted_clients(config, n) * config.clients.over_selection - 1e-9))
    if name == "weighted":
        return draw_by_size(generator, there, sizes, m, part.replace)
    m = min(m, len(there))
    if name == "importance":
        assert norms is not None
        return drawn_by_norm(generator, there, norms[there], m, part.design)
    if m == len(there):
        return Drawn(there, [1] * m, [1.0] * m)
    chosen = sorted(generator.choice(len(there), m, replace=False, shuffle=False).tolist())
    return Drawn([there[i] for i in chosen], [1] * m, [m / len(there)] * m)


def draw_by_size(generator: np.random.Generator, there: list[int], sizes: np.ndarray, m: int, replace: bool) -> Drawn:
    """m draws with p_k = n_k/n (Li et al. 2020, scheme I), or m clients with π_k ∝ n_k, none above 1."""
    there = [k for k in there if sizes[k]]
    own = [int(sizes[k]) for k in there]
    if not own:
        return Drawn([], [], [])
    if not replace:
        return drawn_by_norm(generator, there, np.array(own, np.float64), min(m, len(own)), "systematic")
    times = dict.fromkeys(range(len(own)), 0)
    for point in generator.integers(0, sum(own), m).tolist():
        times[next(i for i in range(len(own)) if point < sum(own[: i + 1]))] += 1
    drawn = [i for i, count in times.items() if count]
    return Drawn([there[i] for i in drawn], [times[i] for i in drawn], [m * own[i] / sum(own) for i in drawn])


def drawn_by_norm(generator: np.random.Generator, there: list[int], norms: np.ndarray, m: int, design: str) -> Drawn:
    """m of these clients by norm; the inclusion probabilities are those of the systematic design."""
    chosen, pi = draw_by_norm(norms, m, generator, design), proportional_to(norms, m)
    return Drawn([there[i] for i in chosen], [1] * m, [pi[i] for i in chosen])


# ---- strata ---------------------------------------------------------------------------------------------------------


def squeeze(gradient: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """X = the sorted centres of a gradient's values, Z = the values replaced by their centres (FedSTaS, IS()).

    One-dimensional k-means: the best partition of 128 cells of the sorted values, then Lloyd's iteration on all values.
    """
    values = gradient.astype(np.float32)
    ordered = np.sort(values).astype(np.float64)
    d = len(ordered)
    edges = list(range(d + 1))
    if d > 128:
        low, high = ordered[0], ordered[-1]
        counts = [i * d // 64 for i in range(1, 64)]
        widths = [int((ordered <= low + (high - low) * j / 65).sum()) for j in range(1, 65)]
        edges = [0, *sorted(counts + widths), d]
    centred = ordered - ordered.mean()
    sums = np.concatenate([[0.0], np.cumsum(centred)])
    squares = np.concatenate([[0.0], np.cumsum(centred**2)])

    def cost(first: np.ndarray, last: int) -> np.ndarray:
        count = np.maximum(last - first, 1)
        return np.maximum(squares[last] - squares[first] - (sums[last] - sums[first]) ** 2 / count, 0.0)

    at = np.array(edges)
    best = np.array([math.inf, *(float(cost(at[:1], e)[0]) for e in edges[1:])])
    came: list[list[int]] = []
    for _ in range(levels - 1):  # Bellman: the best cut of the first cells into one cluster more
        step, origins = np.full(len(edges), math.inf), [0] * len(edges)
        for j in range(1, len(edges)):
            candidates = best[:j] + cost(at[:j], edges[j])
            origins[j] = int(candidates.argmin())
            step[j] = candidates[origins[j]]
        came.append(origins)
        best = step
    place, cuts = len(edges) - 1, [d]
    for origins in reversed(came):
        place = origins[place]
        cuts.append(edges[place])
    cuts = [0, *reversed(cuts)]
    centres = [
        float(ordered[a:b].mean()) if b > a else float(ordered[min(a, d - 1)])
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    for _ in range(300):
        middles = [(a + b) / 2 for a, b in zip(centres, centres[1:], strict=False)]
        moved = [0, *(int((ordered <= middle).sum()) for middle in middles), d]
        if moved == cuts:
            break
        cuts = moved
        pairs = zip(centres, cuts, cuts[1:], strict=False)
        centres = [float(ordered[a:b].mean()) if b > a else centre for centre, a, b in pairs]
    found = np.sort(np.array(centres)).astype(np.float32)
    middles32 = (0.5 * (found[:-1].astype(np.float64) + found[1:])).astype(np.float32)
    return found, found[(values[:, None] > middles32).sum(axis=1)]


def numbered(labels: Iterable[int]) -> np.ndarray:
    """Parts numbered 0, 1, … in the order of their first members; −1 stays."""
    names: dict[int, int] = {}
    return np.array([-1 if a == -1 else names.setdefault(int(a), len(names)) for a in labels], np.int64)


class Stratification:
    """The strata, from what every client shows of itself."""

    def __init__(self, config: Config, population: Population, network: Network):
        self.config, self.sampler = config, config.clients.sampler.name
        self.part = SimpleNamespace(**{"initial_step": False, "refresh": 0} | config.clients.sampler.values)
        self.population, self.network = population, network
        self.wanted = self.sampler in ("stratified", "importance")
        self.kept: tuple[np.ndarray, np.ndarray | None] | None = None
        self.grouping: Grouping | None = None
        self.measured = 0
        self.noise: int | None = None

    def observe(self, t: int, w: np.ndarray, latest: list[int]) -> None:
        """Group the clients again where round t requires it."""
        refresh, self.measured, self.noise = self.part.refresh, 0, None
        due = self.grouping is None or (refresh > 0 and t % refresh == 0)
        if not (self.wanted and due):
            return
        everybody = list(range(self.population.clients))
        renewed = everybody if self.kept is None or self.part.refresh_clients == "all" else latest
        self.measured = len(renewed)
        shown = [self._shown(t, w, k) for k in renewed]
        if self.kept is None:
            norms = np.array([length for _, length in shown]) if shown[0][1] is not None else None
            self.kept = np.array([vector for vector, _ in shown]), norms
        else:
            for k, (vector, length) in zip(renewed, shown, strict=True):
                self.kept[0][k] = vector
                if self.kept[1] is not None and length is not None:
                    self.kept[1][k] = length
        self.grouping = self._grouped(t, *self.kept)

    def probe_rows(self, t: int, k: int) -> list[int] | None:
        """The rows that a client's probe sees; None for all."""
        n = int(self.population.sizes[k])
        batch = self.config.local.batch_size
        count = {"full": n, "sample": 1, "batch": n if batch == "all" else batch}[
            self.part.features.values.get("probe", "full")
        ]
        if count >= n:
            return None
        purpose = BATCH_ORDER if self.opens(t) else PROBE
        return stream(self.config.seed, purpose, t, k).choice(n, count, replace=False, shuffle=False).tolist()

    def opens(self, t: int) -> bool:
        """Return True if all clients take the step w_1^k that makes the strata (FedSSO, Algorithm 1, lines 1-3)."""
        return t == 0 and self.sampler == "stratified" and self.part.initial_step

    def _shown(self, t: int, w: np.ndarray, k: int) -> tuple[np.ndarray, float | None]:
        """A client's feature vector, and the length of what it sent."""
        if self.part.features.name == "label-histogram":
            counts = self.population.class_counts[k]
            return (counts / max(int(counts.sum()), 1)).astype(np.float32), None
        x, y = self.population.rows(k, self.probe_rows(t, k))
        gradient = np.zeros(self.network.trainable)
        if len(y):
            self.network.shared["words"] = None
            gradient = self.network.gradient(w, x, y)[1]
        length = float(np.linalg.norm(gradient))
        if self.part.features.name == "one-step-change":  # FedSSO, Algorithm 1, line 1
            vector = -self.config.local.lr * gradient
        elif self.part.features.name == "full-gradient":
            vector = gradient
        else:
            centres, restored = squeeze(gradient, self.part.features.options["codebook_size"])
            length = float(np.linalg.norm(restored.astype(np.float64)))
            vector = restored if self.part.features.options["decompress"] else centres
        return self._projected(vector.astype(np.float32)), length

    def _projected(self, vector: np.ndarray) -> np.ndarray:
        from sklearn.random_projection import SparseRandomProjection, johnson_lindenstrauss_min_dim

        n = self.population.clients
        shorter = int(johnson_lindenstrauss_min_dim(max(n, 2), eps=0.25))
        if n * len(vector) <= self.part.projection_above or shorter >= len(vector):
            return vector
        seed = int(stream(self.config.seed, PROJECTION).integers(0, 2**63)) % 2**32
        projection = SparseRandomProjection(shorter, dense_output=True, random_state=seed)
        return np.asarray(projection.fit(vector[None]).transform(vector[None])[0], np.float32)

    def _grouped(self, t: int, matrix: np.ndarray, norms: np.ndarray | None) -> Grouping:
        n = self.population.clients
        if self.sampler == "importance":
            return Grouping(np.zeros(n, np.int64), [n], [0.0], norms)
        labels = self._optics(matrix) if self.part.clustering.name == "optics" else self._kmeans(t, matrix)
        strata = range(int(labels.max()) + 1)
        spreads = [0.0] * len(strata)
        if self.part.allocation == "neyman":
            spreads = [spread(matrix[labels == h].astype(np.float64), self.part.spread) for h in strata]
        return Grouping(labels, [int((labels == h).sum()) for h in strata], spreads, norms)

    def _kmeans(self, t: int, matrix: np.ndarray) -> np.ndarray:
        from sklearn.cluster import KMeans

        seed = int(stream(self.config.seed, CLUSTERING, t).integers(2**32))
        model = KMeans(min(self.part.strata, len(matrix)), init="random", n_init=1, random_state=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return numbered(model.fit_predict(matrix))

    def _optics(self, matrix: np.ndarray) -> np.ndarray:
        from sklearn.cluster import OPTICS
        from sklearn.metrics import pairwise_distances

        distances = pairwise_distances(matrix)
        model = OPTICS(
            min_samples=self.part.clustering.min_samples,
            xi=self.part.clustering.xi,
            cluster_method="xi",
            metric="precomputed",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = model.fit_predict(np.maximum(distances, distances.T)).tolist()
        alone = [k for k, label in enumerate(found) if label == -1]
        others = [k for k, label in enumerate(found) if label != -1]
        self.noise = len(alone)
        if self.part.clustering.outliers == "drop":
            return numbered(found)
        free = max(found) + 1
        for place, k in enumerate(alone):
            if self.part.clustering.outliers == "nearest" and others:
                found[k] = found[min(others, key=lambda j: float(np.linalg.norm(matrix[k].astype(float) - matrix[j])))]
            else:
                found[k] = free + (place if self.part.clustering.outliers == "singletons" else 0)
        return numbered(found)


def spread(vectors: np.ndarray, kind: str) -> float:
    """S_h: sqrt of the mean squared distance from the mean (FedSTaS, Algorithm 2), or the mean distance of pairs."""
    count = len(vectors)
    if count < 2:
        return 0.0
    if kind == "std":
        return math.sqrt(sum(float(((v - vectors.mean(axis=0)) ** 2).sum()) for v in vectors) / count)
    pairs = [float(np.linalg.norm(vectors[a] - vectors[b])) for a in range(count) for b in range(a)]
    return sum(pairs) / len(pairs)


def boxed_shares(weights: list[float], lower: list[float], upper: list[float], total: float) -> list[float]:
    """q_h = λ·weight_h moved into [lower_h, upper_h], with the λ for which Σ q_h = total."""

    def shares(scale: float) -> list[float]:
        return [min(max(scale * a, low), high) for a, low, high in zip(weights, lower, upper, strict=True)]

    if total >= sum(shares(1e300)) - 1e-9:  # those with a weight are full
        return shares(1e300)
    low, high = 0.0, 1.0
    while sum(shares(high)) < total:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shares(middle)) < total else (low, middle)
    return shares(high)


def allocation(
    rule: str, sizes: list[int], spreads: list[float], room: list[int], m: int, generator: np.random.Generator
) -> tuple[list[int], list[float]]:
    """m_h and E[m_h]: m N_h/N (FedSSO, line 7), m N_h S_h/Σ N_h S_h (FedSTaS, Algorithm 2) or equal; m_h ≤ room."""
    m = min(m, sum(room))
    if rule != "neyman":
        return _whole_shares(sizes if rule == "proportional" else [int(r > 0) for r in room], room, m, generator)
    open_ = [r > 0 for r in room]
    if not any(s > 0 for s, o in zip(spreads, open_, strict=True) if o):
        spreads = [1.0] * len(sizes)
    weights = [n * s for n, s in zip(sizes, spreads, strict=True)]
    room_ = [float(r) for r in room]
    if m >= sum(open_):
        lower = [1.0 if o else 0.0 for o in open_]
        quotas = boxed_shares(weights, lower, room_, m)
        if sum(quotas) < m - 1e-6:  # those with a spread are full: the others share the rest by their sizes
            rest = [0.0 if w > 0 else float(n) for n, w in zip(sizes, weights, strict=True)]
            quotas = boxed_shares(rest, quotas, room_, m)
        whole = [math.floor(q + 1e-9) for q in quotas]
        by_rest = sorted(range(len(quotas)), key=lambda h: (-round(quotas[h] - whole[h], 9), h))
        for h in by_rest[: m - sum(whole)]:
            whole[h] += 1
        return whole, [float(a) for a in whole]
    least = min(s for s, o in zip(spreads, open_, strict=True) if o and s > 0)
    weights = [n * (s if s > 0 else least) for n, s in zip(sizes, spreads, strict=True)]
    quotas = boxed_shares(weights, [0.0] * len(sizes), room_, m)
    whole = [math.floor(q + 1e-9) for q in quotas]
    missing = m - sum(whole)
    if missing:
        order, start, end, point = generator.permutation(len(quotas)), generator.random(), 0.0, 0
        parts = [max(q - a, 0.0) for q, a in zip(quotas, whole, strict=True)]
        for h in order.tolist():
            end += parts[h] * missing / sum(parts)
            if point < missing and start + point < end:
                whole[h] += 1
                point += 1
    return whole, quotas


def _whole_shares(
    weights: list[int], room: list[int], m: int, generator: np.random.Generator
) -> tuple[list[int], list[float]]:
    """Shares ∝ weights within the room, exactly, and their systematic rounding in random order."""
    quota = [Fraction(0)] * len(weights)
    left = [h for h in range(len(weights)) if room[h] and weights[h]]
    denominator = 1
    while left:
        rest = m - sum(quota[h] for h in range(len(weights)) if h not in left)
        total = sum(weights[h] for h in left)
        full = [h for h in left if rest * weights[h] > room[h] * total]
        for h in full or left:
            quota[h] = Fraction(room[h]) if full else Fraction(rest * weights[h], total)
        if not full:
            denominator = total
            break
        left = [h for h in left if h not in full]
    order = generator.permutation(len(weights)).tolist()
    end = Fraction(int(generator.integers(denominator)), denominator)
    whole = [0] * len(weights)
    for h in order:
        whole[h] = math.floor(end + quota[h]) - math.floor(end)
        end += quota[h]
    return whole, [float(q) for q in quota]


# ---- sizes and rows -------------------------------------------------------------------------------------------------


def size_estimate(config: Config, t: int, sizes: np.ndarray, asked: list[int]) -> dict[str, Any]:
    """Ñ from the answers of queried clients (FedSampling, Eq 1, 2, 21), or by Duchi's or the piecewise mechanism."""
    part = config.samples.size
    true = sum(int(sizes[k]) for k in asked)
    facts: dict[str, Any] = {"size_true": true, "clipped_fraction": 0.0, "size_estimate": float(true)}
    if part.estimate == "exact":
        return facts
    generator = stream(config.seed, SIZE_ANSWER, 0 if part.reuse_reports else t)
    m, epsilon, n = part.max_size, part.epsilon, len(sizes)
    inputs = [min(max(int(size), 1), m - 1) if part.clip else int(size) for size in sizes]
    if part.estimate == "randomized-response":
        alpha = (math.exp(epsilon) - 1) / (math.exp(epsilon) + m - 2)  # Eq 21
        truthful, fake = generator.random(n) < alpha, generator.integers(1, m, n)
        answers = [inputs[k] if truthful[k] else int(fake[k]) for k in asked]  # Eq 1
        raw = (sum(answers) - (1 - alpha) * m * len(asked) / 2) / alpha  # Eq 2
    else:
        unit = [(size - m / 2) / (m / 2 - 1) for size in inputs]  # 1 … M − 1 on [−1, 1]
        if part.estimate == "duchi":
            c = (math.exp(epsilon) + 1) / (math.exp(epsilon) - 1)
            draws = generator.random(n)
            signs = [c if draws[k] < 0.5 + unit[k] / (2 * c) else -c for k in asked]
        else:
            half = math.exp(epsilon / 2)
            c = (half + 1) / (half - 1)
            inside, place = generator.random(n), generator.random(n)
            signs = []
            for k in asked:  # Wang et al. 2019, Algorithm 2
                left = (c + 1) / 2 * unit[k] - (c - 1) / 2
                right = left + c - 1
                if inside[k] < half / (half + 1):
                    signs.append(left + place[k] * (right - left))
                else:
                    outside = -c + place[k] * (c + 1)
                    signs.append(outside if outside < left else outside + right - left)
        raw = sum(m / 2 + (m / 2 - 1) * sign for sign in signs)
    facts["size_estimate"] = max(raw, float(len(asked)))
    facts["clipped_fraction"] = sum(sizes[k] >= m for k in asked) / max(len(asked), 1)
    return facts


def sampled_rows(
    rule: str, config: Config, t: int, cohort: list[int], sizes: np.ndarray, p: float
) -> dict[int, list[int]]:
    """The local rows that each participant uses, those without any left out."""
    part = config.samples
    if rule == "all":
        return {k: list(range(sizes[k])) for k in cohort if sizes[k]}
    axis = [(k, row) for k in cohort for row in range(sizes[k])]
    if rule == "bernoulli":
        places = _bernoulli_places(config.seed, t, len(axis), p)
    elif rule == "exact":
        generator = stream(config.seed, SAMPLES, t)
        places = _distinct(generator, [len(axis)], [min(part.budget, len(axis))]) if axis else []
    else:
        places, first = [], 0
        for block in range(0, len(cohort), 1024):
            members = cohort[block : block + 1024]
            generator = stream(config.seed, SAMPLES, t, block // 1024)
            chance = generator.random(len(members))
            exact = [part.sampler.options["ratio"] * int(sizes[k]) for k in members]
            counts = [int(e) + bool(u < e - int(e)) for e, u in zip(exact, chance, strict=True)]
            own = [int(sizes[k]) for k in members]
            places += [first + place for place in _distinct(generator, own, counts)]
            first += sum(own)
    found: dict[int, list[int]] = {}
    for place in places:
        k, row = axis[place]
        found.setdefault(k, []).append(row)
    return found


def _bernoulli_places(seed: int, t: int, length: int, p: float) -> list[int]:
    """Places kept independently with p: the gaps between them are geometric (FedSampling, Algorithm 1)."""
    if p >= 1:
        return list(range(length))
    kept = []
    for first in range(0, length, 2**16):
        generator, place = stream(seed, SAMPLES, t, first // 2**16), -1
        while (place := place + int(generator.geometric(p))) < min(2**16, length - first):
            kept.append(first + place)
    return kept


def _distinct(generator: np.random.Generator, sizes: list[int], counts: list[int]) -> list[int]:
    """A simple random sample of every client: drawn with repeats and topped up; what is left out where that is less."""
    inverted = [2 * c > s for s, c in zip(sizes, counts, strict=True)]
    targets = [s - c if i else c for s, c, i in zip(sizes, counts, inverted, strict=True)]
    drawn: list[set[int]] = [set() for _ in sizes]
    while any(len(d) < goal for d, goal in zip(drawn, targets, strict=True)):
        owners = [k for k, d in enumerate(drawn) for _ in range(targets[k] - len(d))]
        for k, row in zip(owners, generator.integers(0, [sizes[k] for k in owners]).tolist(), strict=True):
            drawn[k].add(row)
    first, places = 0, []
    for k, size in enumerate(sizes):
        places += [first + row for row in range(size) if (row in drawn[k]) != inverted[k]]
        first += size
    return places
