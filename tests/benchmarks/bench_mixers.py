"""How fast and how lean are the matrices? Ratios within one run, on one thread: the machine cancels out.

    python tests/benchmarks/bench_mixers.py

Prints one line a measure: what was found, what is aimed at, and whether it was reached. Times are CPU times,
the best of several, with the two sides of a ratio taken in turns. Under a minute.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import ctypes  # noqa: E402
import gc  # noqa: E402
import math  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import zoo  # noqa: E402

from ga_utils import mixers  # noqa: E402
from ga_utils.language_model import wrap  # noqa: E402
from ga_utils.mixers.base import FAMILIES  # noqa: E402
from ga_utils.mixers.mamba2 import decayed_products, decayed_rows  # noqa: E402


def times(*functions, repeats: int = 5) -> list[float]:
    """Best CPU time of each function in seconds; they take turns."""
    best = [math.inf] * len(functions)
    for _ in range(repeats):
        for i, function in enumerate(functions):
            start = time.process_time()
            function()
            best[i] = min(best[i], time.process_time() - start)
    return best


def _status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def peak(function) -> int:
    """Bytes by which the process's resident memory rose at most while `function` ran (Linux)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    kept = function()
    rise = _status("VmHWM") - before
    del kept
    return rise


def report(what: str, found: str, aim: str, ok: bool) -> None:
    print(f"{'ok  ' if ok else 'MISS'}  {what}: {found} (aim: {aim})", flush=True)


def ssm(heads: int, length: int, state: int = 64, groups: int = 1):
    """Arguments of a Mamba-2 head's matrix with memories of a few to a thousand tokens."""
    gen = torch.Generator().manual_seed(0)
    c, b = (torch.randn(1, groups, length, state, generator=gen) for _ in range(2))
    dt = torch.rand(1, heads, length, generator=gen)
    decay = -dt * torch.logspace(-3, 0, heads).view(1, heads, 1)
    return c, b, dt, decay, [h * groups // heads for h in range(heads)]


def mamba2_matrix() -> None:
    args = ssm(32, 1024, groups=32)
    ours, bare = times(lambda: decayed_products(*args), lambda: args[0] @ args[1].mT)
    ratio = ours / bare
    report(
        "Mamba-2, 32 heads at T=1024, against a bare batched product",
        f"{ratio:.2f}x",
        "at most 3x",
        ratio <= 3,
    )


def one_row() -> None:
    args = ssm(16, 4096)
    last = torch.tensor([[4095]])
    (square,) = times(lambda: decayed_products(*args), repeats=2)
    (row,) = times(lambda: decayed_rows(*args, last), repeats=9)
    report(
        "one row of 16 heads at T=4096, against the matrices",
        f"1/{square / row:.0f}",
        "at most 1/200",
        square >= 200 * row,
    )
    rises = []
    for length in (4096, 16384):
        args = ssm(32, length)
        rises.append(peak(lambda args=args, length=length: decayed_rows(*args, torch.tensor([[length - 1]]))))
    report(
        "peak memory of that row at T=4096 and 16384",
        f"{rises[0] / 2**20:.0f} and {rises[1] / 2**20:.0f} MB",
        "grows with T (x4), not T^2 (x16)",
        rises[1] <= 6 * max(rises[0], 2**20),
    )


def mamba1_rows() -> None:
    # as many channels as Falcon-Mamba-7B has in a layer
    model, tokenizer = zoo.build("mamba", hidden_size=64, expand=128, state_size=16, num_hidden_layers=1)
    lm = wrap(model, tokenizer)
    ids = torch.randint(4, 260, (1, 2048), generator=torch.Generator().manual_seed(0))
    cap = mixers.capture(lm, {"input_ids": ids})[lm.sites[0]]
    at = torch.tensor([[2047, 1000]])
    channels = list(range(lm.sites[0].n_heads))
    rise = peak(lambda: FAMILIES["mamba1"].rows(cap, channels, at, True))
    report(
        f"Mamba-1, 2 rows of all {len(channels)} channels at T=2048, beyond the forward pass",
        f"{rise / 2**30:.2f} GB",
        "at most 1 GB",
        rise <= 2**30,
    )


def against_loops() -> None:
    c, b, dt, decay, group = ssm(8, 200, state=16)

    def loops() -> torch.Tensor:
        m = torch.zeros(1, 8, 200, 200)
        for h in range(8):
            for t in range(200):
                for s in range(t + 1):
                    step = decay[0, h, s + 1 : t + 1].sum().exp() * dt[0, h, s]
                    m[0, h, t, s] = (c[0, 0, t] @ b[0, 0, s]) * step
        return m

    kept = []
    (slow,) = times(lambda: kept.append(loops()), repeats=1)
    (fast,) = times(lambda: decayed_products(c, b, dt, decay, group), repeats=30)
    assert torch.allclose(decayed_products(c, b, dt, decay, group), kept[0], atol=1e-4)
    report("Mamba-2, 8 heads at T=200, against plain loops", f"{slow / fast:.0f}x", "1000x", slow >= 1000 * fast)


if __name__ == "__main__":
    torch.set_num_threads(1)
    started = time.perf_counter()
    with torch.no_grad():
        for measure in (mamba2_matrix, one_row, against_loops, mamba1_rows):
            measure()
    print(f"{time.perf_counter() - started:.0f} s")
