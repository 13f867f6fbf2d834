"""What became of every parameter, in a form that people and programs can read."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from natgrad import _text
from natgrad._block.base import AbstractBlock, AbstractEstimator
from natgrad._check import caller
from natgrad._program.trace import Program
from natgrad._uses.parameter_uses import ParameterUses


class BlockReport(NamedTuple):
    """One parameter: the structure it got and the `reason` why that is not a better one, if it is not; how many
    numbers its factors hold (for a bias that shares the block of a weight, they are counted there, and `shares` is the
    weight); and whether its structure is a fallback, which `strict=True` refuses."""

    path: str
    shape: tuple[int, ...]
    uses: int
    structure: str
    factors: tuple[tuple[int, ...], ...]
    numbers: int
    bytes: int
    shares: str
    reason: str
    is_fallback: bool


@dataclass(frozen=True)
class StructureReport(Mapping[str, BlockReport]):
    """The structure of every parameter, by its path. Printed, a table."""

    rows: tuple[BlockReport, ...]

    @property
    def numbers(self) -> int:
        """How many numbers are stored in all."""
        return sum(row.numbers for row in self.rows)

    @property
    def fallbacks(self) -> tuple[BlockReport, ...]:
        return tuple(row for row in self.rows if row.is_fallback)

    def describe_fallbacks(self) -> str:
        """Which parameters got less than their structure, and why."""
        return "; ".join(f"`{row.path}` is {row.structure} ({row.reason})" for row in self.fallbacks)

    def warn_of_fallbacks(self) -> None:
        """Warn at the line that called the library."""
        if self.fallbacks:
            _text.warn(f"{caller()}: {self.describe_fallbacks()}. `report()` has the details.")

    def __getitem__(self, path: str) -> BlockReport:
        return {row.path: row for row in self.rows}[path]

    def __iter__(self) -> Iterator[str]:
        return (row.path for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        shapes = lambda row: ", ".join(" × ".join(map(str, shape)) for shape in row.factors)
        note = lambda row: row.reason or (f"with {row.shares}" if row.shares else "")
        cells = [
            (row.path, str(row.shape), str(row.uses), row.structure, shapes(row), _text.size(row.bytes), note(row))
            for row in self.rows
        ]
        total = f"{self.numbers:,} numbers, {_text.size(sum(row.bytes for row in self.rows))}"
        header = ("parameter", "shape", "uses", "structure", "factors", "memory", "note")
        return _text.table(header, cells) + f"\n{total}"


def make_report(
    program: Program,
    parameters: Sequence[ParameterUses],
    estimators: Sequence[AbstractEstimator],
    blocks: Sequence[AbstractBlock],
) -> StructureReport:
    """`blocks` may be shapes."""
    rows = []
    for leaf, struct in enumerate(program.param_structs):
        own = [(one, block) for one, block in zip(estimators, blocks, strict=True) if leaf in one.leaves]
        main = [(one, block) for one, block in own if one.leaves[0] == leaf]
        shares = [program.names[one.leaves[0]] for one, _ in own if one.leaves[0] != leaf]
        factors = tuple(_compact(shape) for _, block in main for shape in block.factor_shapes)
        numbers = sum(math.prod(shape) for _, block in main for shape in block.factor_shapes)
        reasons = dict.fromkeys(one.reason for one, _ in own if one.reason)
        rows.append(
            BlockReport(
                program.names[leaf],
                tuple(struct.shape),
                len(parameters[leaf].uses),
                ", ".join(dict.fromkeys(one.structure for one, _ in own)),
                factors,
                numbers,
                numbers * own[0][1].dtype.itemsize,
                ", ".join(dict.fromkeys(shares)),
                "; ".join(reasons),
                any(one.is_fallback for one, _ in own),
            )
        )
    return StructureReport(tuple(rows))


def _compact(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without the axes of one group and of one block."""
    kept = [size for size in shape[:-2] if size != 1]
    return (*kept, *shape[-2:]) if kept or len(shape) > 1 else shape
