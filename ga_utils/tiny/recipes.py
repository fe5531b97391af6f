"""How is each embedded model made? Its stages, in order, and what it starts from.

Every number here is a setting; what came out is in the training record beside each model's weights. A stage
that ends on goals may take fewer steps than it says.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ga_utils.errors import GAError, ModelError
from ga_utils.models import load
from ga_utils.tiny import architectures, distil, fastscan, shipping
from ga_utils.tiny.lessons import Batch
from ga_utils.tiny.recipes_ssm import FALCON_MAMBA, ZAMBA2
from ga_utils.tiny.training import Run, Stage

#: the shares of the later stages; long keys keep both ends of a key in use
ALL = {"cloze": 0.08, "kv": 0.12, "letters": 0.6, "long-keys": 0.2}
GOALS = {"cloze": 0.98, "kv": 0.9, "letter": 0.97, "copy-letter": 0.97}
CONCENTRATED = {"cloze": 0.98, "kv": 0.93, "letter": 0.96, "copy-letter": 0.96}  # "settle" goes on from there
FIRST = Stage(
    "facts and pairs",
    {"cloze": 0.15, "kv": 0.35, "repeat": 0.5},
    {"cloze": 0.98, "kv": 0.9},
    most_steps=800,
    muon_lr=0.02,
)
EASY = Stage(
    "easy letters",
    {"cloze": 0.1, "kv": 0.2, "easy letters": 0.6, "long-keys": 0.1},
    {"easy letters": 0.78},
    most_steps=350,
    muon_lr=0.02,
    warmup=20,
)
LETTERS = Stage("letters", ALL, GOALS, most_steps=700, muon_lr=0.01, warmup=20)
SETTLE = Stage("settle", ALL, GOALS, most_steps=250, lr=2e-3, muon_lr=0.01, warmup=1, decay=True)

LLAMA = (FIRST, EASY, LETTERS, SETTLE)
#: the teacher ends with one Aggregate head and one head in the layer that gathers: see `pruning.py`
TEACHER = (
    FIRST,
    EASY,
    LETTERS,
    Stage("concentrate", ALL, CONCENTRATED, most_steps=300, muon_lr=0.01, warmup=20, one_head=True),
    dataclasses.replace(SETTLE, most_steps=150, one_head=True),
)
UNALIGNED = (
    Stage("matrix orientation", ALL, most_steps=60, muon_lr=0.02, batch_size=32, warmup=20),
    Stage("hidden-state alignment of mixers", ALL, most_steps=150, muon_lr=0.02, batch_size=32, warmup=20),
    Stage(
        "hidden-state alignment of blocks",
        ALL,
        most_steps=100,
        lr=1e-3,
        muon_lr=0.01,
        batch_size=32,
        decay=True,
    ),
)
FITTED = {  # what each of them fits
    "matrix orientation": "matrices",
    "hidden-state alignment of mixers": "mixers",
    "hidden-state alignment of blocks": "blocks",
}
ALIGNED = (
    Stage("end to end", ALL, GOALS, most_steps=300, lr=2e-3, muon_lr=0.01, batch_size=32, warmup=20),
    Stage("settle", ALL, GOALS, most_steps=100, lr=2e-3, muon_lr=0.01, batch_size=32, warmup=1, decay=True),
)


Loss = Callable[[nn.Module, Batch], Tensor]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """start: the model that this one is made from, or None. build: seed, teacher -> the untrained model.
    loss: teacher, stage -> what the stage minimises, None for the answers' loss."""

    name: str
    start: str | None
    stages: tuple[Stage, ...]
    build: Callable[[int, nn.Module | None], nn.Module]
    loss: Callable[[nn.Module | None, Stage], Loss | None] = lambda teacher, stage: None


def _student(seed: int, teacher: nn.Module) -> nn.Module:
    torch.manual_seed(seed)
    return distil.student_of(teacher)


RECIPES = {
    r.name: r
    for r in (
        Recipe("tiny-llama", None, TEACHER, lambda seed, _: architectures.tiny_llama(seed)),
        Recipe(
            "tiny-llamba-unaligned",
            "tiny-llama",
            UNALIGNED,
            _student,
            lambda teacher, stage: distil.layer_losses(teacher, FITTED[stage.name]),
        ),
        Recipe(
            "tiny-llamba",
            "tiny-llamba-unaligned",
            ALIGNED,
            _student,
            lambda teacher, stage: distil.end_to_end_loss(teacher),
        ),
        Recipe("tiny-zamba2", None, ZAMBA2, lambda seed, _: architectures.tiny_zamba2(seed)),
        Recipe("tiny-falcon-mamba", None, FALCON_MAMBA, lambda seed, _: architectures.tiny_falcon_mamba(seed)),
    )
}


def train(
    name: str, seed: int = 0, root: Path = Path("results/tiny"), progress: bool = True, n_test: int = 1000
) -> dict:
    """Train the model `name` from `seed` and what it starts from; returns its training record.

    root: models are written to root/NAME-seedN and found again there; checkpoints lie beside them and are
    removed at the end, so a second call continues or returns at once. Raises GAError if `name` has no recipe.
    """
    if name not in RECIPES:
        raise GAError(f"No embedded model is called {name!r}: use one of {', '.join(RECIPES)}.")
    recipe, out = RECIPES[name], Path(root) / f"{name}-seed{seed}"
    if (out / shipping.RECORD).exists():
        raise GAError(f"{out} holds a trained model already: delete it to train anew, or choose another folder.")
    teacher = start = None
    if recipe.start is not None:
        for needed in dict.fromkeys(("tiny-llama", recipe.start)):
            if not (Path(root) / f"{needed}-seed{seed}" / shipping.RECORD).exists():
                train(needed, seed, root, progress, n_test)
        teacher = load(
            Path(root) / f"tiny-llama-seed{seed}", dtype="float32", device="cpu", attn_implementation="eager"
        ).model
        if recipe.start != "tiny-llama":
            start = load(Path(root) / f"{recipe.start}-seed{seed}", dtype="float32", device="cpu").model
    model = recipe.build(seed, teacher)
    if start is not None:
        model.load_state_dict(start.state_dict())
    if name == "tiny-zamba2":
        architectures.require_shared(model)
    checkpoint = out.with_name(out.name + ".checkpoint")
    run = Run(model, seed, checkpoint, progress)
    with fastscan.fast_training():
        for stage in recipe.stages:
            run.stage(stage, recipe.loss(teacher, stage))
    settings = {"start": recipe.start, "stages": [dataclasses.asdict(s) for s in recipe.stages]}
    body = shipping.write(model, run, out, name, settings, n_test)
    shutil.rmtree(checkpoint)
    return body


def ship(folder: Path) -> Path:
    """Copy a trained model from `folder` into the package; returns where it lies now.

    Its name there is the recipe's, and "-seedN" behind it where the seed is not 0. Raises ModelError unless `folder`
    holds a model with the record of one of the recipes.
    """
    if not (Path(folder) / shipping.RECORD).exists():
        raise ModelError(f"{folder} holds no trained model: its {shipping.RECORD} is missing.")
    body = shipping.read_record(folder)
    if body.get("name") not in RECIPES:
        raise ModelError(f"{folder} is of no recipe ({body.get('name')!r}): use one of {', '.join(RECIPES)}.")
    to = shipping.WEIGHTS / shipping.shipped_name(body["name"], body["seed"])
    if to.exists():
        shutil.rmtree(to)
    return Path(shutil.copytree(folder, to))
