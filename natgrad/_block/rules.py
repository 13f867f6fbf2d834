"""What blocks are made of, as the user asks for it."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx

from natgrad._check import caller, public

STRUCTURES = ("kronecker", "eigenvalue-corrected", "dense", "diagonal")


class BlockRules(eqx.Module):
    """What the blocks of a Kronecker-factored metric are made of, for `kfac`, `ekfac`, `KFAC` and `EKFAC`.

    **Arguments:**

    - `sharing`: what to do with the positions of one example that share a weight. `"expand"` takes each for an example
      of its own, right where each has its own term in the loss. `"reduce"` averages inputs and sums cotangents over
      them first, right where they are pooled.
    - `bias`: `"joint"` gives a weight and its bias one block, `"separate"` one each.
    - `structures`: `"kronecker"`, `"eigenvalue-corrected"` (see `ekfac`), `"dense"` or `"diagonal"` for the parameters
      at or below a path.
    - `max_factor`: the largest factor to store. Above it that side of the product is diagonal, or with
      `oversized="blocked"` it is made of blocks that are no larger.
    - `max_dense`: the largest dense block for a parameter that is no weight; larger ones are diagonal.
    - `strict`: whether to refuse a model in which some parameter would get less than its structure, instead of warning.

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
    """Structures by path in a form that can be compared, if there are such structures."""
    if structures is None:
        return ()
    if not isinstance(structures, Mapping):
        raise TypeError(f"{caller()} needs `structures` to map paths to structures, but got {structures!r}.")
    for path, structure in structures.items():
        if structure not in STRUCTURES:
            raise ValueError(f"{caller()} needs a structure among {STRUCTURES} for `{path}`, but got {structure!r}.")
    return tuple(sorted(structures.items()))


def check_blocks(blocks: Any) -> BlockRules:
    """The rules for blocks that were asked for, or those by default."""
    if blocks is None:
        return BlockRules()
    if not isinstance(blocks, BlockRules):
        raise TypeError(f"{caller()} needs `blocks` to be `BlockRules(...)`, but got `{type(blocks).__name__}`.")
    return blocks
