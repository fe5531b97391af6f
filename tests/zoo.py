"""The tests' short name for the package's tiny random models."""

from ga_utils.random_models import CONFIGS, LLAMA, NAMES, REFUSED, build, lm, redraw, tokenizer

__all__ = ["CONFIGS", "LLAMA", "NAMES", "REFUSED", "build", "lm", "redraw", "tokenizer"]
