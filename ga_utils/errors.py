"""How does the package complain? One sentence for what is wrong, one warning for what is slower or different."""

import warnings


class GAError(Exception):
    """Bad input or an impossible request, in one sentence that names what was wrong and what would be right."""


class HeadError(GAError):
    """A head, layer or position that does not exist or cannot be read."""


class ModelError(GAError):
    """A model or tokenizer that cannot be found, loaded or trusted to be measured rightly."""


class TaskError(GAError):
    """A task that cannot be built or asked of this model."""


class StoreError(GAError):
    """A results folder that cannot be read or written."""


_said: set[str] = set()


def say_once(key: str, message: str) -> None:
    """Warn with `message` the first time that this process meets `key`; a slower or different path is never silent."""
    if key not in _said:
        _said.add(key)
        warnings.warn(message, UserWarning, stacklevel=3)
