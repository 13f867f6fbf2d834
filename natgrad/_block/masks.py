"""Masks over positions, set against the positions of every use of a weight."""

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
    """Masks by the beginning of the paths they are for (`z` for the outputs), zeros and ones."""
    mask, count = batch.mask, batch.size
    if mask is None:
        return {}
    given = dict(mask) if isinstance(mask, Mapping) else {"": mask}
    for name, one in given.items():
        whose = f"`mask[{name!r}]`" if name else "`mask`"
        if not hasattr(one, "shape") or len(one.shape) < 2 or one.shape[0] != count:
            raise ValueError(
                f"{caller()} needs {whose} to be an array with the {count} examples in front and the positions of each "
                f"after them, but got {'shape ' + str(one.shape) if hasattr(one, 'shape') else type(one).__name__}."
            )
        if is_concrete(one) and not np.all((np.asarray(one) == 0) | (np.asarray(one) == 1)):
            raise ValueError(f"{caller()} needs {whose} to hold zeros and ones: a position counts or does not.")
    return {name: jnp.asarray(one) for name, one in given.items()}


def check_masks(masks: Mapping[str, Array], names: Sequence[str], weights: Sequence[str]) -> None:
    """Refuse masks that would do nothing."""
    keys = [key for key in masks if key not in ("", OUTPUTS)]
    check_paths(keys, names, "mask")
    for key in keys:
        if not any(fits(key, name) for name in weights):
            raise ValueError(
                f"{caller()}: `mask[{key!r}]` is for a parameter that is no weight. A bias has the mask of its weight; "
                "other parameters have exact blocks, which only the mask of the outputs, `mask['z']`, changes."
            )


def mask_outputs(masks: Mapping[str, Array], columns: PyTree) -> PyTree:
    """Cotangents of the outputs, an axis of columns in front, with zeros at the positions that do not count.

    Outputs that have no such positions stay as they are."""
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
    has = lambda leaf: leaf.shape[1 : 1 + mask.ndim] == mask.shape
    spread = lambda leaf: mask.reshape(1, *mask.shape, *(1,) * (leaf.ndim - 1 - mask.ndim)).astype(leaf.dtype)
    return jax.tree.map(lambda leaf: leaf * spread(leaf) if has(leaf) else leaf, columns)


def masks_of(masks: Mapping[str, Array], weight: Weight, program: Program) -> Masks:
    """The mask of every use of a weight."""
    name = program.names[weight.leaf]
    mask = option_for({key: mask for key, mask in masks.items() if key != OUTPUTS}, name)
    if mask is None:
        return {}
    members = (*weight.group.lookups, *weight.group.members)
    placed = {member.use.site.number: _placed(mask, member.positions(program.lengths), name) for member in members}
    return {number: one for number, one in placed.items() if one is not None}


def _placed(mask: Array, positions: Sequence[int], name: str) -> Array | None:
    """The mask for positions with the given axes: these, or some that stand together, must be those of the mask."""
    sizes = [size for size in positions if size != 1]
    own = [size for size in mask.shape[1:] if size != 1]
    if not own:
        return jnp.broadcast_to(mask.reshape(len(mask), 1), (len(mask), int(np.prod(sizes, dtype=int))))
    if not sizes:
        return None
    total = int(np.prod(sizes))
    if sizes == [int(np.prod(own))]:
        return mask.reshape(len(mask), total)
    starts = [k for k in range(len(sizes) - len(own) + 1) if sizes[k : k + len(own)] == own]
    if len(starts) != 1:
        how = "in more than one way" if starts else "nowhere"
        raise ValueError(
            f"{caller()}: a mask over positions {tuple(own)} fits the positions {tuple(sizes)} at which `{name}` is "
            f"used {how}. Give it a mask of its own: `mask={{{name!r}: ...}}`."
        )
    before, after = starts[0], len(sizes) - starts[0] - len(own)
    shaped = mask.reshape(len(mask), *(1,) * before, *own, *(1,) * after)
    return jnp.broadcast_to(shaped, (len(mask), *sizes)).reshape(len(mask), total)
