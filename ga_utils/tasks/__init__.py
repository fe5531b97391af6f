"""What is asked of a model? Tasks, their examples, and how they become tokens."""

from ga_utils.tasks.base import Example, Segment, Span, Task, as_task
from ga_utils.tasks.kv import FORMATS, KVFormat, chat_example, kv_task, words
from ga_utils.tasks.tokens import EncodedTask, encode, segment_tokens, token_spans

__all__ = [
    "FORMATS", "EncodedTask", "Example", "KVFormat", "Segment", "Span", "Task", "as_task", "chat_example",
    "encode", "kv_task", "segment_tokens", "token_spans", "words",
]  # fmt: skip
