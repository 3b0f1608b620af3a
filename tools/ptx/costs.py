"""The counted cost of a call, and the baseline file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

SECTOR = 32  # bytes
LANES = 32

BASELINE = Path(__file__).with_name("baseline.json")


@dataclass(frozen=True)
class KernelCost:
    """The cost of one kernel, over all of its launches in a call."""

    name: str
    slots: float  # issue slots of machine code
    half_rate: float  # issue slots that take two clocks: integers, comparisons, moves
    classes: dict[str, int]  # PTX instructions that warps issued, by class
    threads: int  # active lanes of these instructions
    sectors: int  # distinct sectors per warp instruction, summed over the instructions


@dataclass(frozen=True)
class Cost:
    """The cost of a call. Sectors are the memory traffic with an infinitely large cache."""

    op: str
    detail: str
    density: float | None
    elements: int
    bytes: float  # that must move, per element
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
        """Bytes that move per element, in whole sectors."""
        return SECTOR * (self.sectors_read + self.sectors_written) / self.elements

    @property
    def slots(self) -> float:
        """Thread instructions per element: issue slots times 32 lanes."""
        return LANES * sum(kernel.slots for kernel in self.kernels) / self.elements

    @property
    def half_rate(self) -> float:
        """Thread instructions per element that run at half rate."""
        return LANES * sum(kernel.half_rate for kernel in self.kernels) / self.elements


def load() -> tuple[str, dict[str, Cost]]:
    """Return the version of nvcc, and {name: cost counted with this version}."""
    content = json.loads(BASELINE.read_text())
    found = [
        Cost(**cost | {"kernels": [KernelCost(**kernel) for kernel in cost["kernels"]]})
        for cost in content["costs"]
    ]
    return content["nvcc"], {cost.name: cost for cost in found}


def save(nvcc: str, counted: list[Cost]) -> None:
    """Write one line per cost, so that a diff shows the costs that changed."""
    lines = ",\n".join(f"  {json.dumps(asdict(cost))}" for cost in counted)
    BASELINE.write_text(f'{{\n "nvcc": "{nvcc}",\n "costs": [\n{lines}\n ]\n}}\n')
