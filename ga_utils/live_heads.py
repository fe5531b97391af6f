"""Which heads can stand beside a masked head as a control, and what was decided about heads when a model was made?

A head that adds nothing is no control: masking it costs nothing, whatever the others do. Some of the embedded models
have such heads, since redundant heads were pruned in their training; then single heads decide by construction, and a
page has to say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from .heads import Head
from .language_model import LanguageModel


def is_live(lm: LanguageModel, head: Head) -> bool:
    """Whether the output projection lets anything of this head through."""
    site = lm.site(head)
    weight = next(site.proj.parameters())
    noise = torch.randn(1, 1, site.width, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        added = site.contributions(noise.to(weight.device, weight.dtype), [head.index])
    return bool(added.abs().max() > 0)


def random_beside(
    lm: LanguageModel, head: Head, n: int, seed: int = 0, without: Sequence[Head] = ()
) -> tuple[Head, ...]:
    """Up to n different random live heads of `head`'s layer, none of them `head` or in `without`.

    Where its layer holds no such head they come from the nearest layers that do; empty if none does.
    """
    rng = np.random.default_rng([seed, head.layer, head.index, 20_250_418])
    barred = {head, *without}
    home = lm.site(head)
    pools: dict[int, list[Head]] = {}
    for site in lm.sites:
        distance = 0 if site == home else max(1, abs(site.layer - home.layer))
        pools.setdefault(distance, []).extend(site.head(i) for i in range(site.n_heads))
    for _, pool in sorted(pools.items()):
        # drawn before they are tested: a layer of Mamba-1 has thousands of channels
        drawn: list[Head] = []
        for i in rng.permutation(len(pool)):
            if len(drawn) < n and pool[i] not in barred and is_live(lm, pool[i]):
                drawn.append(pool[i])
        if drawn:
            return tuple(sorted(drawn, key=lambda h: (h.layer, h.index)))
    return ()


def made_so(lm: LanguageModel) -> str:
    """What the training record beside the weights says of pruned heads, in a sentence; empty if nothing was pruned.

    A model that was distilled from a pruned one is told of, too.
    """
    from .tiny import shipping

    record, chain = training_record(lm.source), []
    while record and record["name"] not in chain:
        chain.append(record["name"])
        off = [h for look in record.get("pruning", []) for h in look.get("pruned", [])]
        if off:
            return _said(lm.name, chain, off)
        start = record.get("recipe", {}).get("start")
        record = training_record(f"ga_utils:{shipping.shipped_name(start, record['seed'])}") if start else None
    return ""


def _said(name: str, chain: Sequence[str], off: Sequence[str]) -> str:
    listed = ", ".join(off)
    if len(chain) == 1:
        return (
            f"In the training of {name} redundant heads were pruned ({listed}), by its training record. That single "
            "heads, and the layers that hold them, decide is therefore built in: C1 and C3 to C5 on it demonstrate the "
            "measurement and are no evidence about models that were not pruned."
        )
    return (
        f"{name} was distilled, head by head, from {chain[-1]}, in whose training redundant heads were pruned "
        f"({listed}), by the training records. Its own heads were not pruned, but it was fitted to a model in which "
        "single heads decide: C1 and C3 to C5 on it are weak evidence about models that were trained otherwise."
    )


def training_record(source: str) -> dict | None:
    """The training record of an embedded model, or of a folder that `ga tiny train` wrote; None if there is none."""
    from .tiny import shipping

    own = source.startswith("ga_utils:")
    folder = shipping.WEIGHTS / source.removeprefix("ga_utils:") if own else Path(source)
    if not (folder / shipping.RECORD).is_file():
        return None
    record = shipping.read_record(folder)
    return record if {"name", "seed"} <= set(record) else None
