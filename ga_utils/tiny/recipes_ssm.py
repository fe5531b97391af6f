"""In which stages do the hybrid and the Mamba-1 model learn? Facts and pairs; letters are not taught."""

from __future__ import annotations

from ga_utils.tiny.training import Stage

PAIRS = {"cloze": 0.98, "kv": 0.9}

ZAMBA2 = (
    Stage(
        "facts and pairs",
        {"cloze": 0.15, "kv": 0.35, "repeat": 0.5},
        PAIRS,
        most_steps=800,
        muon_lr=0.02,
        batch_size=48,
    ),
    Stage(
        "settle",
        {"cloze": 0.3, "kv": 0.7},
        PAIRS,
        most_steps=100,
        lr=2e-3,
        muon_lr=0.01,
        batch_size=48,
        warmup=1,
        decay=True,
    ),
)
#: Pairs come before facts here: lists of three are short, and mixed with facts they are learned far more slowly. Of
#: three seeds one came to retrieve, and in part; 500 more steps with a falling rate did not help it.
FALCON_MAMBA = (
    Stage("few pairs", {"few pairs": 1.0}, {"few pairs": 0.9}, most_steps=500, muon_lr=0.02, batch_size=32, warmup=20),
    Stage(
        "facts and pairs",
        {"cloze": 0.4, "kv": 0.6},
        PAIRS,
        most_steps=350,
        muon_lr=0.02,
        batch_size=32,
        warmup=1,
        decay=True,
    ),
)
