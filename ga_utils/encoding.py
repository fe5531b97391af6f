"""What bytes does a record have? The same content always gives the same bytes, and damage shows.

The JSON holds the key, the values, the names of the arrays and a checksum over all three and the array
file. The array file is a .npz that numpy reads, written with sorted names, fixed dates and no compression.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import StoreError

_FIRST_DATE_OF_ZIP = (1980, 1, 1, 0, 0, 0)


def canonical(key: Any) -> str:
    """Return the one JSON text of `key`: sorted fields, tuples as lists, floats by repr, no NaN.

    Raises `StoreError` naming the place in `key` that is not JSON-like.
    """
    return _dumps(plain(key, "key", numpy=False))


def record_hash(key: dict[str, Any]) -> str:
    """Return the name of a record: 24 hexadecimal digits of the sha256 of its key's canonical JSON."""
    return hashlib.sha256(canonical(key).encode()).hexdigest()[:24]


def encode(key: dict[str, Any], values: dict[str, Any], arrays: dict[str, Any]) -> tuple[bytes, bytes | None]:
    """Return the bytes of a record's JSON file and of its .npz (None without arrays).

    Raises `StoreError` naming the place in `key`, `values` or `arrays` that a record cannot hold.
    """
    if not isinstance(values, dict):
        raise StoreError(f"A record's values are a dict of names to numbers, not {type(values).__name__}.")
    key, values = plain(key, "key", numpy=False), plain(values, "values", numpy=True)
    array_bytes = _encode_arrays(arrays) if arrays else None
    content = {
        "arrays": sorted(arrays),
        "key": key,
        "sha256": _checksum(key, values, array_bytes),
        "values": values,
    }
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n", array_bytes


def _encode_arrays(arrays: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    # stored, not compressed, with a fixed date: the bytes depend on the numbers alone
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(arrays):
            array = np.ascontiguousarray(arrays[name]) if np.ndim(arrays[name]) else np.asarray(arrays[name])
            if array.dtype.kind not in "biufcUS":
                raise StoreError(f"The array {name!r} holds {array.dtype}, not numbers, booleans or text.")
            if not isinstance(name, str) or "/" in name:
                raise StoreError(f"An array's name is a text without '/', not {name!r}.")
            entry, member = zipfile.ZipInfo(f"{name}.npy", _FIRST_DATE_OF_ZIP), io.BytesIO()
            entry.create_system = 3
            np.lib.format.write_array(member, array, version=(1, 0), allow_pickle=False)
            archive.writestr(entry, member.getvalue())
    return buffer.getvalue()


def decode(record_bytes: bytes, read_arrays: Callable[[], bytes]) -> tuple[dict, dict, dict[str, np.ndarray]]:
    """Return the key, values and arrays of a record's JSON file; `read_arrays` is called if it has arrays.

    Raises `StoreError` if the bytes are not those of a whole record.
    """
    try:
        content = json.loads(record_bytes)
        key, values, names = content["key"], content["values"], content["arrays"]
        array_bytes = read_arrays() if names else None
        if content["sha256"] != _checksum(key, values, array_bytes):
            raise ValueError("its content does not match its checksum")
        arrays = {}
        if array_bytes:
            with np.load(io.BytesIO(array_bytes), allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in names}
    except (ValueError, KeyError, TypeError, FileNotFoundError, zipfile.BadZipFile) as error:
        raise StoreError(f"{type(error).__name__}: {error}") from error
    return key, values, arrays


def _checksum(key: Any, values: Any, array_bytes: bytes | None) -> str:
    return hashlib.sha256(_dumps([key, values]).encode() + (array_bytes or b"")).hexdigest()


def _dumps(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))


def plain(value: Any, where: str, numpy: bool) -> Any:
    """Return `value` as plain JSON types; `where` is named in errors, `numpy` allows numpy's scalars."""
    if numpy and isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise StoreError(f"{where} is {value}: a record holds finite numbers only.")
        return float(value)
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]", numpy) for i, item in enumerate(value)]
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str):
                raise StoreError(f"{where} has the field {name!r}: names are text, not {type(name).__name__}.")
        return {str.__str__(name): plain(item, f"{where}.{name}", numpy) for name, item in value.items()}
    raise StoreError(f"{where} is {value!r:.80}, of type {type(value).__name__}, which a record cannot hold.")
