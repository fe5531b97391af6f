"""Where do results live? One record for each measured condition, named by everything that it depends on.

A record lies in ``<store>/<kind>/<hash>.json`` (its key and its values), beside ``<hash>.npz`` where it
holds arrays. The hash is taken over the key: weights, task, condition, seed, versions, code. What may
differ between two runs of the same measurement (time, host, threads, batch size) lies in
``<hash>.meta.json``, which nothing compares.

Files are written to a temporary name and renamed, arrays first and the JSON last, so a record exists only
when it is complete and a killed run resumes where it stood. A lock on each record lets several processes
share a store.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import platform
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from .codehash import code_hash
from .encoding import canonical, decode, encode, plain, record_hash
from .errors import StoreError, say_once

__all__ = ["Record", "Store", "canonical", "code_hash", "record_hash"]

_KIND = re.compile(r"[a-z0-9][a-z0-9_-]*")
_RECORD = re.compile(r"[0-9a-f]{24}\.json")


@dataclass(frozen=True)
class Record:
    """One measured condition: its `key`, its `values`, its `arrays` by name, and its JSON file."""

    key: dict[str, Any]
    values: dict[str, Any]
    arrays: dict[str, np.ndarray]
    path: Path

    @property
    def hash(self) -> str:
        """The first 24 hexadecimal digits of the sha256 of the canonical key."""
        return record_hash(self.key)

    @property
    def meta(self) -> dict[str, Any]:
        """How this record came about (date, host, seconds, threads, batch size); empty if that is lost."""
        with suppress(OSError, ValueError):
            return json.loads(self.path.with_suffix(".meta.json").read_text(encoding="utf-8"))
        return {}


class Store:
    """A folder of records, made when it is first written to.

    Without `root` the folder is the one named by the environment variable GA_STORE, else ``results``.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.root = Path(root or os.environ.get("GA_STORE") or "results").expanduser()

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r})"

    def check_writable(self) -> None:
        """Raise `StoreError`, before any long work, if nothing could be written to this folder."""
        with self._explained(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            _write(self.root / "check", b"0" * 4096).unlink()

    def compute(
        self,
        key: dict[str, Any],
        fn: Callable[[], tuple[dict[str, Any], dict[str, Any] | None] | dict[str, Any]],
        meta: dict[str, Any] | None = None,
    ) -> Record:
        """Return the record named by `key`; only if it is not there yet, measure it with `fn` and keep it.

        `key` is JSON-like and holds everything that the result depends on; ``key["kind"]`` (lower-case
        letters, digits, - and _) names the subfolder. `fn` takes nothing and returns ``(values, arrays)``
        or values alone: values are finite JSON (numpy scalars are converted), arrays are by name and may
        hold NaN. `meta` is noted beside the record, outside what is hashed and compared, and is read after
        `fn` has run, so `fn` may fill it (``batch_size``). A record that is damaged is said so once, moved
        aside and measured again.

        Raises `StoreError` for a key or values that JSON cannot hold, naming the place, for arguments or a
        result of another shape, and for a folder that cannot be written. What `fn` raises passes through, and
        nothing is kept.
        """
        path = self._path(key)
        if not callable(fn):
            raise StoreError(f"A record is measured by a function that takes nothing, not by {fn!r:.80}.")
        if not isinstance(meta, dict | None):
            raise StoreError(f"The notes beside a record (meta) are a dict, not {type(meta).__name__}.")
        if (record := self._read(path, "pass over")) is not None:
            return record
        with self._explained(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked(path):
            if (record := self._read(path, "move")) is not None:  # another process was faster
                return record
            for stale in path.parent.glob(f".{path.stem}.*.tmp"):  # left by a run that was killed
                with suppress(OSError):
                    stale.unlink()
            began, clock = datetime.datetime.now(datetime.UTC), time.perf_counter()
            result = fn()
            seconds = time.perf_counter() - clock
            record_bytes, array_bytes = encode(key, *_values_and_arrays(result))
            note = {
                "began": began.isoformat(timespec="seconds"),
                "seconds": round(seconds, 3),
                "host": socket.gethostname(),
                "threads": _threads(),
                "python": platform.python_version(),
                "numpy": np.__version__,
                **(meta or {}),
            }
            with self._explained(path.parent):
                note_bytes = json.dumps(note, indent=1, skipkeys=True, default=str).encode()
                files = {
                    ".npz": array_bytes,
                    ".meta.json": note_bytes,
                    ".json": record_bytes,
                }  # in this order
                for suffix, content in files.items():
                    if content is not None:
                        os.replace(_write(path, content), path.with_suffix(suffix))
        record = self._read(path)
        if record is None:
            raise StoreError(f"The record {path} was written but cannot be read back: the disk loses what it is given.")
        return record

    def get(self, key: dict[str, Any]) -> Record | None:
        """Return the record named by `key`, or None if it has not been measured."""
        return self._read(self._path(key))

    def find(self, kind: str | None = None, **key_filters: Any) -> list[Record]:
        """Return the records of this `kind` (all kinds if None) whose keys hold `key_filters`, sorted by key.

        A filter equals the key's field; a filter that is a dict need only agree where it says something:
        ``store.find("sweep", model={"name": "smollm2-135m"})``. Damaged records are said so and left out.
        """
        wanted = plain(key_filters, "filter", numpy=True)
        found = []
        for path in sorted(self.root.glob(f"{kind or '*'}/*.json")):
            if _RECORD.fullmatch(path.name):
                record = self._read(path)
                if record is not None and _holds(record.key, wanted):
                    found.append(record)
        return sorted(found, key=lambda r: canonical(r.key))

    def _path(self, key: dict[str, Any]) -> Path:
        kind = key.get("kind") if isinstance(key, dict) else None
        if not isinstance(kind, str) or not _KIND.fullmatch(kind):
            raise StoreError(f"A record's key needs a 'kind' of lower-case letters, digits, '-' and '_', not {kind!r}.")
        return self.root / kind / f"{record_hash(key)}.json"

    def _read(self, path: Path, if_damaged: str = "say") -> Record | None:
        """The record at `path`, or None; a damaged one is passed over in silence, said or moved aside."""
        try:
            content = path.read_bytes()
            key, values, arrays = decode(content, path.with_suffix(".npz").read_bytes)
            if record_hash(key) != path.stem:
                raise StoreError("it lies under the name of another record")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"The record {path} cannot be read: {error.strerror}.") from error
        except StoreError as error:
            if if_damaged == "move":
                self._set_aside(path, error)
            elif if_damaged == "say":
                say_once(f"damaged {path}", f"The record {path} is damaged ({error}); it is left out.")
            return None
        return Record(key, values, arrays, path)

    def _set_aside(self, path: Path, why: Exception) -> None:
        aside = path.with_suffix(".json.damaged")
        with self._explained(path.parent):
            os.replace(path, aside)
            with suppress(FileNotFoundError):
                os.replace(path.with_suffix(".npz"), path.with_suffix(".npz.damaged"))
        say_once(
            f"moved {path}",
            f"The record {path} is damaged ({why}); it was moved to {aside.name} and is measured again.",
        )

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Hold the lock of one record; it dies with the process, so a killed run leaves nothing locked."""
        lock_path = path.with_suffix(".lock")
        lock = FileLock(lock_path)
        with self._explained(path.parent):
            try:
                lock.acquire(blocking=False)
            except Timeout:
                say_once(f"waiting {path}", f"Another process measures {path.stem}: waiting for it.")
                lock.acquire()
        try:
            yield
            # Whoever still waits on this file finds the record, so nothing is measured twice for its removal.
            with suppress(OSError):
                lock_path.unlink()
        finally:
            lock.release()

    @contextmanager
    def _explained(self, folder: Path) -> Iterator[None]:
        """Turn what the file system says into one sentence."""
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"Results cannot be written to {folder}: {why_not_written(folder, error)}. Nothing measured before "
                "is lost; make room or name another folder with --store or GA_STORE."
            ) from error


def why_not_written(folder: Path, error: OSError) -> str:
    """Return, as part of a sentence, why `error` came up when a file was to be written to `folder`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk or your share of it is full"
    for path in (folder, *folder.parents):
        if os.path.lexists(path) and not os.path.isdir(path):
            return f"{path} is {'a file' if path.exists() else 'a broken link'}, not a folder"
    return error.strerror or str(error)


def _values_and_arrays(result: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `fn` returned to `Store.compute`, in the shape that it should have."""
    if isinstance(result, tuple) and len(result) != 2:
        raise StoreError(f"What measures a record returns (values, arrays) or values, not {len(result)} things.")
    values, arrays = result if isinstance(result, tuple) else (result, None)
    if arrays is None:
        arrays = {}
    if not isinstance(arrays, dict) or not all(isinstance(name, str) for name in arrays):
        raise StoreError(f"A record's arrays are a dict of names to arrays, not {arrays!r:.80}.")
    return values, arrays


def _holds(key: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(key, dict) and all(name in key and _holds(key[name], wanted[name]) for name in wanted)
    return key == wanted


def _write(path: Path, content: bytes) -> Path:
    """Write `content` to a new temporary file beside `path`, down to the disk, and return the file."""
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    return temporary


def _threads() -> int | None:
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else os.cpu_count()
