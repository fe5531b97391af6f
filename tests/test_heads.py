"""What is a head called? Every accepted form names the same head; every wrong one is one clear sentence."""

import collections
import operator

import numpy as np
import pytest
import torch

from ga_utils.errors import HeadError
from ga_utils.heads import Head, as_integer, parse_heads

H = Head


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("L17H24", [H(17, 24)]),
        ("l17h24", [H(17, 24)]),
        ("  L0H0\n", [H(0, 0)]),
        ("L16H22,L17H24", [H(16, 22), H(17, 24)]),
        ("L16H22, L17H24; L1H2 L3H4", [H(16, 22), H(17, 24), H(1, 2), H(3, 4)]),
        ("L17.mamba2.H3", [H(17, 3, "mamba2")]),
        ("L17.Mamba2.H3", [H(17, 3, "mamba2")]),
        (H(1, 2), [H(1, 2)]),
        ((17, 24), [H(17, 24)]),
        ([17, 24], [H(17, 24)]),
        ([(17, 24)], [H(17, 24)]),
        ([(2, 1), (0, 5)], [H(2, 1), H(0, 5)]),  # in the order given
        ([[2, 1], "L3H3", H(4, 4, "kda"), "L5H5,L6H6"], [H(2, 1), H(3, 3), H(4, 4, "kda"), H(5, 5), H(6, 6)]),
        (["L1H1"], [H(1, 1)]),
        (("L1H1",), [H(1, 1)]),
        (("L1H1", "L2H2"), [H(1, 1), H(2, 2)]),
        ((np.int64(3), np.uint8(4)), [H(3, 4)]),
        (np.array([3, 4]), [H(3, 4)]),
        (np.array([[3, 4], [5, 6]]), [H(3, 4), H(5, 6)]),
        (torch.tensor([[3, 4], [5, 6]]), [H(3, 4), H(5, 6)]),
        ((h for h in ("L1H1", (2, 2))), [H(1, 1), H(2, 2)]),
        (collections.deque(["L1H1"]), [H(1, 1)]),
        ([], []),
        ((), []),
        ([[], [(1, 1)]], [H(1, 1)]),
        (["L1H1", (1, 1), H(1, 1), "L1H1,L1H1"], [H(1, 1)]),  # each once
    ],
    ids=lambda v: "generator" if type(v).__name__ == "generator" else str(v),
)
def test_accepted_forms(given, expected):
    found = parse_heads(given)
    assert found == tuple(expected)
    assert all(type(h.layer) is int and type(h.index) is int for h in found)


WRONG = [
    "17", "L17", "H3", "L17H", "LH3", "L-1H3", "L1H-3", "L1.5H2", "L17H24x", "xL17H24", "L1H1;17", "", ",",
    " ", "17,24",
    "L17..H3", "L17.mamba2", "L17.mamba2.3", "L1H1 and L2H2", "L1 H1",
    None, 3.5, 17, -1, True, b"L1H1", bytearray(b"\x01\x02"), object(), {}, {"layer": 1, "head": 2}, {1: 2},
    {1, 2},
    (1, 2, 3), [1], (1,), (-1, 2), (2, -1), (1.0, 2.0), (True, 1), (1, False), (17, "24"), ("17", 24),
    (1, None),
    [(1, 2), 3], [(1, 2), (3,)], [None], ["L1H1", None], [{}], [b"L1H1"], [(1, 2, 3), (1, 2, 3)],
    np.int64(3), np.array(3), np.array([1.0, 2.0]), np.array([True, False]), np.array([[1, 2, 3]]),
    torch.tensor(3), torch.tensor([1.0, 2.0]), torch.tensor([True, False]), torch.tensor([[1], [2]]),
]  # fmt: skip


@pytest.mark.parametrize("given", WRONG, ids=lambda v: "object" if type(v) is object else repr(v))
def test_wrong_forms_are_one_clear_sentence(given):
    with pytest.raises(HeadError) as caught:
        parse_heads(given)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and len(message) < 250
    assert "not a head" in message or "not the name of a head" in message
    assert "L17H24" in message or "counted from 0" in message  # says what would be right


@pytest.mark.parametrize("given", ["L1H1,bogus,L2H2", ["L1H1", ["bogus"]]], ids=repr)
def test_the_part_that_could_not_be_read_is_named(given):
    with pytest.raises(HeadError, match="'bogus'"):
        parse_heads(given)


@pytest.mark.parametrize("args", [(-1, 0), (0, -1), (1.0, 2), ("1", 2), (None, 0), (True, 0), (0, [1])], ids=repr)
def test_a_head_that_cannot_exist_cannot_be_made(args):
    # Head(0, -1) would otherwise name an empty slice of channels: a mask on it does nothing
    with pytest.raises(HeadError, match="not a head"):
        Head(*args)


def test_names_and_heads_are_inverse():
    heads = [H(0, 0), H(17, 24), H(17, 3, "mamba2"), H(100, 4095, "mamba1")]
    assert parse_heads(",".join(map(str, heads))) == tuple(heads)
    assert str(H(17, 24)) == "L17H24"
    assert str(H(17, 3, "mamba2")) == "L17.mamba2.H3"
    assert str(H(np.int64(2), torch.tensor(3))) == "L2H3"


def test_heads_sort_by_layer_and_index_and_count_as_equal_by_value():
    heads = [H(10, 0), H(2, 11), H(2, 3, "mamba2"), H(2, 3)]
    assert [str(h) for h in sorted(heads)] == ["L2H3", "L2H11", "L2.mamba2.H3", "L10H0"]
    assert len({H(1, 2), H(1, 2), parse_heads("L1H2")[0]}) == 1
    assert H(1, 2) != H(1, 2, "mamba2")


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), torch.tensor(3), np.array(3)], ids=repr)
def test_whole_numbers_of_any_library_are_integers(value):
    assert as_integer(value) == 3 and type(as_integer(value)) is int


@pytest.mark.parametrize(
    "value",
    [
        True,
        3.0,
        "3",
        None,
        np.True_,
        np.float64(3),
        torch.tensor(True),
        torch.tensor(3.0),
        torch.tensor([3]),
        operator,
    ],
)
def test_what_only_looks_like_an_integer_is_none(value):
    assert as_integer(value) is None
