"""Tables of states: what each rule takes, what it refuses, and what stands for what is left out."""

import math

import pytest
import torch

from dct_parallel.exchange import checkpoint as fields

NAN, INF = math.nan, math.inf
PLAIN = [  # rule, what it takes, what it refuses and says of it
    (fields.integer(0), [0, 7, 2**31 - 1], {-1: "-1", 6.5: "6.5", "x": "'x'", None: "None"}),
    (fields.integer(0), [], {True: "True", 2**31: "2147483648"}),
    (fields.integer(2, 5), [2, 5], {1: "1", 6: "6"}),
    (fields.TEXT, ["", "a"], {5: "5", None: "None"}),
    (fields.FRACTION, [1, 0.005], {0: "0", -0.1: "-0.1", 1.5: "1.5", NAN: "nan", "1": "'1'"}),
    (fields.FRACTION, [], {True: "True"}),
]


@pytest.mark.parametrize("field, good, bad", PLAIN)
def test_numbers_and_strings(field, good, bad):
    assert [field.flaw(value) for value in good] == [None] * len(good)
    assert {value: field.flaw(value) for value in bad} == bad


def test_a_dict_by_name():
    assert fields.BY_NAME.flaw({}) is None and fields.BY_NAME.flaw({"a": 1}) is None
    assert [fields.BY_NAME.flaw(v) for v in ([1], {0: 1}, None)] == ["[1]", "{0: 1}", "None"]


@pytest.mark.parametrize(
    "value, flaw",
    [
        (torch.tensor([0.0, -3.0, 3e38]), None),
        (torch.arange(6.0)[::2], None),  # in any memory
        (torch.zeros(4), "float32 [4]"),
        (torch.zeros(1, 3), "float32 [1, 3]"),
        (torch.zeros(3, dtype=torch.float64), "float64 [3]"),
        (torch.tensor([0.0, INF, 1.0]), INF),
        (torch.tensor([0.0, 1.0, -INF]), -INF),
        (torch.zeros(3, device="meta"), "one on meta, torch.strided"),
        (torch.zeros(3).to_sparse(), "one on cpu, torch.sparse_coo"),
        ("xyz", "str"),
        ([0.0, 0.0, 0.0], "list"),
        (None, "NoneType"),
    ],
    ids=str,
)
def test_tensors(value, flaw):
    assert fields.tensor([3]).flaw(value) == flaw


def test_a_tensor_with_a_nan():
    assert math.isnan(fields.tensor([3]).flaw(torch.tensor([0.0, NAN, 1.0])))


def test_a_tensor_without_elements():
    assert fields.tensor([0]).flaw(torch.zeros(0)) is None


TABLE = {
    "step": fields.integer(0),
    "period": fields.integer(1, default=None),
    "level": fields.tensor([], default=torch.tensor(4.0)),
}


def test_defaults_stand_for_what_is_left_out():
    given = {"step": 3, "unknown": "kept out"}
    assert fields.checked("op", given, TABLE) == {"step": 3, "level": torch.tensor(4.0)}
    whole = {"step": 3, "period": 2, "level": torch.tensor(5.0)}
    assert fields.checked("op", whole, TABLE) == whole
    assert given == {"step": 3, "unknown": "kept out"}


def test_a_tensor_leaves_its_graph_behind():
    level = torch.tensor(4.0, requires_grad=True)
    assert not fields.checked("op", {"step": 3, "level": level}, TABLE)["level"].requires_grad


@pytest.mark.parametrize(
    "values, error, text",
    [
        (
            {},
            ValueError,
            r"dct::op: step of w must be an integer in \[0, 2147483647\], got nothing",
        ),
        ({"step": -3}, ValueError, r"step of w must be an integer in \[0, 2147483647\], got -3"),
        ({"step": 3, "period": None}, ValueError, r"period of w must be an integer .*, got None"),
        (
            {"step": 3, "level": torch.tensor(INF)},
            ValueError,
            r"level of w must be a float32 \[\] tensor of finite numbers, got inf",
        ),
        ([3], TypeError, "state of w must be a dict, got list"),
        (None, TypeError, "state of w must be a dict, got NoneType"),
    ],
)
def test_errors_name_what_is_wrong(values, error, text):
    with pytest.raises(error, match=text):
        fields.checked("op", values, TABLE, " of w")
