"""What the parts of a data set share: samples with the same features in two parts, classes that occur in one part only.

Both are counted over all samples and end as notes: results on such samples and classes need another reading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fedmpi.common.types import AnyArray, Ints

Hashes = npt.NDArray[np.uint64]
TRAINING, VALIDATION, TESTING = "training", "validation", "test"
COMPARED = ((TESTING, TRAINING), (TESTING, VALIDATION), (VALIDATION, TRAINING))
"""Samples of the first part that the second part holds, too, are counted."""
WORDS_AT_ONCE = 1 << 16
NAMED = 10
_SHIFT, _FACTOR = np.uint64(32), np.uint64(0xD6E8FEB86659FD93)


def sample_hashes(x: AnyArray) -> Hashes:
    """A number of 64 bits for the features of each sample (n, …), uint64 (n,): equal for equal bytes only.

    Each 8 bytes are mixed with a key of their place (Evensen's rrmxmx finaliser, two of its rounds), and the results
    are summed. Not safe against samples made to collide.
    """
    rows = np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8)
    missing = -rows.shape[1] % 8
    words = (np.pad(rows, ((0, 0), (0, missing))) if missing else rows).view(np.uint64)
    keys = np.random.Generator(np.random.PCG64(0)).integers(1 << 63, size=words.shape[1], dtype=np.uint64)
    hashes = np.empty(len(words), np.uint64)
    step = max(1, WORDS_AT_ONCE // words.shape[1])
    for low in range(0, len(words), step):
        mixed = words[low : low + step] + keys
        for _ in range(2):
            mixed ^= mixed >> _SHIFT
            mixed *= _FACTOR
        mixed ^= mixed >> _SHIFT
        mixed.sum(axis=1, out=hashes[low : low + step])
    return hashes


def duplicates(hashes: Mapping[str, Hashes]) -> dict[str, int]:
    """Samples of one part with the features of a sample of another, by ``"test in training"`` and so on."""
    return {
        f"{one} in {other}": int(np.isin(hashes[one], hashes[other]).sum())
        for one, other in COMPARED
        if one in hashes and other in hashes
    }


def duplicate_notes(found: Mapping[str, int], samples: Mapping[str, int]) -> tuple[str, ...]:
    """One sentence for each pair of parts that share samples; `samples` has the size of each part."""
    notes = []
    for pair, count in found.items():
        one, _, other = pair.partition(" in ")
        if count:
            notes.append(
                f"{count:,} of {samples[one]:,} {one} samples ({count / samples[one]:.1%}) have exactly the features "
                f"of a {other} sample: results on them may show memory"
            )
    return tuple(notes)


def class_notes(labels: Mapping[str, Ints], names: Sequence[object]) -> tuple[str, ...]:
    """One sentence for each part that alone has samples of some class."""
    counts = {part: np.bincount(y, minlength=len(names)) for part, y in labels.items() if len(y)}
    parts, notes = sum((count > 0).astype(np.int64) for count in counts.values()), []
    for part, count in counts.items():
        alone = np.flatnonzero((count > 0) & (parts == 1)) if len(counts) > 1 else ()
        if len(alone):
            named = ", ".join(f"{names[label]} ({count[label]:,})" for label in alone[:NAMED])
            more = f" and {len(alone) - NAMED:,} more" if len(alone) > NAMED else ""
            which = "1 class occurs" if len(alone) == 1 else f"{len(alone):,} classes occur"
            notes.append(f"{which} in the {part} part only (samples in brackets): {named}{more}")
    return tuple(notes)
