"""FedScale's traces of devices and their availability, as tables for `devices` and `clients.availability`.

Lai et al. 2022 (FedScale, section 4.3). The device file is a pickle {id: {"computation": ms per sample of inference,
"communication": kbit/s}}, the availability file {id: {"active": [starts], "inactive": [ends], "finish_time": period}},
in seconds. Loading a pickle can run arbitrary code. The unpickler of this module resolves no names at all.

FedScale's formulas (`ClientMetadata` in fedscale/cloud/internal/client_metadata.py): training takes 3 · samples ·
computation / 1000 seconds, and the transfers (kbit down + kbit up) / communication seconds, with 1,024 bits per kbit.
A client is active while an interval contains the time modulo its finish_time.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.common.errors import UserError, raised
from fedmpi.common.files import make_folder, whole_file
from fedmpi.common.types import AnyArray

PASSES = 3.0
"""Cost of training on a sample, in inferences."""
BYTES_PER_KBIT = 128.0
Columns = dict[str, AnyArray]


class PlainUnpickler(pickle.Unpickler):
    """Unpickler of plain containers, numbers and texts; it rejects a pickle that names anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Reject any name."""
        raise pickle.UnpicklingError(f"it names {module}.{name}. Only dicts, lists, numbers and texts are read")


def load_traces(path: Path, *keys: str) -> list[Mapping[str, Any]]:
    """Return the entries of a pickled dict in its order; each is a dict with these keys."""
    try:
        with path.open("rb") as stream:
            entries = [*PlainUnpickler(stream).load().values()]
        found = [[entry[key] for key in keys] for entry in entries]
    except Exception as error:  # a damaged pickle raises many kinds of errors
        raise UserError(f"{path} is not a FedScale trace with {' and '.join(keys)} ({raised(error)})") from None
    if not found:
        raise UserError(f"{path} has no entries. Give another file")
    return entries


def device_table(path: Path, clients: int) -> Columns:
    """Return client, speed (samples per second), upload and download (bytes per second), (N,) each.

    Client k gets entry k, as FedScale's client k + 1 does; if there are more clients, entries repeat.
    """
    entries = load_traces(path, "computation", "communication")
    try:
        rates = np.array([[entry["computation"], entry["communication"]] for entry in entries], np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} has a computation or communication that is not a number ({error})") from None
    if (wrong := ~((rates > 0) & np.isfinite(rates)).all(axis=1)).any():
        raise UserError(f"entry {wrong.argmax()} of {path} has no computation and communication above 0")
    computation, communication = rates[np.arange(clients) % len(rates)].T
    link = BYTES_PER_KBIT * communication
    return {"client": np.arange(clients), "speed": 1000 / (PASSES * computation), "upload": link, "download": link}


def interval_table(path: Path, clients: int) -> Columns:
    """Return client, start, end and period of every interval in seconds, (r,) each.

    Client k gets entry k + 1, as FedScale's client k + 1 does; entries repeat. Intervals that overlap are merged.
    """
    entries = load_traces(path, "active", "inactive", "finish_time")
    rows = []
    for k in range(clients):
        entry = entries[(k + 1) % len(entries)]
        try:
            period = float(entry["finish_time"])
            pairs = sorted(zip(map(float, entry["active"]), map(float, entry["inactive"]), strict=True))
        except (TypeError, ValueError) as error:
            raise UserError(f"the intervals of client {k} in {path} are not numbers in equal lists ({error})") from None
        if not (period > 0 and all(start >= 0 and math.isfinite(end) for start, end in pairs)):
            raise UserError(f"the intervals of client {k} in {path} are not finite times from 0 on")
        rows += [(k, start, end, period) for start, end in _merged(pairs, period)]
    columns = np.array(rows, np.float64).reshape(-1, 4).T
    return {"client": columns[0].astype(np.int64), "start": columns[1], "end": columns[2], "period": columns[3]}


def _merged(pairs: list[tuple[float, float]], period: float) -> list[list[float]]:
    """Return the union of sorted intervals within a period as disjoint intervals."""
    found: list[list[float]] = []
    for start, end in ((start, min(end, period)) for start, end in pairs):
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        elif start < end:
            found.append([start, end])
    return found


def write_tables(out: Path, tables: Mapping[str, Columns], overwrite: bool) -> None:
    """Write each table as OUT/NAME.parquet."""
    import pyarrow  # slow to import
    from pyarrow import parquet

    for name in tables:
        if (out / f"{name}.parquet").exists() and not overwrite:
            raise UserError(f"{out} has {name}.parquet already. Choose another --out, or add --overwrite")
    make_folder(out)
    for name, columns in tables.items():
        with whole_file(out / f"{name}.parquet") as file:
            parquet.write_table(pyarrow.table(columns), file)
