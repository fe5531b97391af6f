"""How is an embedded model trained? By stages that end when the model can do what the stage teaches.

Retrieval is learned in jumps after long plateaus, at a step that depends on the seed, so a fixed number of
steps would be too short for one seed and wasted on another. A stage ends when its scores on fresh lessons
reach its goals twice in a row, or at its longest.

Checkpoints hold weights and optimiser state as safetensors and the rest as JSON. Batches depend on seed,
stage and step alone, so a training that was killed continues from its last checkpoint with the numbers it
would have had.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from ga_utils.errors import GAError
from ga_utils.tiny import pruning
from ga_utils.tiny.lessons import Batch, batch

#: weight of the loss on words that are not answers; without it the plateaus are far longer
OTHER_WORDS = 0.3
CHECK_EVERY = 50
#: of the questions on which heads are chosen for pruning; no test and no notebook draws from it
PRUNING_SEED = 2_000_003


@dataclass(frozen=True)
class Stage:
    """One part of a recipe.

    mixture: kind of lesson -> share. goals: kind -> share of answer words that must be right on fresh
    lessons.
    most_steps: where the stage ends at the latest. lr: AdamW's learning rate; muon_lr: Muon's for the
    matrices inside the layers, 0 for AdamW there too. decay: the rate falls to 0 over the stage, which then
    takes exactly most_steps. one_head: all heads that aggregate but one are pruned at the start and at each check
    (`pruning.py`), and the goals count only while masking that one takes retrieval away.
    """

    name: str
    mixture: Mapping[str, float]
    goals: Mapping[str, float] = field(default_factory=dict)
    most_steps: int = 1000
    lr: float = 3e-3
    muon_lr: float = 0.0
    batch_size: int = 64
    warmup: int = 100
    decay: bool = False
    one_head: bool = False


def answer_loss(logits: Tensor, lesson: Batch) -> Tensor:
    """Cross-entropy on answer words plus OTHER_WORDS times that on all others; logits [b, t, v]."""
    each = F.cross_entropy(logits[:, :-1].flatten(0, 1), lesson.ids[:, 1:].flatten(), reduction="none")
    answers, other = lesson.answers[:, :-1].flatten(), lesson.other[:, :-1].flatten()
    return each[answers].mean() + OTHER_WORDS * each[other].mean()


@torch.no_grad()
def answer_accuracy(model: nn.Module, kinds: Mapping[str, float], seed: str, size: int = 64) -> dict[str, float]:
    """Share of answer words that greedy choice gets right on fresh lessons of each kind."""
    model.eval()
    found = {}
    for kind in kinds:
        lesson = batch({kind: 1.0}, size, f"check {kind} {seed}")
        best = model(lesson.ids).logits[:, :-1].argmax(-1)
        at = lesson.answers[:, :-1]
        found[kind] = float((best == lesson.ids[:, 1:])[at].float().mean())
    return found


def make_optimisers(model: nn.Module, stage: Stage) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for the matrices inside the layers where the stage says so."""
    named = [(n, p) for n, p in model.named_parameters() if p.ndim == 2 and "layers." in n and p.requires_grad]
    # Mamba-1's A_log has two axes but is no map between spaces
    inner = [p for n, p in named if min(p.shape) > 8 and not n.endswith("A_log")] if stage.muon_lr else []
    ids = {id(p) for p in inner}
    rest = [p for p in model.parameters() if id(p) not in ids and p.requires_grad]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": 0.05},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=stage.lr, betas=(0.9, 0.98), eps=1e-8)]
    if inner:
        found.append(torch.optim.Muon(inner, lr=stage.muon_lr, weight_decay=0.05, adjust_lr_fn="original"))
    return found


class Run:
    """A training with its history, able to stop and go on.

    history: rows of stage, step, loss and the scores at each check. pruning: what was measured whenever heads were
    looked at for pruning. `folder` holds the checkpoint; None keeps none.
    """

    def __init__(self, model: nn.Module, seed: int, folder: Path | None = None, progress: bool = True):
        self.model, self.seed, self.folder, self.progress = model, seed, folder, progress
        self.history: list[dict] = []
        self.pruning: list[dict] = []
        self._off: list[Tensor] = []
        self.done: list[str] = []
        self.seconds = 0.0  # CPU seconds of this and earlier sittings
        self._waiting: dict | None = None
        if folder is not None and (folder / "state.json").exists():
            self._resume()

    def stage(self, stage: Stage, loss: Callable[[nn.Module, Batch], Tensor] | None = None) -> None:
        """Train one stage; returns at once if the checkpoint says that it is done."""
        if stage.name in self.done:
            return
        loss = loss or (lambda model, lesson: answer_loss(model(lesson.ids).logits, lesson))
        optimisers = make_optimisers(self.model, stage)
        start, met, mean = 0, 0, None
        if self._waiting is not None:
            if self._waiting["stage"] != stage.name:
                raise GAError(
                    f"The checkpoint in {self.folder} stopped in stage {self._waiting['stage']!r}, "
                    f"not {stage.name!r}: "
                    "it is of another recipe. Delete the folder."
                )
            start, met, mean = self._waiting["step"], self._waiting["met"], self._waiting["mean"]
            _restore(optimisers, load_file(self.folder / self._waiting["optimiser"]))
            self._waiting = None
        clock = time.process_time()
        if stage.one_head and start == 0:
            self.prune(stage.name, 0)
        bar = tqdm(total=stage.most_steps, initial=start, desc=stage.name, disable=not self.progress, mininterval=10)
        for step in range(start, stage.most_steps):
            _set_rate(optimisers, stage, step)
            lesson = batch(stage.mixture, stage.batch_size, f"{self.seed} {stage.name} {step}")
            self.model.train()
            value = loss(self.model, lesson)
            if not torch.isfinite(value):
                raise GAError(f"The loss of stage {stage.name!r} is not finite at step {step}.")
            for o in optimisers:
                o.zero_grad(set_to_none=True)
            value.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for o in optimisers:
                o.step()
            for weight in self._off:
                weight.zero_()
            mean = value.item() if mean is None else 0.95 * mean + 0.05 * value.item()
            bar.update()
            if (step + 1) % CHECK_EVERY == 0 or step + 1 == stage.most_steps:
                clock, self.seconds = time.process_time(), self.seconds + time.process_time() - clock
                scores = answer_accuracy(self.model, stage.goals or stage.mixture, f"{self.seed} {stage.name} {step}")
                self.history.append({"stage": stage.name, "step": step + 1, "loss": round(mean, 5), **scores})
                bar.set_postfix({"loss": f"{mean:.3f}", **{k: f"{v:.2f}" for k, v in scores.items()}})
                reached = bool(stage.goals) and all(scores[k] >= v for k, v in stage.goals.items())
                if stage.one_head:
                    reached &= self.prune(stage.name, step + 1, step + 1 < stage.most_steps)
                met = met + 1 if reached else 0
                if met >= 2 and not stage.decay:
                    break
                self._save(optimisers, {"stage": stage.name, "step": step + 1, "met": met, "mean": mean})
        bar.close()
        self.seconds += time.process_time() - clock
        self.done.append(stage.name)
        self._save([], None)

    @property
    def pruned(self) -> list[str]:
        """The heads that were pruned, in order."""
        return [head for look in self.pruning for head in look["pruned"]]

    def prune(self, stage: str, step: int, act: bool = True) -> bool:
        """Look for heads that aggregate, and prune all but one unless `act` is False; whether that one is alone.

        The first time the layer that gathers is brought to one head too.
        """
        first, fresh = not self.pruning, PRUNING_SEED + 10_000 * self.seed + step
        found = pruning.find(self.model, fresh, None if first else self.pruning[0]["kept"])
        found["others"] = [head for head in found["others"] if head not in self.pruned]
        self.pruning.append({"stage": stage, "step": step, **found, "pruned": found["others"] if act else []})
        self._switch_off()
        if first:
            gather = self.pruning[0]["gather"] = pruning.find_gather(self.model, fresh, found["kept"])
            self.pruning[0]["pruned"] = list(dict.fromkeys(found["others"] + gather["others"]))
            self._switch_off()
        return found["gone"] and not found["others"]

    def _switch_off(self) -> None:
        self._off = pruning.weights_of(self.model, self.pruned)
        for weight in self._off:
            weight.zero_()

    def _save(self, optimisers: list, waiting: dict | None) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        turn = len(self.history) % 2  # two sets of files in turn: one is whole while the other is written
        weights, optimiser = f"weights{turn}.safetensors", f"optimiser{turn}.safetensors"
        save_file(_own(self.model), self.folder / weights)
        if waiting is not None:
            save_file(_flat(optimisers), self.folder / optimiser)
            waiting = {**waiting, "optimiser": optimiser}
        state = {
            "seed": self.seed,
            "seconds": self.seconds,
            "weights": weights,
            "done": self.done,
            "waiting": waiting,
            "history": self.history,
            "pruning": self.pruning,
        }
        part = self.folder / "state.json.part"
        part.write_text(json.dumps(state))
        os.replace(part, self.folder / "state.json")

    def _resume(self) -> None:
        state = json.loads((self.folder / "state.json").read_text())
        if state["seed"] != self.seed:
            raise GAError(
                f"The checkpoint in {self.folder} is of seed {state['seed']}, not {self.seed}: "
                "delete the folder, or "
                "name another."
            )
        weights, mine = load_file(self.folder / state["weights"]), _own(self.model)
        if {n: v.shape for n, v in weights.items()} != {n: v.shape for n, v in mine.items()}:
            raise GAError(f"The checkpoint in {self.folder} is of another model: delete the folder.")
        self.model.load_state_dict(weights, strict=False)  # a shared tensor is stored under its first name only
        self.done, self.history, self._waiting = state["done"], state["history"], state["waiting"]
        self.seconds, self.pruning = state["seconds"], state.get("pruning", [])
        self._switch_off()


def _own(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer once, under its first name (Zamba2's shared block has several)."""
    seen, found = set(), {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            found[name] = value.detach().clone().contiguous()
    return found


def _set_rate(optimisers: list, stage: Stage, step: int) -> None:
    rate = min(1.0, (step + 1) / max(stage.warmup, 1))
    if stage.decay:
        rate *= 1 - step / stage.most_steps
    for o, full in zip(optimisers, (stage.lr, stage.muon_lr), strict=False):
        for group in o.param_groups:
            group["lr"] = full * rate


def _flat(optimisers: list) -> dict[str, Tensor]:
    return {
        f"{i}.{number}.{name}": torch.as_tensor(value).detach().clone()
        for i, o in enumerate(optimisers)
        for number, entry in o.state_dict()["state"].items()
        for name, value in entry.items()
    }


def _restore(optimisers: list, flat: Mapping[str, Tensor]) -> None:
    for i, o in enumerate(optimisers):
        whole = o.state_dict()
        entries: dict[int, dict] = {}
        for key, value in flat.items():
            which, number, name = key.split(".", 2)
            if int(which) == i:
                entries.setdefault(int(number), {})[name] = value
        o.load_state_dict({**whole, "state": entries})
