"""Trains a small language model as a two-stage pipeline, the activations between stages packed.

    python -m experiments.pipeline_lm [--data TEXT_FILE] [--densities 1,0.5,0.25,0.1,0.05,0.02]
                                [--formats int8,int4] [--schedule 1f1b] [--steps 300] [--seeds 2]
                                [--out runs/pipeline]

Two processes over gloo, torch.distributed.pipelining: RowPack ends the first stage, RowUnpack
begins the second; or RowQuantize and RowDequantize, with rows in each of --formats both ways. The
dense run and all others see the same batches from the same weights. Bytes of a step are counted
where they are sent: forward by the first stage, backward by the second. Prints a table, with the
held-out loss as trained and with compression switched off; writes summary.json, which has every
loss. Without --data, the text is generated.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from dct_parallel import RowDequantize, RowPack, RowQuantize, RowUnpack
from dct_parallel.rows.counts import ROW_FORMATS
from dlrm import files
from dlrm.argument_types import several
from dlrm.command_line import exit_status, make_folder
from tables import mean
from wire_meter import WireMeter

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
HELD_OUT = 0.1  # of the text, its end


def cut(args: argparse.Namespace, mode: dict) -> tuple[nn.Module | None, nn.Module | None]:
    """(what ends the first stage, what begins the second), None where there is nothing."""
    if mode["density"] is not None:
        return RowPack(mode["density"]), RowUnpack(args.width)
    if mode["format"] is not None:
        return RowQuantize(mode["format"]), RowDequantize(args.width, mode["format"])
    return None, None


class First(nn.Module):
    """Embedding and the first half of the blocks; what it returns crosses to `Second`.

    The last of it is `sender`, if there is one.
    """

    def __init__(self, args: argparse.Namespace, vocabulary: int, sender: nn.Module | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, args.width)
        self.place = nn.Parameter(0.02 * torch.randn(args.context, args.width))
        self.blocks = _blocks(args)
        self.sender = sender

    def forward(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = _run(self.blocks, self.embed(tokens) + self.place)
        return x if self.sender is None else self.sender(x)


class Second(nn.Module):
    """The other half of the blocks, and the next byte's logits; the first of it is `receiver`."""

    def __init__(
        self, args: argparse.Namespace, vocabulary: int, receiver: nn.Module | None
    ) -> None:
        super().__init__()
        self.receiver = receiver
        self.blocks = _blocks(args)
        self.head = nn.Sequential(nn.LayerNorm(args.width), nn.Linear(args.width, vocabulary))

    def forward(self, *message: Tensor) -> Tensor:
        x = message[0] if self.receiver is None else self.receiver(*message)
        return self.head(_run(self.blocks, x))


def _blocks(args: argparse.Namespace) -> nn.ModuleList:
    return nn.ModuleList(
        nn.TransformerEncoderLayer(
            args.width, args.heads, 4 * args.width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        for _ in range(args.layers // 2)
    )


def _run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    for block in blocks:
        x = block(x, mask, is_causal=True)
    return x


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def generated_text(length: int = 400_000) -> bytes:
    """Sentences from a random chain of words: some order to learn, and noise that stays."""
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (200, 8), generator=generator)
    sizes = torch.randint(2, 9, (200,), generator=generator).tolist()
    words = [bytes(word[:size].tolist()) for word, size in zip(letters, sizes, strict=True)]
    followers = torch.randint(200, (200, 6), generator=generator).tolist()
    text, word = bytearray(), 0
    for choice in torch.randint(6, (length // 4,), generator=generator).tolist():
        text += words[word] + (b".\n" if choice == 5 else b" ")
        word = followers[word][choice]
    return bytes(text[:length])


def batch_of(tokens: Tensor, size: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Excerpts [size, context] and, for each place, the token that comes next."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - context, (size, 1), generator=generator)
    excerpts = tokens[starts + torch.arange(context + 1)]
    return excerpts[:, :-1].contiguous(), excerpts[:, 1:].contiguous()


def train(rank: int, args: argparse.Namespace, tokens: Tensor, mode: dict, seed: int) -> dict:
    """One run. Rank 0 returns the bytes sent forward, rank 1 those backward, and the losses."""
    vocabulary, held_out = int(tokens.max()) + 1, int(HELD_OUT * len(tokens))
    sender, receiver = cut(args, mode)
    torch.manual_seed(seed)
    stages = [First(args, vocabulary, sender), Second(args, vocabulary, receiver)]
    stage = PipelineStage(stages[rank], rank, 2, torch.device("cpu"))
    schedule = SCHEDULES[args.schedule](stage, args.microbatches, loss_fn=_loss)
    optimizer = torch.optim.AdamW(stages[rank].parameters(), args.lr)
    curve, wire, times = [], [], []
    with WireMeter() as meter:
        for step in range(args.steps):
            optimizer.param_groups[0]["lr"] = args.lr * min(1, (step + 1) / (0.1 * args.steps))
            x, target = batch_of(tokens[:-held_out], args.batch, args.context, 10**6 * seed + step)
            optimizer.zero_grad()
            start, losses = time.perf_counter(), []
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=target, losses=losses)
                curve.append(sum(loss.item() for loss in losses) / len(losses))
            optimizer.step()
            times.append(time.perf_counter() - start)
            wire.append(meter.take())
    result = {
        "bytes": wire[-1],
        "bytes_of_first_step": wire[0],
        "ms": 1e3 * statistics.median(times),
    }
    if rank == 0:
        dist.send_object_list([stages[0].state_dict()], 1)
        return result
    trained: list = [None]
    dist.recv_object_list(trained, 0)
    stages[0].load_state_dict(trained[0])
    held = batch_of(tokens[-held_out:], args.held_out_excerpts, args.context, 0)
    result |= {"loss": curve, "held_out": evaluate(stages, *held)}
    if isinstance(sender, RowPack):
        sender.inference = False
        result["held_out_uncompressed"] = evaluate(stages, *held)
    return result


@torch.no_grad()
def evaluate(stages: list[nn.Module], x: Tensor, target: Tensor) -> float:
    """The loss in eval mode, both stages in this process."""
    for stage in stages:
        stage.eval()
    message = stages[0](x)
    return float(_loss(stages[1](*(message if isinstance(message, tuple) else (message,))), target))


def _rank(rank: int, args: argparse.Namespace, tokens: Tensor, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    modes = modes_of(args)
    for mode in modes:
        mode["runs"] = []
        for seed in range(args.seeds):
            both: list = [None, None]
            dist.all_gather_object(both, train(rank, args, tokens, mode, seed))
            forward, backward = both[0]["bytes"], both[1]["bytes"]
            run = {"seed": seed, "forward_bytes": forward, "backward_bytes": backward} | both[1]
            del run["bytes"]
            mode["runs"].append(run)
            if rank == 0:
                print(f"{mode['name']} seed {seed}: loss {run['held_out']:.4f}", flush=True)
    if rank == 0:
        Path(folder, "modes.json").write_text(json.dumps(modes))
    dist.barrier()
    dist.destroy_process_group()


def modes_of(args: argparse.Namespace) -> list[dict]:
    """Every way to cross that is trained."""
    plain = {"density": None, "format": None}
    modes = [plain | {"name": "dense"}]
    for density in args.densities:
        name = f"{100 * density:.3g}%"
        modes.append(plain | {"name": name, "density": density})
    return modes + [plain | {"name": format, "format": format} for format in args.formats]


def report(args: argparse.Namespace, modes: list[dict]) -> str:
    """The table: mean and standard deviation over seeds."""

    def over_seeds(mode: dict, key: str) -> str:
        return mean([run[key] for run in mode["runs"] if key in run]) or "-"

    lines = [
        "| cut | held-out loss | and uncompressed | bytes forward | backward | fewer by | ms |",
        "|---|---|---|---|---|---|---|",
    ]
    sent = [mode["runs"][0]["forward_bytes"] + mode["runs"][0]["backward_bytes"] for mode in modes]
    for mode, total in zip(modes, sent, strict=True):
        first = mode["runs"][0]
        lines.append(
            f"| {mode['name']} | {over_seeds(mode, 'held_out')} "
            f"| {over_seeds(mode, 'held_out_uncompressed')} | {first['forward_bytes']:,} "
            f"| {first['backward_bytes']:,} | {sent[0] / total:.1f}x "
            f"| {statistics.mean(run['ms'] for run in mode['runs']):.1f} |"
        )
    return "\n".join(lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a text file; generated if absent")
    parser.add_argument("--densities", default="1,0.5,0.25,0.1,0.05,0.02")
    parser.add_argument("--formats", type=several(str, ROW_FORMATS), default=[], help="both ways")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline"))
    for name, default in (
        ("steps", 300), ("seeds", 2), ("batch", 32), ("microbatches", 4), ("context", 64),
        ("width", 128), ("heads", 4), ("layers", 4), ("held-out-excerpts", 128),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(argv)
    args.densities = [float(density) for density in args.densities.split(",")]
    return args


def main() -> None:
    args = parse()
    make_folder(args.out)
    text = args.data.read_bytes() if args.data else generated_text()
    _, tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).unique(return_inverse=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (args, tokens, folder), nprocs=2)
        modes = json.loads(Path(folder, "modes.json").read_text())
    config = {key: str(value) for key, value in vars(args).items()}
    summary = {"torch": torch.__version__, "config": config, "modes": modes}
    print(f"\n{report(args, modes)}\n", flush=True)
    files.write_json(args.out / "summary.json", summary)
    print(args.out / "summary.json")


if __name__ == "__main__":
    raise SystemExit(exit_status("pipeline_lm", main))
