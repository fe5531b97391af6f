"""What do the embedded models say to the paper's claims on patterns and replacement (C8, C12, C13)?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ga_utils import claims_transfer, transfer
from ga_utils.claims import Verdict
from ga_utils.records import Record, Store
from ga_utils.task_choice import Asked
from ga_utils.tiny.panel import Member, of_family, task
from ga_utils.tiny.panel_heads import Found, patterns

RULES = {
    "C8": (claims_transfer.C8, claims_transfer.C8_RULE),
    "C12": (claims_transfer.C12, claims_transfer.C12_RULE),
    "C13": (claims_transfer.C13, claims_transfer.C13_RULE),
}


def verdicts(
    store: Store, members: Sequence[Member], found: Mapping[str, Found], n: int, seed: int
) -> tuple[list[Verdict], list[Record]]:
    """The verdicts, in the order of claims: all on letters.

    found: the teachers' heads by the teacher's name.
    """
    said: list[Verdict] = []
    records: list[Record] = []
    pairs = [
        (teacher, student, heads)
        for teacher in of_family(members, "tiny-llama")
        for student in members
        if student.seed == teacher.seed and (heads := found[teacher.lm.name].heads["Aggregate"])
    ]
    for teacher, student, heads in pairs:
        if student.family == "tiny-llamba":
            rows = []
            for m in (teacher, student):
                record = patterns(store, m.lm, task("letter", n, seed))
                at = m.lm.head_list().index(heads[0])
                rows.append((record.arrays["entropy"][at], record.arrays["top1"][at]))
                records.append(record)
            said.append(claims_transfer.smoother(student.lm.name, *rows))
        if student.family == "tiny-llamba-unaligned":
            more, used = transfer.replacement(store, student.lm, teacher.lm, heads, Asked("letter"), n, seed)
            said += more
            records += used
    return sorted(said, key=lambda v: (int(v.claim[1:]), v.model)), records
