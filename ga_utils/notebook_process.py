"""How does one notebook run? In a process of its own, which ends when this one does.

Several can run at once, each in a thread of this process that waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .executed import without_colours
from .notebooks import PACKAGE_FOLDER
from .records import Store

# papermill's own command line reads parameters as YAML, in which 1e-05 is a text
_PAPERMILL = """
import json, sys
try:
    import ctypes
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM: end when `ga` is killed
except (ImportError, OSError, AttributeError):
    pass
import papermill
papermill.execute_notebook(**json.load(sys.stdin), stderr_file=sys.stderr)  # the cells' own progress bars
"""
_IGNORED = "ignore:IProgress not found"
_SECONDS_BETWEEN_LINES = 30  # of progress, where there is no terminal to draw a bar on
_PATIENCE = 10  # seconds that a stopped notebook has to end in order


class Kernels:
    """The notebooks that run at this moment, `jobs` at once.

    Each gets its share of the processor's cores, unless OMP_NUM_THREADS says otherwise.
    """

    def __init__(self, store: Store, jobs: int) -> None:
        self.store, self.jobs = store, jobs
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, name: str, request: dict[str, Any], root: Path, command: str) -> tuple[int, str]:
        """Run the notebook `name` by papermill's `request`; return its exit status and what it said on stderr."""
        with _environment(self.store, command, self.jobs) as environment:
            child = self._start(root, environment)
            said, shown = bytearray(), time.monotonic()
            prefix = f"{name}: " if self.jobs > 1 else ""
            try:
                with contextlib.suppress(BrokenPipeError):  # it died early, and says so on stderr
                    child.stdin.write(json.dumps(request).encode())
                    child.stdin.close()
                while chunk := os.read(child.stderr.fileno(), 4096):
                    said += chunk
                    shown = _show_progress(chunk.decode(errors="replace"), shown, prefix)
                if sys.stderr.isatty() and not prefix:
                    sys.stderr.write("\n")
                return child.wait(), without_colours(said.decode(errors="replace"))
            except BaseException:
                _end(child)
                raise
            finally:
                child.stderr.close()
                with self._lock:
                    self._running.discard(child)

    def stop(self) -> None:
        """End all that run, and start no more."""
        with self._lock:
            self._stopped, running = True, list(self._running)
        for child in running:
            child.terminate()  # its kernel watches it, and ends when it does
        for child in running:
            _end(child)

    def _start(self, root: Path, environment: dict[str, str]) -> subprocess.Popen:
        with self._lock:
            if self._stopped:
                raise KeyboardInterrupt
            child = subprocess.Popen(
                [sys.executable, "-c", _PAPERMILL],
                cwd=root,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C comes to this process alone, which stops the child in order
            )
            self._running.add(child)
            return child


def _end(child: subprocess.Popen) -> None:
    child.terminate()
    try:
        child.wait(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _show_progress(text: str, shown: float, prefix: str) -> float:
    """Pass on the last progress bar in `text`: drawn over on a terminal, else a line now and then.

    `shown` is when a line was last printed, by the monotonic clock; returns the new time. Where several notebooks run
    at once, each line begins with its `prefix` and none is drawn over.
    """
    bars = [part.strip() for part in re.split(r"[\r\n]", without_colours(text)) if "%|" in part]
    if not bars:
        return shown
    if sys.stderr.isatty() and not prefix:
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write("\r" + bars[-1][:width].ljust(width))
        sys.stderr.flush()
    elif time.monotonic() - shown > _SECONDS_BETWEEN_LINES:
        print(prefix + bars[-1], file=sys.stderr, flush=True)
        return time.monotonic()
    return shown


@contextlib.contextmanager
def _environment(store: Store, command: str, jobs: int) -> Iterator[dict[str, str]]:
    """The environment in which ``python3`` is this interpreter, whatever is installed or activated."""
    with tempfile.TemporaryDirectory(prefix="ga-kernel-", ignore_cleanup_errors=True) as folder:
        spec = Path(folder, "kernels", "python3")
        spec.mkdir(parents=True)
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        text = json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"})
        (spec / "kernel.json").write_text(text, encoding="utf-8")
        environment = dict(os.environ, GA_STORE=str(store.root.resolve()), GA_COMMAND=command)
        if jobs > 1:
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
        # threads that spin while they wait halve the speed and worse as soon as another process wants a core
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # a page is no place for tqdm's wish for a widget library, and the warning shows this machine's paths
        environment["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), _IGNORED]))
        environment["JUPYTER_PATH"] = _prepend(folder, os.environ.get("JUPYTER_PATH"))
        if "site-packages" not in PACKAGE_FOLDER.parts:
            environment["PYTHONPATH"] = _prepend(str(PACKAGE_FOLDER.parent), os.environ.get("PYTHONPATH"))
        yield environment


def _prepend(folder: str, others: str | None) -> str:
    return os.pathsep.join([folder, *([others] if others else [])])
