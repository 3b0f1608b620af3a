"""torch.distributed.pipelining with packed activations between the stages."""

import pytest
import torch
from oracle import rows as oracle
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from dct_parallel import RowPack, RowUnpack, pack_rows, unpack_rows
from dct_parallel.rows.packing import row_k
from support.ranks import on_ranks, weights
from wire_meter import WireMeter

pytestmark = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.13",
    reason="pipelining gives integer tensors between stages a gradient before torch 2.13",
)

STEPS, BATCH, PLACES, WIDTH, MICROBATCHES = 4, 8, 3, 40, 4
ROWS = BATCH * PLACES


class First(nn.Module):
    def __init__(self, codec):
        super().__init__()
        self.layer, self.codec = nn.Linear(16, WIDTH), codec

    def forward(self, x):
        return self.layer(x) if self.codec is None else self.codec(self.layer(x))


class Second(nn.Module):
    def __init__(self, codec):
        super().__init__()
        self.layer, self.codec = nn.Linear(WIDTH, 1), codec

    def forward(self, *message):
        x = message[0] if self.codec is None else self.codec(*message)
        return self.layer(x.tanh())


def _stages(density, format=torch.float32):
    torch.manual_seed(7)
    if density is None:
        return First(None), Second(None)
    decoder = RowUnpack(WIDTH, torch.float32)
    return First(RowPack(density, format=format)), Second(decoder)


def _batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, PLACES, 16, generator=generator)
    return x, x.sum(-1, keepdim=True).sin()


def _pipelined(rank, schedule, density, format=torch.float32):
    """Return this rank's weights after training, its losses, and its sent bytes per step."""
    module = _stages(density, format)[rank]
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = schedule(stage, MICROBATCHES, loss_fn=nn.MSELoss())
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    curve, sent = [], []
    with WireMeter() as meter:
        for step in range(STEPS):
            x, target = _batch(step)
            optimizer.zero_grad()
            losses = []
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=target, losses=losses)
            optimizer.step()
            curve += losses
            sent.append(meter.take())
    return weights(module), [loss.item() for loss in curve], sent


def _in_one_process(density):
    """Train both stages in one process; return the weights of each stage."""
    first, second = _stages(None)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for x, target in zip(*(part.chunk(MICROBATCHES) for part in _batch(step)), strict=True):
            masked = unpack_rows(*pack_rows(first(x), row_k(WIDTH, density)), WIDTH)
            (nn.functional.mse_loss(second(masked), target) / MICROBATCHES).backward()
        optimizer.step()
    return weights(first), weights(second)


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@on_ranks(2)
def test_density_1_equals_dense_and_bytes_match_the_formula(rank, schedule):
    dense, dense_curve, dense_sent = _pipelined(rank, schedule, None)
    full, full_curve, full_sent = _pipelined(rank, schedule, 1.0)
    sparse, _, sparse_sent = _pipelined(rank, schedule, 0.1)
    _, curve, narrow_sent = _pipelined(rank, schedule, 0.1, torch.bfloat16)
    assert torch.equal(full, dense) and full_curve == dense_curve
    assert len(full_curve) == rank * STEPS * MICROBATCHES
    assert not torch.equal(sparse, dense)
    assert torch.allclose(sparse, _in_one_process(0.1)[rank], atol=1e-6)
    assert all(torch.tensor(curve).isfinite())
    cases = [(WIDTH, 4), (WIDTH, 4), (row_k(WIDTH, 0.1), 4), (row_k(WIDTH, 0.1), 2)]
    positions = [0] + [oracle.encoding(WIDTH, k)[1] for k, _ in cases[1:]]
    for case, sent in enumerate((dense_sent, full_sent, sparse_sent, narrow_sent)):
        k, size = cases[case]
        with_positions = positions[case] if rank == 0 else 0  # only values are sent back
        # In the first step, pipelining also sends descriptions of its messages.
        assert sent[1:] == [ROWS * (size * k + with_positions)] * (STEPS - 1)
