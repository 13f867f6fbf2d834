"""The structure that every parameter got, as a table for people and as data for programs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from natgrad import _text
from natgrad._block.base import AbstractBlock, AbstractEstimator
from natgrad._block.rules import BlockRules
from natgrad._check import caller
from natgrad._program.trace import Program
from natgrad._uses.parameter_uses import ParameterUses


class BlockReport(NamedTuple):
    """The structure of one parameter.

    - `path`, `shape`, `uses`: the parameter, and how often the model uses it.
    - `structure`, `factors`: the structure it got, and the shapes of the factors that are stored.
    - `numbers`, `bytes`: the size of the factors. A bias in the block of a weight has none; they count for the weight.
    - `shares`: the path of the weight whose block the parameter shares; empty if it shares none.
    - `reason`: why it has no better structure; empty if it has the best.
    - `is_fallback`: whether the structure is a fallback, for which `strict=True` raises an error.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    metric = ng.kfac(lambda w, x: x @ w, ng.Euclidean(), jnp.zeros((3, 2)), jnp.ones((5, 3)))
    (block,) = metric.report().rows
    assert block.structure == "kronecker" and block.factors == ((3, 3), (2, 2))
    ```
    """

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
    """The structure of every parameter, by its path; `print` shows a table.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    metric = ng.kfac(lambda w, x: x @ w, ng.Euclidean(), jnp.zeros((3, 2)), jnp.ones((5, 3)))
    report = metric.report()
    assert report.numbers == 13 and not report.fallbacks
    ```
    """

    rows: tuple[BlockReport, ...]

    @property
    def numbers(self) -> int:
        """How many numbers the factors of all parameters hold."""
        return sum(row.numbers for row in self.rows)

    @property
    def fallbacks(self) -> tuple[BlockReport, ...]:
        """The parameters that fell back to a coarser structure."""
        return tuple(row for row in self.rows if row.is_fallback)

    def describe_fallbacks(self) -> str:
        """The parameters that fell back to a coarser structure, and why."""
        return "; ".join(f"`{row.path}` is {row.structure} ({row.reason})" for row in self.fallbacks)

    def __getitem__(self, path: str) -> BlockReport:
        return {row.path: row for row in self.rows}[path]

    def __iter__(self) -> Iterator[str]:
        return (row.path for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        total = f"{self.numbers:,} numbers, {_text.size(sum(row.bytes for row in self.rows))}"
        header = ("parameter", "shape", "uses", "structure", "factors", "memory", "note")
        return _text.table(header, [_cells(row) for row in self.rows]) + f"\n{total}"


def _cells(row: BlockReport) -> tuple[str, ...]:
    """The cells of a parameter in the printed table."""
    shapes = ", ".join(" × ".join(map(str, shape)) for shape in row.factors)
    note = row.reason or (f"with {row.shares}" if row.shares else "")
    return row.path, str(row.shape), str(row.uses), row.structure, shapes, _text.size(row.bytes), note


def make_report(
    program: Program,
    parameters: Sequence[ParameterUses],
    estimators: Sequence[AbstractEstimator],
    blocks: Sequence[AbstractBlock],
) -> StructureReport:
    """The report on the blocks of all parameters. `blocks` may hold shapes in place of arrays."""
    rows = []
    for leaf, struct in enumerate(program.param_structs):
        pairs = [pair for pair in zip(estimators, blocks, strict=True) if leaf in pair[0].leaves]
        covering = [estimator for estimator, _ in pairs]
        # A block counts for the first of its parameters.
        shapes = [shape for estimator, block in pairs if estimator.leaves[0] == leaf for shape in block.factor_shapes]
        shares = [program.names[estimator.leaves[0]] for estimator in covering if estimator.leaves[0] != leaf]
        reasons = [estimator.reason for estimator in covering if estimator.reason]
        numbers = sum(map(math.prod, shapes))
        rows.append(
            BlockReport(
                path=program.names[leaf],
                shape=tuple(struct.shape),
                uses=len(parameters[leaf].uses),
                structure=", ".join(dict.fromkeys(estimator.structure for estimator in covering)),
                factors=tuple(map(_compact, shapes)),
                numbers=numbers,
                bytes=numbers * pairs[0][1].dtype.itemsize,
                shares=", ".join(dict.fromkeys(shares)),
                reason="; ".join(dict.fromkeys(reasons)),
                is_fallback=any(estimator.is_fallback for estimator in covering),
            )
        )
    return StructureReport(tuple(rows))


def _compact(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without the axes of one group and of one block."""
    leading = [size for size in shape[:-2] if size != 1]
    return (*leading, *shape[-2:]) if leading or len(shape) > 1 else shape


def check_fallbacks(report: StructureReport, rules: BlockRules) -> None:
    """Raise an error if parameters fell back to a coarser structure and the rules are strict; otherwise warn of it."""
    if not report.fallbacks:
        return
    if rules.strict:
        raise ValueError(
            f"{caller()} with `strict=True` needs a structure for every parameter, but "
            f"{report.describe_fallbacks()}. Choose a structure for them: `BlockRules(structures={{path: ...}})`."
        )
    _text.warn(f"{caller()}: {report.describe_fallbacks()}. `report()` has the details.")
