"""Masks over positions: check the user's, and find the mask of every use of a weight.

A mask is an array of zeros and ones `N positions ...`. It is given for all parameters, or by path; the path `z` stands
for the outputs."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from natgrad._block.weight_factors import Masks
from natgrad._check import caller, is_concrete
from natgrad._point.batch import Batch
from natgrad._program.trace import Program
from natgrad._tree import check_paths, fits, option_for
from natgrad._uses.layers import Weight

OUTPUTS = "z"


def check_mask(batch: Batch) -> dict[str, Array]:
    """Masks by path, from the `mask` of a batch."""
    mask, count = batch.mask, batch.size
    if mask is None:
        return {}
    masks = dict(mask) if isinstance(mask, Mapping) else {"": mask}
    for path, array in masks.items():
        argument = f"`mask[{path!r}]`" if path else "`mask`"
        if not hasattr(array, "shape") or len(array.shape) < 2 or array.shape[0] != count:
            kind = f"shape {array.shape}" if hasattr(array, "shape") else type(array).__name__
            raise ValueError(
                f"{caller()} needs {argument} to be an array with the {count} examples in front and the positions of "
                f"each after them, but got {kind}."
            )
        if is_concrete(array) and not np.all((np.asarray(array) == 0) | (np.asarray(array) == 1)):
            raise ValueError(f"{caller()} needs {argument} to hold zeros and ones: a position counts or does not.")
    return {path: jnp.asarray(array) for path, array in masks.items()}


def check_masks(masks: Mapping[str, Array], names: Sequence[str], weights: Sequence[str]) -> None:
    """Refuse masks for parameters that are no weights: they would have no effect."""
    keys = [key for key in masks if key not in ("", OUTPUTS)]
    check_paths(keys, names, "mask")
    for key in keys:
        if not any(fits(key, name) for name in weights):
            raise ValueError(
                f"{caller()}: `mask[{key!r}]` is for a parameter that is no weight. A bias has the mask of its weight; "
                "other parameters have exact blocks, which only the mask of the outputs, `mask['z']`, changes."
            )


def mask_outputs(masks: Mapping[str, Array], columns: PyTree) -> PyTree:
    """Set the cotangents `C N ...` of the outputs to zero at masked positions.

    Outputs whose shape does not begin with the shape of the mask stay as they are."""
    mask = masks.get(OUTPUTS, masks.get(""))
    if mask is None:
        return columns
    shapes = [leaf.shape[1:] for leaf in jax.tree.leaves(columns)]
    if OUTPUTS in masks and not any(shape[: mask.ndim] == mask.shape for shape in shapes):
        raise ValueError(f"{caller()}: `mask['z']` of shape {mask.shape} fits no output; their shapes are {shapes}.")
    if OUTPUTS not in masks and mask.shape in shapes:
        raise ValueError(
            f"{caller()}: an output has the shape {mask.shape} of the mask, but are its last entries positions or "
            "something else? Say `mask={'params': mask, 'z': mask}` if they are, and `mask={'params': mask}` if not."
        )

    def apply_mask(leaf: Array) -> Array:
        if leaf.shape[1 : 1 + mask.ndim] != mask.shape:
            return leaf
        return leaf * mask.reshape(1, *mask.shape, *(1,) * (leaf.ndim - 1 - mask.ndim)).astype(leaf.dtype)

    return jax.tree.map(apply_mask, columns)


def masks_of(masks: Mapping[str, Array], weight: Weight, program: Program) -> Masks:
    """The mask `n t` of every use of a weight, by the number of its site; uses without a mask are left out."""
    name = program.names[weight.leaf]
    mask = option_for({key: mask for key, mask in masks.items() if key != OUTPUTS}, name)
    if mask is None:
        return {}
    members = (*weight.group.lookups, *weight.group.members)
    by_site = {member.use.site.number: _spread(mask, member.positions(program.lengths), name) for member in members}
    return {number: site_mask for number, site_mask in by_site.items() if site_mask is not None}


def _spread(mask: Array, positions: Sequence[int], name: str) -> Array | None:
    """The mask `n t` over positions of the given sizes; `None` for a use at one position, which is never masked.

    The sizes of the mask must be consecutive sizes of the positions; along the others it is repeated."""
    sizes = [size for size in positions if size != 1]
    mask_sizes = [size for size in mask.shape[1:] if size != 1]
    if not mask_sizes:
        return jnp.broadcast_to(mask.reshape(len(mask), 1), (len(mask), int(np.prod(sizes, dtype=int))))
    if not sizes:
        return None
    total = int(np.prod(sizes))
    if sizes == [int(np.prod(mask_sizes))]:
        return mask.reshape(len(mask), total)
    last_start = len(sizes) - len(mask_sizes)
    starts = [start for start in range(last_start + 1) if sizes[start : start + len(mask_sizes)] == mask_sizes]
    if len(starts) != 1:
        how = "in more than one way" if starts else "nowhere"
        raise ValueError(
            f"{caller()}: a mask over positions {tuple(mask_sizes)} fits the positions {tuple(sizes)} at which "
            f"`{name}` is used {how}. Give it a mask of its own: `mask={{{name!r}: ...}}`."
        )
    aligned = mask.reshape(len(mask), *(1,) * starts[0], *mask_sizes, *(1,) * (last_start - starts[0]))
    return jnp.broadcast_to(aligned, (len(mask), *sizes)).reshape(len(mask), total)
