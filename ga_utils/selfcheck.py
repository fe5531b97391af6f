"""Can this model be measured rightly?

`self_check` runs when a model is loaded: a few forward passes over a dozen tokens that try, on this very model, the
properties that every result rests on. A model that fails is refused with the sentence that says what failed.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import HeadError, ModelError
from .heads import Head
from .language_model import LanguageModel
from .masking import capture_inputs, mask_heads

#: bound on relative errors, by dtype: rounding of the projection in low precision is no fault of the model's structure
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
_LENGTHS = (7, 13)


@dataclass(frozen=True)
class Check:
    """One property: what was tried, the largest relative error found, the bound, and whether it held."""

    name: str
    error: float
    bound: float
    detail: str

    @property
    def ok(self) -> bool:
        """Whether the error is within the bound; NaN is not."""
        return self.error <= self.bound


@dataclass(frozen=True)
class Report:
    """The result of `self_check`."""

    model: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether every check held."""
        return all(c.ok for c in self.checks)

    @property
    def rows(self) -> list[dict[str, object]]:
        """One plain row for each check, for printing."""
        return [
            {"check": c.name, "error": c.error, "bound": c.bound, "ok": c.ok, "detail": c.detail} for c in self.checks
        ]


@torch.no_grad()
def self_check(lm: LanguageModel) -> Report:
    """Try the contract on `lm` with random tokens and return what was found; see `require` for the raising form.

    Checked: (1) head contributions through the output projection sum to the mixer's output at every site; (2) a zero
    mask at one position subtracts that head's contribution there and nothing elsewhere; (3) a prompt scores the same
    alone, with right padding and beside a companion; (4) no token sees a later one; (5) a head that does not exist is
    an error.
    """
    bound = BOUNDS[lm.dtype]
    short, long = (_tokens(lm, n, seed=n) for n in _LENGTHS)
    batch = _pad_right(lm, [short, long])
    sums, masks = _check_sites(lm, batch)
    alone = [_logits(lm, _pad_right(lm, [ids]))[0] for ids in (short, long)]
    both = _logits(lm, batch)
    padding = max(_error(both[i, : len(a)], a) for i, a in enumerate(alone))
    changed = long.clone()
    changed[-1] = long[0] if long[0] != long[-1] else long[1]
    causal = _error(_logits(lm, _pad_right(lm, [changed]))[0, :-1], alone[1][:-1])
    n_heads = sum(s.n_heads for s in lm.sites)
    return Report(
        lm.name,
        (
            Check("contributions", sums, bound, f"heads sum to the mixer's output at {len(lm.sites)} sites"),
            Check("masking", masks, bound, "a masked head is missing at its position, and only there"),
            Check("padding", padding, bound, "right-padded batch against each prompt alone"),
            Check("causality", causal, bound, "earlier logits do not move when the last token changes"),
            Check("addresses", _check_addresses(lm), 0.0, f"{n_heads} heads; one beyond each site's last is refused"),
        ),
    )


def require(lm: LanguageModel) -> Report:
    """Run `self_check` and raise `ModelError` with one sentence if a check failed."""
    report = self_check(lm)
    for c in report.checks:
        if math.isnan(c.error):
            raise ModelError(
                f"{lm.name} ({type(lm.model).__name__}) cannot be measured: its outputs are not numbers (NaN), as with "
                "damaged weights or a dtype that is too narrow for them."
            )
        if not c.ok:
            raise ModelError(
                f"{lm.name} ({type(lm.model).__name__}) cannot be measured rightly: the check '{c.name}' ({c.detail}) "
                f"found a relative error of {c.error:.2g}, above {c.bound:.0e}."
            )
    return report


def _check_sites(lm: LanguageModel, batch: dict[str, Tensor]) -> tuple[float, float]:
    """Largest relative errors of contract 1 and 2 over all sites, from one plain and one masked forward."""
    outputs: dict[object, Tensor] = {}
    calls: Counter[object] = Counter()

    def keep(site):
        def hook(module, args, output):
            calls[site] += 1
            outputs[site] = output[0] if isinstance(output, tuple) else output

        return hook

    heads = [s.head((s.n_heads * 2) // 3) for s in lm.sites]
    position = 3
    handles = [s.mixer.register_forward_hook(keep(s)) for s in lm.sites]
    try:
        with capture_inputs(lm.sites) as inputs:
            lm.model(**batch, use_cache=False)
            plain = dict(outputs)
            before = dict(inputs)
        for site in lm.sites:
            if site not in before or calls[site] != 1:
                raise ModelError(
                    f"{lm.name} ({type(lm.model).__name__}) cannot be measured rightly: in one forward pass the "
                    f"mixer of layer {site.layer} ({site.path}) ran {calls[site]} times and its output projection "
                    f"{'ran' if site in before else 'was never called'}, where each should run once."
                )
        # captured before the mask edits it: hooks run in the order in which they were registered
        with capture_inputs(lm.sites) as inputs, mask_heads(lm, heads, [[position]] * 2):
            lm.model(**batch, use_cache=False)
            masked, under = dict(outputs), dict(inputs)
    finally:
        for h in handles:
            h.remove()
    sums = errors = 0.0
    for site, head in zip(lm.sites, heads, strict=True):
        out = plain[site]
        bias = site.proj(torch.zeros_like(before[site][:1, :1]))
        total = _sum_of_contributions(site, before[site])
        sums = max(sums, _error(total + bias, out.reshape(total.shape)))
        expected = site.proj(under[site])
        missing = site.contributions(under[site][:, position : position + 1], [head.index])[0]
        expected[:, position : position + 1] -= missing
        errors = max(errors, _error(masked[site].reshape(expected.shape), expected))
    return sums, errors


def _sum_of_contributions(site, x: Tensor) -> Tensor:
    """Sum of every head's contribution, added up in at most 64 groups of heads (a Mamba-1 site has thousands)."""
    zero = site.proj(torch.zeros_like(x[:1, :1]))
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=x.device)
    for group in torch.arange(site.n_heads).chunk(64):
        only = torch.zeros_like(x)
        channels = slice(int(group[0]) * site.head_dim, (int(group[-1]) + 1) * site.head_dim)
        only[..., channels] = x[..., channels]
        total = total + (site.proj(only) - zero).to(wide)
    return total


def _check_addresses(lm: LanguageModel) -> float:
    """0 if one head beyond the last of every site, and one layer beyond the last, is refused; else 1."""
    beyond = [Head(s.layer, s.n_heads, None if s.primary else s.kind) for s in lm.sites]
    for head in [*beyond, Head(1 + max(s.layer for s in lm.sites), 0)]:
        try:
            lm.site(head)
        except HeadError:
            continue
        return 1.0
    return 0.0


def _tokens(lm: LanguageModel, n: int, seed: int) -> Tensor:
    size = lm.config.vocab_size
    ids = torch.randint(min(8, size - 1), size, (n,), generator=torch.Generator().manual_seed(seed))
    return ids


def _pad_right(lm: LanguageModel, rows: list[Tensor]) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), lm.pad_id)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return {"input_ids": ids.to(lm.device), "attention_mask": mask.to(lm.device)}


def _logits(lm: LanguageModel, batch: dict[str, Tensor]) -> Tensor:
    return lm.model(**batch, use_cache=False).logits.float()


def _error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the expected values' root mean square."""
    scale = expected.float().pow(2).mean().sqrt().clamp_min(1e-12)
    return float((found.float() - expected.float()).abs().max() / scale)
