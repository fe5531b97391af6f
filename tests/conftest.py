"""What do all tests share? One thread, no hub, fixed seeds, and Chromium where there is one."""

import os

# Before torch is imported. With one thread, sums come out the same on every machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import random  # noqa: E402
import shutil  # noqa: E402
import sys  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Each test starts from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium or Chrome; tests that ask for it are skipped where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium on this machine: browser tests were not run (Debian: apt-get install chromium)")
