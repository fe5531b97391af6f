"""What if layers or heads are taken out of a model, or come from another one?

Context managers that change a model in place, yield it as an `OperatedModel`, and put it back: see `cuts` (Figures 2
and 3) and `changes` (how models are put back, and how layers and heads are numbered inside).
"""

from .changes import OperatedModel
from .cuts import drop_layers, truncate
from .donors import NoCacheError
from .grafts import graft_heads, graft_layers

__all__ = ["NoCacheError", "OperatedModel", "drop_layers", "graft_heads", "graft_layers", "truncate"]
