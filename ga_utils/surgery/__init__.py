"""What if layers or heads are taken out of a model, or come from another one?

    with truncate(lm, 18) as cut: ...                       layers 0-17, the norm and the head (Figure 2)
    with drop_layers(lm, [16]) as cut: ...                  all layers but one (Figure 3)
    with graft_layers(llamba, llama, [17]) as grafted: ...  a whole decoder layer of another model (Figure 7)
    with graft_heads(llamba, llama, "L17H24") as grafted:   one of its heads

The model is changed in place and put back after the block; work with the `OperatedModel` that the block yields, whose
`describe` says what was done, so that its records never pass for the intact model's. Layers and heads keep the numbers
that they have in the whole model. Blocks nest: hand the yielded model to the next one.
"""

from .changes import OperatedModel
from .cuts import drop_layers, truncate
from .donors import NoCacheError
from .grafts import graft_heads, graft_layers

__all__ = ["NoCacheError", "OperatedModel", "drop_layers", "graft_heads", "graft_layers", "truncate"]
