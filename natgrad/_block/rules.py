"""The options of Kronecker-factored metrics that decide on the structure of their blocks."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx

from natgrad._check import caller, public

STRUCTURES = ("kronecker", "eigenvalue-corrected", "dense", "diagonal")


class BlockRules(eqx.Module):
    """The structure of the blocks of a Kronecker-factored metric, for `kfac`, `ekfac`, `KFAC` and `EKFAC`.

    **Arguments:**

    - `sharing`: how to treat positions of one example that share a weight, such as tokens or pixels. `"expand"` treats
      each position as an example; use it if each position has its own term in the loss (language models). `"reduce"`
      first averages the inputs and sums the cotangents over positions; use it if the model pools positions
      (classifiers of images).
    - `bias`: `"joint"` puts a weight and its bias into one block, `"separate"` into two.
    - `structures`: a mapping from paths of parameters to `"kronecker"`, `"eigenvalue-corrected"` (see `ekfac`),
      `"dense"` or `"diagonal"`. A path covers all parameters below it.
    - `max_factor`: the largest number of rows of a factor. A larger factor is diagonal with `oversized="diagonal"`, and
      block-diagonal with blocks of at most this size with `oversized="blocked"`.
    - `max_dense`: the largest number of entries of a parameter that is no weight, such as a scale, for which a dense
      block is stored; larger parameters get a diagonal block.
    - `strict`: whether to raise an error, instead of a warning, if a parameter falls back to a coarser structure.

    ```python
    import natgrad as ng

    rules = ng.BlockRules(sharing="reduce", structures={"params['head']": "dense"})
    ng.KFAC(blocks=rules)
    ```
    """

    sharing: str = eqx.field(static=True)
    bias: str = eqx.field(static=True)
    structures: tuple[tuple[str, str], ...] = eqx.field(static=True)
    max_factor: int = eqx.field(static=True)
    max_dense: int = eqx.field(static=True)
    oversized: str = eqx.field(static=True)
    strict: bool = eqx.field(static=True)

    @public
    def __init__(
        self,
        sharing: str = "expand",
        bias: str = "joint",
        structures: Mapping[str, str] | None = None,
        *,
        max_factor: int = 4096,
        max_dense: int = 128,
        oversized: str = "diagonal",
        strict: bool = False,
    ):
        _check_choice("sharing", sharing, ("expand", "reduce"))
        _check_choice("bias", bias, ("joint", "separate"))
        _check_choice("oversized", oversized, ("diagonal", "blocked"))
        for name, value in (("max_factor", max_factor), ("max_dense", max_dense)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{caller()} needs `{name}` to be a whole number of at least 1, but got {value}.")
        self.sharing, self.bias, self.structures = sharing, bias, _sorted_structures(structures)
        self.max_factor, self.max_dense, self.oversized, self.strict = max_factor, max_dense, oversized, strict


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{caller()} needs `{name}` to be one of {choices}, but got {value!r}.")


def _sorted_structures(structures: Any) -> tuple[tuple[str, str], ...]:
    """Structures by path as a tuple, which can be hashed and compared."""
    if structures is None:
        return ()
    if not isinstance(structures, Mapping):
        raise TypeError(f"{caller()} needs `structures` to map paths to structures, but got {structures!r}.")
    for path, structure in structures.items():
        if structure not in STRUCTURES:
            raise ValueError(f"{caller()} needs a structure among {STRUCTURES} for `{path}`, but got {structure!r}.")
    return tuple(sorted(structures.items()))


def check_blocks(blocks: Any) -> BlockRules:
    """The rules that the user gave as `blocks`; the defaults for `None`."""
    if blocks is None:
        return BlockRules()
    if not isinstance(blocks, BlockRules):
        raise TypeError(f"{caller()} needs `blocks` to be `BlockRules(...)`, but got `{type(blocks).__name__}`.")
    return blocks
