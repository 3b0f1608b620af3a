"""What a call costs, as counted, and the file of it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

SECTOR = 32  # bytes
LANES = 32

BASELINE = Path(__file__).with_name("baseline.json")


@dataclass(frozen=True)
class KernelCost:
    """Of one kernel, over its launches in a call."""

    name: str
    slots: float  # issue slots of machine code
    half_rate: float  # those of them that take two clocks: integers, comparisons, moves
    classes: dict[str, int]  # instructions of PTX that warps issued, by class
    threads: int  # the same of their threads: what lanes were active
    sectors: int  # asked for by warps, each once an instruction
    conflicts: int  # passes through shared memory beyond the first of an access


@dataclass(frozen=True)
class Cost:
    """Of a call. Sectors are those of memory behind a cache that holds all that is used twice."""

    op: str
    detail: str
    density: float | None
    elements: int
    bytes: float  # that must move, for one element
    sectors_read: int
    sectors_written: int
    launches: int  # of kernels and memsets
    kernels: list[KernelCost]

    @property
    def name(self) -> str:
        density = "" if self.density is None else f", {100 * self.density:g} %"
        return f"{self.op} {self.detail}{density}"

    @property
    def moved(self) -> float:
        """Bytes an element, in whole sectors."""
        return SECTOR * (self.sectors_read + self.sectors_written) / self.elements

    @property
    def slots(self) -> float:
        """Thread-instructions an element: issue slots times the 32 lanes that could use each."""
        return LANES * sum(kernel.slots for kernel in self.kernels) / self.elements

    @property
    def half_rate(self) -> float:
        """Those of half rate, likewise."""
        return LANES * sum(kernel.half_rate for kernel in self.kernels) / self.elements


def load() -> tuple[str, dict[str, Cost]]:
    """The version of nvcc, and what was counted with it, by name."""
    content = json.loads(BASELINE.read_text())
    found = [
        Cost(**cost | {"kernels": [KernelCost(**kernel) for kernel in cost["kernels"]]})
        for cost in content["costs"]
    ]
    return content["nvcc"], {cost.name: cost for cost in found}


def save(nvcc: str, counted: list[Cost]) -> None:
    """A line for each cost, so that a change to one is a change to one line."""
    lines = ",\n".join(f"  {json.dumps(asdict(cost))}" for cost in counted)
    BASELINE.write_text(f'{{\n "nvcc": "{nvcc}",\n "costs": [\n{lines}\n ]\n}}\n')
