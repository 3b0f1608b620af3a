"""The settings that all entry points share."""

import inspect
import math
import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from dct_parallel import DCTAverager, DCTState, dct_fully_shard_hook
from dct_parallel.exchange.settings import Settings

ALL = "'float32', 'bfloat16', 'int8', 'int4' or 'ternary', got"


@pytest.mark.parametrize(
    "name, wrong, error, text",
    [
        ("format", "fp8", ValueError, f"{ALL} 'fp8'"),
        ("format", torch.float16, ValueError, f"{ALL} torch.float16"),
        ("format", 3, TypeError, "a string or a torch.dtype, got 3"),
        ("density", 0, ValueError, r"in \(0, 1\], got 0"),
        ("density", math.nan, ValueError, r"in \(0, 1\], got nan"),
        ("density", 1.5, ValueError, r"in \(0, 1\], got 1.5"),
        ("refresh_every", 0, ValueError, "in "),
        ("transport", "ring", ValueError, "None, 'all_gather' or 'reduce_scatter', got 'ring'"),
        ("transport", {}, ValueError, "None, 'all_gather' or 'reduce_scatter', got {}"),
    ],
)
def test_invalid_settings_raise(name, wrong, error, text):
    with pytest.raises(error, match=f"dct::DCTState: {name} must be .*{text}"):
        Settings.checked("DCTState", **{"density": None, "format": None, name: wrong})


def test_quantized_format_requires_density_1():
    rule = "dct::DCTState: density must be 1 with format int4, which sends all entries, got"
    with pytest.raises(ValueError, match=f"{rule} 0.005"):
        Settings.checked("DCTState", 0.005, "int4")
    assert Settings.checked("op", None, "int4") == Settings.checked("op", 1, "int4")


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_dtype_is_the_same_as_its_name(name):
    made = [Settings.checked("op", None, format) for format in (name, getattr(torch, name))]
    assert made[0] == made[1]


def test_entry_points_take_the_same_arguments_by_keyword_in_the_same_order():
    orders = []
    for entry_point in (DCTState, DCTAverager, dct_fully_shard_hook):
        first, *others = inspect.signature(entry_point).parameters.values()
        assert first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert all(other.kind is inspect.Parameter.KEYWORD_ONLY for other in others)
        orders.append([other.name for other in others])
    ddp, averager, sharded = orders
    assert [name for name in ddp if name in averager] == [name for name in averager if name in ddp]
    assert sharded == [name for name in ddp if name != "process_group"]
    assert set(averager) - set(ddp) == {"period", "step_ahead"}


def test_density_1_without_format_warns():
    with pytest.warns(UserWarning, match=r"density is a fraction, .* 1 % is 0.01") as caught:
        Settings.checked("op", 1, None)
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for format in ("bfloat16", torch.float32, "int4"):
            Settings.checked("op", 1, format)
        Settings.checked("op", 0.01, None)


@pytest.mark.parametrize("format, most", [("bfloat16", 0.39), ("float32", 0.26)])
def test_density_with_messages_larger_than_bfloat16_warns(format, most):
    text = r"density 0.5 means 50 %, and its messages are larger .* for 0.5 % write 0.005\."
    with pytest.warns(UserWarning, match=text):
        Settings.checked("op", 0.5, format)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Settings.checked("op", most, format)


@pytest.mark.parametrize("format", ["float32", "bfloat16"])
def test_plan_reports_that_density_1_saves_nothing(one_rank, format):
    ddp = DDP(torch.nn.Linear(4, 4))
    line = f"\nAll entries are sent in {format}, as many bytes as a plain all-reduce in {format}."
    plans = [
        state.plan()
        for state in (DCTState(ddp, density=1, format=format), DCTState(ddp, format="int4"))
    ]
    assert line in plans[0] and "All entries" not in plans[1]
