"""The tests' short name for the package's tiny random models."""

from ga_utils.random_models import CONFIGS, NAMES, REFUSED, build, lm, redraw, tokenizer

__all__ = ["CONFIGS", "NAMES", "REFUSED", "build", "lm", "redraw", "tokenizer"]
