"""What if layers or heads are taken out of a model, or come from another one?

Context managers that change a model in place, yield it as an `OperatedModel`, and put it back: see `cuts` (Figures 2
and 3) and `changes` (how models are put back, and how layers and heads are numbered inside).
"""

from .changes import OperatedModel
from .cuts import drop_layers, truncate

__all__ = ["OperatedModel", "drop_layers", "truncate"]
