"""States in the form in which flax writes them to files."""

import sys
from typing import Any

import jax

from natgrad._optimiser.state import State


def register_with_flax() -> None:
    """Let `flax.serialization` know how to write and read the state of an optimiser, if flax is in use."""
    serialization: Any = sys.modules.get("flax.serialization")
    if serialization is not None:
        serialization.register_serialization_state(State, _to_state_dict, _from_state_dict, override=True)


def _to_state_dict(state: State) -> dict[str, Any]:
    """The arrays of a state, numbered."""
    return {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(state))}


def _from_state_dict(state: State, given: dict[str, Any]) -> State:
    leaves, treedef = jax.tree.flatten(state)
    restored = [given.get(str(number)) for number in range(len(leaves))]
    is_same = [getattr(a, "shape", None) == getattr(b, "shape", None) for a, b in zip(leaves, restored, strict=True)]
    if len(given) != len(leaves) or not all(is_same):
        raise ValueError(
            f"The file holds the state of another optimiser: {len(given)} arrays where {len(leaves)} are needed, or "
            "arrays of other shapes. Use the same model and the same parts of the optimiser as when it was saved."
        )
    return jax.tree.unflatten(treedef, restored)
