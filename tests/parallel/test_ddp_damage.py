"""A payload damaged in flight: every rank raises at the next step, and none hangs."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from dct_kernels import payload_layout
from dct_parallel import DCTState, dct_hook
from dct_parallel.data_parallel import transports
from ranks import Dictated, gathered, run_ranks

SIZES = (20_000, 30_000)
STARTS = 64
PLACES = {  # byte of the payload -> status
    "magic": (0, 1),
    "count": (24, 1),
    "starts": (STARTS + 7, 2),
    "position": (payload_layout(50_000, 3125, torch.bfloat16).positions, 4),
}


def _damaged(rank, byte, status, victims, read_early):
    """The victims receive rank 1's payload of step 4 with one byte changed."""
    model = DistributedDataParallel(Dictated(SIZES))  # one bucket
    state = DCTState(model, density=0.05)
    model.register_comm_hook(state, dct_hook)
    all_gather = transports.all_gather
    step = 0

    def in_flight(output, tensor, group):
        all_gather(output, tensor, group)
        if step == 4 and rank in victims:
            output[1, byte] ^= 0xFF

    transports.all_gather = in_flight

    def run():
        generator = torch.Generator().manual_seed(10 * step + rank)
        model.zero_grad()
        model(*(torch.randn(n, generator=generator) for n in SIZES)).backward()

    for step in range(5):  # noqa: B007  (in_flight and run read it)
        run()
    residuals = [bucket.compressor.residual.clone() for bucket in state._buckets.values()]
    if read_early:
        with pytest.raises(RuntimeError, match="every payload of step 4 must be intact"):
            state.stats()
    step = 5
    with pytest.raises(RuntimeError, match="every payload of step 4 must be intact") as caught:
        run()
    text = str(caught.value)
    if rank in victims:
        assert f"status {status} from rank 1 in bucket 0" in text
    else:
        assert "damage that another rank reports" in text
    with pytest.raises(RuntimeError, match="every payload of step 4 must be intact"):
        state.state_dict()
    for bucket, residual in zip(state._buckets.values(), residuals, strict=True):
        assert torch.equal(bucket.compressor.residual, residual)
        assert residual.count_nonzero() > 40_000
    gathered(torch.ones(1))  # the ranks still answer each other
    return text


@pytest.mark.parametrize("place", PLACES)
def test_every_rank_raises_if_one_received_damage(place):
    run_ranks(_damaged, 2, *PLACES[place], (0,), False)


def test_every_rank_raises_if_the_sender_alone_sees_the_damage():
    run_ranks(_damaged, 4, *PLACES["magic"], (1,), False)


def test_every_rank_raises_if_all_received_damage():
    texts = run_ranks(_damaged, 2, *PLACES["starts"], (0, 1), True)
    assert texts[0] == texts[1]
