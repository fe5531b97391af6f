"""How is a model changed for the length of a block, and put back?

Every operation of this package is an entry in a list that the model keeps while it is changed. Whenever an operation
begins or ends, the model is put back as it was and the operations still in force are applied again, in the order in
which they began. So blocks may nest, may end in any order, and leave nothing behind, also after an exception.

Layers keep their ORIGINAL numbers in the names of heads and in every argument: L17H24 is the same head in the whole
model and in one that is cut after layer 17. What the model's own code counts (`layer_idx`, `num_hidden_layers`, the
configuration's lists of layer types) is renumbered, since caches and masks are built from it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from torch import nn

from ..codehash import code_hash
from ..errors import GAError, ModelError
from ..language_model import LanguageModel
from ..sites import HeadSite, find_layers

_changes: weakref.WeakKeyDictionary[nn.Module, Changes] = weakref.WeakKeyDictionary()
#: names of a configuration's lists that hold numbers of layers; other lists with "layer" in their name and one entry
# for each layer are cut
_INDEX_LISTS = ("_ids", "_indices", "_idxs", "_only_layers")
_NOT_LISTS = ("per_layer_config",)
#: types of layers whose caches do not count tokens
_WITHOUT_LENGTH = {"linear_attention", "conv", "mlp", "moe"}


@dataclass(eq=False)
class Operation:
    """One change: `apply` edits a `Changes` that is otherwise as the model was before.

    key: plain values that tell this change from others, or None where `Changes.kept` says it all; mark: what is added
    to the family's name; cached: whether the model's caches still hold.
    """

    apply: Callable[[Changes], None]
    key: dict[str, object] | None = None
    mark: str = ""
    cached: bool = True
    model: OperatedModel | None = field(default=None, init=False)


@dataclass
class OperatedModel(LanguageModel):
    """A `LanguageModel` whose model is changed, good for the length of the block that made it.

    Heads and layers go by their original numbers; `n_layers` counts the layers that are there, `layers` names them.
    """

    operation: Operation | None = field(default=None, repr=False, compare=False)

    @property
    def layers(self) -> tuple[int, ...]:
        """Original numbers of the layers that are there."""
        return tuple(changes_of(self).kept)

    @property
    def family(self) -> str:
        """The architecture's name, marked where layers of another model sit in it ("llama+graft")."""
        return super().family + changes_of(self).mark

    def describe(self) -> dict[str, object]:
        """As of an intact model, and under "surgery" what was done to it, unless that is nothing.

        Raises `GAError` after the block has ended, when the model is another one.
        """
        key = changes_of(self).key()
        return super().describe() | ({"surgery": key} if key else {})


class Changes:
    """What one model was before the first operation in force, and what it is now.

    kept: original numbers of the layers that are there. layers: number -> module. sites: number -> sites.
    """

    def __init__(self, lm: LanguageModel):
        path, self.intact = find_layers(lm.model)
        parent, _, self.name = path.rpartition(".")
        self.owner = lm.model.get_submodule(parent)
        self.model, self.config, self.before = lm.model, lm.config, lm.sites
        self.config_state, self.config_class = dict(vars(lm.config)), type(lm.config)
        self._had_attention = not _WITHOUT_LENGTH.issuperset(
            getattr(lm.config, "layer_types", None) or ["full_attention"]
        )
        self.operations: list[Operation] = []
        self._undo: list[Callable[[], None]] = []
        self._start()

    def _start(self) -> None:
        self.kept = list(range(len(self.intact)))
        self.layers = dict(enumerate(self.intact))
        self.sites = {i: [s for s in self.before if s.layer == i] for i in self.kept}

    @property
    def mark(self) -> str:
        """What is added to the family's name, once each."""
        return "".join(dict.fromkeys(op.mark for op in self.operations))

    def key(self) -> dict[str, object] | None:
        """Plain values that tell the changed model from the intact one; None if nothing is changed."""
        grafts = [op.key for op in self.operations if op.key is not None]
        if not grafts and len(self.kept) == len(self.intact):
            return None
        return {"layers": list(self.kept), "grafts": grafts, "code": _code()}

    def put(self, where: dict, name: str, value: object) -> None:
        """``where[name] = value`` until the model is put back."""
        old = where[name]
        where[name] = value
        self._undo.append(lambda: where.__setitem__(name, old))

    def on_undo(self, call: Callable[[], object]) -> None:
        """Call `call` when the model is put back."""
        self._undo.append(call)

    def restore(self) -> None:
        """The model as it was before any operation."""
        while self._undo:
            self._undo.pop()()
        self.config.__class__ = self.config_class
        vars(self.config).clear()
        vars(self.config).update(self.config_state)
        self.owner._modules[self.name] = self.intact

    def rebuild(self) -> None:
        """The model as it was, then every operation in force."""
        self.restore()
        self._start()
        for operation in self.operations:
            operation.apply(self)
        if self.operations and self.kept != list(range(len(self.intact))):
            self._cut()
        if any(self.layers[i] is not self.intact[i] for i in self.kept) or len(self.kept) < len(self.intact):
            self.owner._modules[self.name] = nn.ModuleList(self.layers[i] for i in self.kept)
        if not (all(op.cached for op in self.operations) and self._tells_length()) and "use_cache" in vars(self.config):
            vars(self.config)["use_cache"] = False
        names = {id(m): n for n, m in self.model.named_modules()}
        found = tuple(replace(s, path=names[id(s.mixer)]) for i in self.kept for s in self.sites[i])
        for operation in self.operations:
            if operation.model is not None:
                operation.model.sites = found
        self.found = found

    def _tells_length(self) -> bool:
        """Whether caches still know how many tokens they hold: a hybrid's read that from an attention layer."""
        types = getattr(self.config, "layer_types", None)
        return not types or not self._had_attention or not _WITHOUT_LENGTH.issuperset(types)

    def _cut(self) -> None:
        for position, i in enumerate(self.kept):
            for module in self.layers[i].modules():
                renumber(module, i, position, self.put)
        cut_config(self.config, self.kept)


def renumber(module: nn.Module, old: int, new: int, put: Callable[[dict, str, object], None]) -> None:
    """Change what `module` itself remembers of its layer's number from `old` to `new`."""
    own = vars(module)
    if own.get("layer_idx") == old:
        put(own, "layer_idx", new)
    if isinstance(own.get("layer_dic"), dict) and old in own["layer_dic"]:  # Zamba2: number -> its adapter
        put(own, "layer_dic", {new: own["layer_dic"][old]})


def cut_config(config, kept: list[int]) -> None:
    """Make a configuration that of a model with the layers `kept` only, in place.

    Lists with an entry for each layer are cut, lists of layers' numbers renumbered, and a property that computes such a
    list from a period (Jamba) is overridden. Raises `ModelError` where layers differ in a way that cannot be cut.
    """
    own, count = vars(config), config.num_hidden_layers
    if getattr(config, "is_heterogeneous", False) or getattr(config, "num_kv_shared_layers", None):
        raise ModelError(
            f"Layers of {config.model_type} cannot be taken out: its layers have configurations of their own or share "
            "keys and values."
        )
    properties = [n for n in dir(type(config)) if isinstance(getattr(type(config), n, None), property)]
    names = [n for n in dict.fromkeys([*own, *properties]) if "layer" in n and n[0] != "_" and n not in _NOT_LISTS]
    lists = {n: v for n in names if isinstance(v := getattr(config, n, None), (list, tuple)) and v}
    wanted = {}
    for name, value in lists.items():
        if name.endswith(_INDEX_LISTS):
            wanted[name] = [kept.index(i) for i in value if i in kept]
        elif len(value) == count:
            wanted[name] = [value[i] for i in kept]
    own[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(kept)
    own.update({n: type(lists[n])(v) for n, v in wanted.items() if n in own})
    left = {n: v for n, v in wanted.items() if list(getattr(config, n)) != v}
    if left:
        cls = type(config)
        fixed = {n: property(lambda self, v=v: list(v)) for n, v in left.items()}
        config.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, **fixed})


@contextlib.contextmanager
def changed(lm: LanguageModel, operation: Operation) -> Iterator[OperatedModel]:
    """Apply `operation` to the model of `lm` inside the block, and yield the changed model."""
    changes = changes_of(lm)
    first = changes is None
    if first:
        changes = _changes[lm.model] = Changes(lm)
    changes.operations.append(operation)
    try:
        changes.rebuild()
        yield _operated(lm, changes, operation)
    finally:
        changes.operations.remove(operation)
        if changes.operations:
            changes.rebuild()
        else:
            changes.restore()
            _changes.pop(lm.model, None)


def _operated(lm: LanguageModel, changes: Changes, operation: Operation) -> OperatedModel:
    if not changes.found:
        raise ModelError(f"No head is left in layers {changes.kept} of {lm.name}: keep a layer that holds a mixer.")
    out = OperatedModel(
        lm.model, lm.tokenizer, lm.name, lm.title, lm.source, lm.revision, changes.found, operation=operation
    )
    operation.model = out
    return out


def changes_of(lm: LanguageModel) -> Changes | None:
    """The changes in force, or None. Raises `GAError` for a model whose block has ended."""
    changes = _changes.get(lm.model)
    if isinstance(lm, OperatedModel) and (changes is None or lm.operation not in changes.operations):
        raise GAError(f"This changed {lm.name} is used after its block has ended: use the model that it was made from.")
    return changes


def layers_of(lm: LanguageModel) -> dict[int, nn.Module]:
    """Original number -> module, of the layers that are there."""
    changes = changes_of(lm)
    if changes is None:
        return dict(enumerate(find_layers(lm.model)[1]))
    return {i: changes.layers[i] for i in changes.kept}


def sites_of(lm: LanguageModel, layer: int) -> list[HeadSite]:
    """The sites of a layer, by its original number."""
    changes = changes_of(lm)
    return [s for s in (changes.found if changes else lm.sites) if s.layer == layer]


@functools.cache
def _code() -> str:
    return code_hash("surgery")
