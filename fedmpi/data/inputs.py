"""Samples of several arrays, packed into one row of 32-bit words each, and sequences padded to one length.

Whole numbers and truth values are stored as int32, floats as the bits of float32. Storage, transfer and batches thus
handle one array, as for other data; `fedmpi.models.inputs` gives a model its arrays back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.schema import DataDescription, Input

MASK = "attention_mask"
"""Name of the mask that is made of unequal lengths."""
LARGEST = np.iinfo(np.int32)


def are_several(x: Any) -> bool:
    """Check whether samples are several arrays, or one array of sequences that need a mask."""
    return isinstance(x, Mapping | tuple) or unequal(x)


def unequal(values: Any) -> bool:
    """Check whether values are sequences of unequal length: a list, or an array of objects."""
    if not isinstance(values, list) and getattr(getattr(values, "dtype", None), "kind", "") != "O":
        return False
    return len({len(row) for row in values if _is_row(row)}) > 1


def _is_row(values: Any) -> bool:
    return isinstance(values, list | tuple) or getattr(values, "ndim", 0) > 0


def lengths(values: Any) -> Ints:
    """Return the length of each sequence, int64 (n,)."""
    return np.fromiter(map(len, values), np.int64, len(values))


def padded(what: str, values: Any, length: int, fill: int = 0) -> AnyArray:
    """Return sequences of up to `length` entries as one array (n, length, …); `what` names them in error messages."""
    inside = np.arange(length) < lengths(values)[:, None]
    try:
        entries = np.concatenate([array_of(what, row) for row in values if len(row)] or [np.empty(0, np.int64)])
    except ValueError as error:
        raise UserError(f"{what}: its sequences differ in more than their lengths ({error})") from None
    found = np.full((*inside.shape, *entries.shape[1:]), fill, entries.dtype)
    found[inside] = entries
    return found


def array_of(what: str, given: Any) -> AnyArray:
    """Return the values of an array, a list, or a tensor on any device."""
    try:
        found = np.asarray(given.numpy(force=True) if hasattr(given, "numpy") and hasattr(given, "device") else given)
        return np.asarray([*found]) if found.dtype == object and found.ndim and all(map(_is_row, found)) else found
    except Exception as error:  # nested lists of several lengths, tensors without plain values
        reason = " ".join(str(error).split())
        raise UserError(f"{what}: a {type(given).__name__} is no array ({reason}). Give a NumPy array") from None


def packed(where: str, parts: Mapping[str, Any]) -> tuple[dict[str, AnyArray], tuple[Input, ...]]:
    """Return the samples of each part as int32 (n, d), and their arrays.

    Sequences of unequal length are padded with zeros to the longest one of all parts. Their mask is then another array.
    `where` begins error messages, in which the parts have their names.
    """
    named = {part: _named(x) for part, x in parts.items()}
    first, arrays = next(iter(named.items()))
    for part, others in named.items():
        if {*others} != {*arrays}:
            raise UserError(f"{where}{part} has the arrays {', '.join(others)}, but {first} has {', '.join(arrays)}")
    if apart := [name for name in arrays if any(unequal(one[name]) for one in named.values())]:
        mask = next((str(len(arrays)) for x in parts.values() if not isinstance(x, Mapping)), MASK)
        of_parts = {part: lengths(one[apart[0]]) for part, one in named.items()}
        longest = max(int(each.max(initial=0)) for each in of_parts.values())
        for part, one in named.items():
            for name in apart:
                if not np.array_equal(lengths(one[name]), of_parts[part]):
                    raise UserError(
                        f"{where}{name} and {apart[0]} of {part} differ in length. Pad one of them yourself"
                    )
                one[name] = padded(_place(where, part, name), one[name], longest)
            one.setdefault(mask, np.arange(longest) < of_parts[part][:, None])
    inputs: dict[str, Input] = {}
    words: dict[str, AnyArray] = {}
    for part, one in named.items():
        columns: list[AnyArray] = []
        for name in arrays:
            values = array_of(_place(where, part, name), one[name])
            kept, dtype = _words(f"{_place(where, part, name)} is {values.dtype} {values.shape}", values)
            known = inputs.get(name, Input(name, values.shape[1:], dtype))
            if (known.shape, known.dtype) != (values.shape[1:], dtype):
                problem = f"has {dtype} {values.shape[1:]} per sample where that of {first} has {known.dtype}"
                raise UserError(f"{_place(where, part, name)} {problem} {known.shape}")
            if columns and len(kept) != len(columns[0]):
                raise UserError(f"{where}{part} has {len(columns[0])} samples, but {len(kept)} in {name}")
            largest = max(0, int(values.max()) + 1) if dtype == "int64" and values.size else 0
            inputs[name] = Input(name, known.shape, dtype, max(known.vocabulary, largest))
            columns.append(kept)
        words[part] = np.concatenate(columns, axis=1)
    return words, tuple(inputs.values())


def _place(where: str, part: str, name: str) -> str:
    return f"{where}{part}[{name if name.isdigit() else repr(name)}]"


def _named(x: Any) -> dict[str, Any]:
    """Return arrays by name, or by position."""
    if isinstance(x, Mapping):
        return {str(name): values for name, values in x.items()}
    return {str(place): values for place, values in enumerate(x if isinstance(x, tuple) else (x,))}


def _words(found: str, values: AnyArray) -> tuple[AnyArray, str]:
    """Return values as int32 (n, values of a sample), and the type in which a model receives them."""
    flat = values.reshape(len(values), math.prod(values.shape[1:])) if values.ndim else values
    if not values.ndim or not flat.shape[1] or values.dtype.kind not in "buif":
        raise UserError(f"{found}; each sample needs numbers. Give token ids instead of texts, or leave it out")
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            flat = np.ascontiguousarray(flat, np.float32)
        if not np.isfinite(flat).all():
            raise UserError(f"{found} and holds numbers that are not finite in 32 bits. Remove those samples")
        return flat.view(np.int32), "float32"
    if values.size and not LARGEST.min <= values.min() <= values.max() <= LARGEST.max:
        raise UserError(f"{found} and holds whole numbers beyond 32 bits. Number them from 0 on")
    return flat.astype(np.int32), "bool" if values.dtype.kind == "b" else "int64"


def trial_inputs(description: DataDescription, rows: int, generator: np.random.Generator) -> AnyArray:
    """Return synthetic samples (rows, d): masks and numbers below 2 are their largest value, others are drawn."""

    def drawn(one: Input) -> AnyArray:
        shape = rows, *one.shape
        if one.dtype == "float32":
            return 1 / (1 + np.exp(-generator.standard_normal(shape)))
        if one.vocabulary <= 2:
            return np.full(shape, one.dtype == "bool" or max(0, one.vocabulary - 1), one.dtype)
        return generator.integers(1, one.vocabulary, shape)

    return packed("", {"": {one.name: drawn(one) for one in description.inputs}})[0][""]


def refuse_others(what: str, dataset: Any) -> None:
    """Reject objects that are not map-style datasets."""
    if isinstance(dataset, Mapping) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UserError(
            f"{what} is a {type(dataset).__name__}. Give a dataset with a length and samples by number, such as one "
            'split: datasets["train"]'
        )


def columns_of(what: str, dataset: Any) -> dict[str, Any]:
    """Return the samples of a dataset of Hugging Face or torch by column; the last one of a tuple is the label."""
    refuse_others(what, dataset)
    form = getattr(dataset, "format", None)
    if isinstance(form, Mapping) and form["type"] != "custom":  # Hugging Face's, whose transforms work on each sample
        columns = dataset.with_format("numpy", columns=form["columns"])[:]
        return {name: stacked(what, values) for name, values in columns.items()}
    samples: Sequence[Any] = [dataset[place] for place in range(len(dataset))]
    if not samples or not isinstance(samples[0], tuple | list | Mapping):
        raise UserError(f"{what} holds no samples that are a tuple (x, label) or a dict")
    rows = [_named(_flat(one)) for one in samples]
    return {name: stacked(what, [row[name] for row in rows]) for name in rows[0]}


def _flat(sample: Any) -> Any:
    """Return a sample as a dict or tuple of arrays and label, also one (x, label) whose x is a dict or tuple."""
    if isinstance(sample, Mapping) or len(sample) != 2 or not isinstance(sample[0], Mapping | tuple):
        return sample if isinstance(sample, Mapping) else tuple(sample)
    x, label = sample
    return {**x, "label": label} if isinstance(x, Mapping) else (*x, label)


def stacked(what: str, values: Any) -> Any:
    """Return values of one shape as an array, others as a list of arrays."""
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values
    arrays = [array_of(what, one) for one in values]
    return np.stack(arrays) if len({one.shape for one in arrays}) == 1 else arrays
