"""What if a layer, a mixer or a head came from another model? (Figure 7, and the swap of the Aggregate head alone)

    graft_layers                    the donor's whole decoder layer: norms, mixer and MLP (Figure 7)
    graft_layers(mixer_only=True)   only its mixer, which reads what the host's mixer would have read
    graft_heads                     only chosen heads of its mixer, beside the other heads of the host's

Nothing is trained. A grafted attention layer sees what came before and no later token under every attention
implementation, eager with padding included (`donors.py`). Where host and donor have the same architecture and
configuration, layers and mixers work with the host's caches; other grafts keep no cache: the configuration says
use_cache=False inside the block, asking for a cache is a `NoCacheError`, and `score` takes full forwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import GAError, HeadError
from ..heads import Head, parse_heads
from ..language_model import LanguageModel
from ..sites import HeadSite, resolve
from .changes import Changes, OperatedModel, Operation, changed, changes_of, layers_of, renumber, sites_of
from .cuts import parse_layers
from .donors import Call, DonorLayer, alike, check_fit, exchange, moved, shared_copy
from .parts import GraftedHeads, GraftedLayer, GraftedMixer

#: kinds of mixers that give back a pair, with their weights or nothing as the second
_PAIRS = ("attention", "lightning")
#: architectures whose layers do
_LAYER_PAIRS = ("bamba", "falcon_h1")


@contextlib.contextmanager
def graft_layers(
    host: LanguageModel,
    donor: LanguageModel,
    layers: int | Iterable[int] | Mapping[int, int],
    *,
    mixer_only: bool = False,
) -> Iterator[OperatedModel]:
    """Put layers of `donor` in place of the host's, inside the block (paper, Figure 7).

    layers: numbers of layers, the same in both, or {host's layer: donor's layer}. mixer_only: exchange the mixer alone,
    and keep the host's norms and MLP. Yields the changed host, whose sites in those layers are the donor's heads; host
    and donor are as before after the block. Only the width of the hidden states must agree, not vocabularies. Raises
    `GAError` for layers that are not there or are grafted already, and for models that do not fit each other.
    """
    check_fit(host, donor)
    pairs = _pairs(host, donor, layers)
    call = Call()
    parts = {i: (_swap_mixer if mixer_only else _swap_layer)(host, donor, i, j, call) for i, j in pairs.items()}
    cached = all(alike(host, donor, i, j) for i, j in pairs.items())
    what = "mixers" if mixer_only else "layers"
    with changed(host, _operation(host, donor, what, pairs, parts, call, cached)) as out:
        yield out


@contextlib.contextmanager
def graft_heads(
    host: LanguageModel, donor: LanguageModel, heads: object | Mapping[object, object]
) -> Iterator[OperatedModel]:
    """Put single heads of `donor` in place of the host's, inside the block (the authors' rebuttal: the Aggregate).

    heads: heads by name, the same in both, or {donor's head: host's head, or None to add it without taking one out}.
    The host's mixer runs without its own heads of these numbers (their part of its projection's input is zero); the
    donor's mixer reads the hidden state that enters the host's layer, after the donor's own input norm (a student
    distilled from the donor keeps its norms, so that both mixers then read the same), and what these heads add through
    the donor's own output projection, without bias and without the host's gate, is added. The rest of the layer stays.

    Inside, the host's heads keep their names; where the donor's mixer is of another kind its heads are there too, as
    "L17.attention.H24". Raises `HeadError` for a head that is not there, `GAError` where models do not fit.
    """
    check_fit(host, donor)
    wanted = _head_pairs(host, donor, heads)
    _check_free(host, [i for i, _ in wanted])
    call = Call()
    parts, layers = {}, {}
    for (i, j), pairs in wanted.items():
        if i in parts:
            raise GAError(f"Heads of two donor layers cannot both sit in layer {i} of {host.name}.")
        parts[i], layers[i] = _swap_heads(host, donor, i, j, pairs, call), j
    operation = _operation(host, donor, "heads", layers, parts, call, cached=False)
    operation.key["heads"] = sorted([str(d), h and str(h)] for pairs in wanted.values() for d, h in pairs)
    with changed(host, operation) as out:
        yield out


def _operation(host, donor, what: str, layers: dict[int, int], parts: dict, call: Call, cached: bool) -> Operation:
    def apply(changes: Changes) -> None:
        for i, part in parts.items():
            if i in changes.kept:
                part(changes)
        if not cached:
            call.listen(changes)

    key = {
        "what": what,
        "layers": sorted(map(list, layers.items())),
        "attention": getattr(donor.model.config, "_attn_implementation", None),
    }
    return Operation(apply, key, "" if cached else "+graft", cached)


def _pairs(host: LanguageModel, donor: LanguageModel, layers: object) -> dict[int, int]:
    given = dict(layers) if isinstance(layers, Mapping) else None
    ours = parse_layers(layers if given is None else list(given), layers_of(host))
    theirs = parse_layers(ours if given is None else list(given.values()), layers_of(donor))
    if not ours:
        raise GAError("layers names no layer: give numbers such as [17].")
    pairs = dict(zip(ours, theirs, strict=True))
    _check_free(host, pairs)
    return pairs


def _check_free(host: LanguageModel, layers: Iterable[int]) -> None:
    changes = changes_of(host)
    for operation in changes.operations if changes else ():
        taken = {i for i, _ in operation.key["layers"]} if operation.key else set()
        if taken.intersection(layers):
            raise GAError(f"Layer {min(taken.intersection(layers))} holds a graft already: graft each layer once.")


def _swap_layer(host: LanguageModel, donor: LanguageModel, i: int, j: int, call: Call):
    if alike(host, donor, i, j):
        old = layers_of(donor)[j]
        new = shared_copy(old, [(donor.config, host.config)])
        for module in new.modules():
            renumber(module, j, i, dict.__setitem__)
        sites = [moved(s, old, new, i) for s in sites_of(donor, j)]
    else:
        part = DonorLayer(host, donor, i, j, None, call)
        new, sites = GraftedLayer(part, layers_of(host)[i], host.config.model_type in _LAYER_PAIRS), part.sites

    def put(changes: Changes) -> None:
        changes.layers[i], changes.sites[i] = new, sites

    return put


def _swap_mixer(host: LanguageModel, donor: LanguageModel, i: int, j: int, call: Call):
    ours, theirs = sites_of(host, i), sites_of(donor, j)
    if alike(host, donor, i, j) and len(ours) == len(theirs):
        swaps, sites = [], []
        for mine, other in zip(ours, theirs, strict=True):
            new = shared_copy(other.mixer, [(donor.config, host.config)])
            for module in new.modules():
                renumber(module, j, i, dict.__setitem__)
            swaps.append((mine.mixer, new))
            sites.append(moved(other, other.mixer, new, i))
    else:
        mine, other = (_single(lm, n) for lm, n in ((host, i), (donor, j)))
        part = DonorLayer(host, donor, i, j, other, call)
        swaps = [(mine.mixer, GraftedMixer(part, mine.kind in _PAIRS))]
        sites = part.sites

    def put(changes: Changes) -> None:
        for old, new in swaps:
            exchange(changes.layers[i], old, new, changes.put)
        changes.sites[i] = sites

    return put


def _single(lm: LanguageModel, layer: int) -> HeadSite:
    sites = sites_of(lm, layer)
    if len(sites) != 1:
        raise GAError(f"Layer {layer} of {lm.name} holds {len(sites)} mixers, where one is needed to exchange it.")
    return sites[0]


def _head_pairs(host: LanguageModel, donor: LanguageModel, heads: object) -> dict:
    """(host's layer, donor's layer) -> [(donor's head, host's head or None)], every head checked and in full."""
    if isinstance(heads, Mapping):
        pairs = [(_one(d), h if h is None else _one(h)) for d, h in heads.items()]
    else:
        pairs = [(d, Head(d.layer, d.index)) for d in parse_heads(heads)]
    if not pairs:
        raise GAError("heads names no head: give names such as 'L17H24'.")
    out: dict = {}
    for theirs, mine in pairs:
        resolve(donor.sites, theirs)
        layer = theirs.layer if mine is None else mine.layer
        if mine is not None:
            resolve(host.sites, mine)
        parse_layers(layer, layers_of(host))
        out.setdefault((layer, theirs.layer), []).append((theirs, mine))
    taken = [m for _, m in pairs if m is not None]
    if len(set(taken)) < len(taken):
        raise HeadError("One head of the host cannot make room for two heads of the donor: map one of them to None.")
    return out


def _one(head: object) -> Head:
    found = parse_heads(head)
    if len(found) != 1:
        raise HeadError(f"{head!r} must name one head.")
    return found[0]


def _swap_heads(host: LanguageModel, donor: LanguageModel, i: int, j: int, pairs: list, call: Call):
    theirs = {resolve(donor.sites, d) for d, _ in pairs}
    mine = {resolve(host.sites, h) for _, h in pairs if h is not None}
    if len(theirs) > 1 or len(mine) > 1:
        raise GAError(f"The heads of layer {i} must be of one mixer in each model.")
    source = theirs.pop()
    target = mine.pop() if mine else next(s for s in sites_of(host, i) if s.primary)
    part = DonorLayer(host, donor, i, j, source, call)
    found = next(s for s in part.sites if s.kind == source.kind)
    new = GraftedHeads(
        target.mixer,
        part,
        found.proj,
        _channels(target, [h.index for _, h in pairs if h is not None]).to(host.device),
        _channels(source, [d.index for d, _ in pairs]).to(host.device),
    )

    def put(changes: Changes) -> None:
        layer = changes.layers[i]
        exchange(layer, target.mixer, new, changes.put)
        changes.on_undo(layer.register_forward_pre_hook(new.enter, with_kwargs=True).remove)
        changes.on_undo(target.proj.register_forward_pre_hook(new.silence).remove)
        if found.kind not in {s.kind for s in changes.sites[i]}:
            changes.sites[i] = [*changes.sites[i], replace(found, primary=False)]

    return put


def _channels(site: HeadSite, indices: list[int]) -> Tensor:
    every = torch.arange(site.width)
    return torch.cat([every[:0], *(every[site.channels(n)] for n in sorted(indices))])
