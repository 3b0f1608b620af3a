"""One cell of bench/link.py: what a rank count, a rate and a mode gave."""

import dataclasses

import numpy as np

from .phases import PHASES


@dataclasses.dataclass(frozen=True)
class Cell:
    """Figures are per step; None where the cell failed.

    Attributes:
        rate: bits per second, None if unlimited.
        failed: why no figures are there, or fewer; None if all went well.
        steps: timed ones.
        step_ms: (20 %, median, 80 %); a step takes as long as its slowest rank.
        phases_ms: {phase: mean over ranks, and over the steps between the 20 % and 80 % quantiles}.
        payload_bytes: that a rank hands to collectives, all-reduce counted as a ring; with several
            ranks a node, what of it leaves the node: see `Method.leaving`.
        node_bytes: that a rank hands to the collectives inside a node that a mesh has.
        wire_bytes, packets: that left a rank's interface, by its counters.
        purpose_bytes: of a hybrid model, what payload_bytes are for; else empty.
    """

    ranks: int
    rate: float | None
    mode: str
    failed: str | None
    steps: int = 0
    step_ms: tuple[float, float, float] | None = None
    phases_ms: dict[str, float] | None = None
    payload_bytes: float | None = None
    wire_bytes: float | None = None
    packets: float | None = None
    node_bytes: float | None = None
    purpose_bytes: dict[str, float] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict:
        return dataclasses.asdict(self)


def merge(
    ranks: int,
    rate: float | None,
    mode: str,
    rounds: list[list[dict]],
    shared: int,
    failed: str | None,
) -> Cell:
    """A cell from every round's answers of every rank.

    Args:
        shared: how many ranks send through one interface, and so read one counter.
    """
    if not rounds:
        return Cell(ranks, rate, mode, failed or "not measured")
    times = np.concatenate([np.max([rank["seconds"] for rank in r], axis=0) for r in rounds])
    low, median, high = (float(1e3 * q) for q in np.quantile(times, (0.2, 0.5, 0.8)))
    usual = (1e3 * times >= low) & (1e3 * times <= high)

    def phase_ms(phase: str) -> float:
        of_rounds = [np.mean([rank["phases"][phase] for rank in r], axis=0) for r in rounds]
        return float(1e3 * np.concatenate(of_rounds)[usual].mean())

    def per_step(key: str) -> float:
        return sum(np.mean([rank[key] for rank in r]) for r in rounds) / len(times)

    def of_purpose(purpose: str) -> float:
        sent = sum(np.mean([rank["purpose_bytes"][purpose] for rank in r]) for r in rounds)
        return sent / len(times)

    return Cell(
        ranks,
        rate,
        mode,
        failed,
        steps=len(times),
        step_ms=(low, median, high),
        phases_ms={phase: phase_ms(phase) for phase in PHASES},
        payload_bytes=per_step("payload_bytes"),
        wire_bytes=per_step("wire_bytes") / shared,
        packets=per_step("packets") / shared,
        node_bytes=per_step("node_bytes"),
        purpose_bytes={name: of_purpose(name) for name in rounds[0][0]["purpose_bytes"]},
    )
