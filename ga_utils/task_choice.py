"""Which questions are asked of a model? One name for each kind of task, in the language that the model speaks.

The embedded tiny models know only their own language of 177 words; every other model reads English. A notebook that
asks for "kv" gets the tiny language's pairs on the one and the paper's dictionary on the other, "letter" is MMLU in
English, "cloze" the same questions without their options, and "knowledge" the paper's six knowledge tasks.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import TaskError
from .language_model import LanguageModel
from .tasks import Task, kv_task
from .tasks.benchmarks import benchmark_task, knowledge_task
from .tasks.world_facts import world_task

#: the tasks that need retrieval from the context
RETRIEVAL = ("kv", "letter", "copy-letter")
#: all that can be asked for by name
KINDS = (*RETRIEVAL, "knowledge", "cloze", "world-letter", "world-cloze")


@dataclass(frozen=True)
class Asked:
    """What is asked: `kind` in KINDS; n_pairs, format and values matter for kv alone, the latter two in English."""

    kind: str = "kv"
    n_pairs: int = 10
    format: str = "terse"
    values: str = "10-99"

    def said(self) -> str:
        """The task in words, for captions."""
        return f"key-value retrieval with {self.n_pairs} pairs" if self.kind == "kv" else f"{self.kind} questions"

    def task(self, lm: LanguageModel, n_examples: int, seed: int) -> Task:
        """The questions, drawn from `seed`. Raises `TaskError` for a kind that `lm` cannot be asked, or unknown."""
        if self.kind not in KINDS:
            raise TaskError(f"task={self.kind!r} is unknown: use one of {', '.join(KINDS)}.")
        if speaks_tiny(lm):
            from .tiny import questions

            makers = {
                "letter": questions.letter_task,
                "copy-letter": questions.copy_letter_task,
                "knowledge": questions.knowledge_task,
                "cloze": questions.cloze_task,
            }
            if self.kind == "kv":
                return questions.kv_task(self.n_pairs, n_examples, seed)
            if self.kind not in makers:
                raise TaskError(f"task={self.kind!r} is in English, which {lm.name} does not speak.")
            return makers[self.kind](n_examples, seed)
        if self.kind == "kv":
            return kv_task(self.n_pairs, n_examples, seed, self.format, self.values, lm.tokenizer)
        if self.kind == "copy-letter":
            raise TaskError(
                f"task='copy-letter' is asked of the embedded tiny models alone, in their own language; {lm.name} can "
                f"be asked {', '.join(k for k in KINDS if k != 'copy-letter')}."
            )
        if self.kind.startswith("world-"):
            return world_task(self.kind.removeprefix("world-"), n_examples, seed)
        if self.kind == "knowledge":
            return knowledge_task(n_examples, seed)
        return benchmark_task("mmlu" if self.kind == "letter" else "mmlu-cloze", n_examples, seed)


def speaks_tiny(lm: LanguageModel) -> bool:
    """Whether the model's vocabulary is that of the tiny language."""
    from .tiny.language import token_ids

    return lm.tokenizer is not None and lm.tokenizer.get_vocab() == token_ids()
