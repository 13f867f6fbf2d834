"""What an optimiser remembers from step to step."""

import dataclasses
from typing import Any

import equinox as eqx
from jaxtyping import Array, Bool, Int, PyTree

from natgrad._optimiser.momentum import Flat


class State(eqx.Module):
    """What an optimiser remembers: a tree of arrays, to be passed from step to step.

    - `steps`: how many there were.
    - `structure`, `damping`, `rule`, `guard`: what these parts of the optimiser remember.
    - `last`: the last update as a vector; `None` without momentum.
    - `was_rejected`: whether the last step was not taken, or taken back.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    opt = ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares())
    w, batch = jnp.zeros((1, 1)), (jnp.ones((2, 1)), jnp.ones((2, 1)))
    state = opt.init(w, batch)
    assert state.steps == 0 and state.replace(steps=jnp.array(100)).steps == 100
    ```
    """

    steps: Int[Array, ""]
    structure: PyTree
    damping: PyTree
    rule: PyTree
    guard: PyTree
    last: Flat | None
    was_rejected: Bool[Array, ""]

    def replace(self, **changes: Any) -> "State":
        return dataclasses.replace(self, **changes)
