"""Can a model's gradients be trusted? What its weights tell, and a finite difference that must agree with them."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from .caches import structure_key
from .errors import ModelError, say_once
from .head_gradients import Gradients
from .language_model import LanguageModel
from .tasks.tokens import EncodedExample

#: how far the finite-difference check moves heads towards their masks: less far where a router or a clamp bends nearby
STEPS = (3e-3, 1e-3, 3e-4)
#: largest difference between what a step does and what gradients say, relative to the length of the gradient
TOLERANCE = 0.1
#: and what rounding may add to it, in nats
ROUNDING = 2e-5


def check_differentiable(lm: LanguageModel) -> None:
    """Raise `ModelError` for a model that cannot be differentiated, as far as its weights tell."""
    if lm.model.training:
        raise ModelError("The model is in training mode, where dropout changes gradients: call lm.model.eval() first.")
    if not lm.dtype.is_floating_point:
        raise ModelError(f"{lm.name} holds its embeddings as {lm.dtype}, which gives no gradient: load it in float32.")
    for name, p in [*lm.model.named_parameters(), *lm.model.named_buffers()]:
        if p.is_inference():
            raise ModelError(
                f"{lm.name} was loaded under torch.inference_mode() ({name} is an inference tensor), which gives no "
                "gradient: load it outside."
            )
        if p.device.type == "meta":
            raise ModelError(f"{name} is offloaded: load the model on devices that hold it whole.")


_checked: weakref.WeakKeyDictionary[nn.Module, set[tuple]] = weakref.WeakKeyDictionary()


def check_gradients(gradients: Gradients, item: EncodedExample, number: int) -> None:
    """Raise `ModelError` unless the gradients agree with a finite difference on this model, checked on one example.

    Kernels that are made for inference may break part of the gradient without an error. All heads are moved a little
    towards their masks or away, by random signs, twice. Steps that do not agree with each other prove nothing, which is
    said once. Done once for a model; not in half precision, where rounding hides the step (there only missing gradients
    are noticed).
    """
    lm = gradients.lm
    if lm.dtype not in (torch.float32, torch.float64):
        return
    where = gradients.where.positions
    key = (structure_key(lm.model), str(lm.device), where, gradients.recompute, frozenset(gradients.sites))
    if key in _checked.setdefault(lm.model, set()):
        return
    _, changes = gradients.ask([item], [number])
    change = changes[:, 0].double().sum(1)

    length = float(change.norm())

    def apart(a: float, b: float, step: float) -> float:
        """How far two slopes differ beyond rounding, relative to the gradient's length."""
        return max(abs(a - b) - ROUNDING / step, 0) / (length + 1e-12)

    random = torch.Generator().manual_seed(0)
    for _ in range(2):
        direction = torch.randint(0, 2, change.shape, generator=random).double() * 2 - 1
        told, seen = float(change @ direction), []
        for step in STEPS:
            up, down = (gradients.values([item], [number], s * step * direction).double().nansum() for s in (-1, 1))
            seen.append(float(up - down) / (2 * step))
            off = apart(told, seen[-1], step)
            if off < TOLERANCE:
                break
            if len(seen) > 1 and apart(seen[-2], seen[-1], step) < TOLERANCE / 4:  # steps agree, but not with gradients
                raise ModelError(
                    f"The gradients of {lm.name} are wrong: they differ from small steps by {off:.0%} of their length. "
                    "A kernel may be made for inference only: load the model without it, or use sweep_heads."
                )
        else:
            say_once(
                f"attribution check {lm.family}",
                f"The gradients of {lm.name} could not be checked: its answers bend within the smallest step, so that "
                "finite differences do not agree with each other. Estimates may be poor: verify them.",
            )
    _checked[lm.model].add(key)
