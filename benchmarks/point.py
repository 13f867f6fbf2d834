"""What several metrics cost at one point, together and one by one.

`together` builds a `Point` by `evaluate` and computes K-FAC factors, the diagonal and the squared gradients of the
losses from it; `one by one` gives each of the three functions the model, which then runs three times. Both are one
compiled program. `gradient` is the gradient of the mean loss, for scale, and `kfac` the factors alone.

The models are those of the benchmark of products (an MLP 784-1000-1000-10, batch 512) and a convolutional network
(batch 128). Cotangents are sampled, one draw an example. Single precision.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from harness import Program, Table, measure, quantity
from networks import convolutional
from products import GEOMETRY, Case, perceptron

import natgrad as ng


def run(advance: Callable[[float], None]) -> Table:
    rows = []
    cases = {"MLP": perceptron(), "convolutional": convolutional()}
    for name, case in cases.items():
        costs = measure(programs(case))
        gradient = costs["gradient"]
        for operation, cost in costs.items():
            rows.append(
                (
                    name,
                    f"`{operation}`",
                    quantity(cost.seconds, "s"),
                    f"{cost.seconds / gradient.seconds:.2f}",
                    f"{cost.flops / gradient.flops:.2f}",
                    quantity(cost.temporary_bytes, "B"),
                    quantity(cost.compile_seconds, "s"),
                )
            )
        advance(1 / len(cases))
    header = ("model", "operation", "time", "time / gradient", "flops / gradient", "temporary", "compile")
    return Table(header, rows, [])


def programs(case: Case) -> dict[str, Program]:
    key = jax.random.key(0)
    losses = jax.vmap(lambda z, y: -ng.Categorical().log_prob(z, y))

    def cotangents(z: jax.Array) -> jax.Array:
        return jax.grad(lambda z: jnp.sum(losses(z, case.y)))(z)

    def statistics(squares: Any) -> Any:
        return squares.squared_sum()

    def together(params: Any, x: jax.Array) -> Any:
        point = ng.evaluate(case.model, GEOMETRY, params, x)
        factors, diagonal = ng.kfac(point, key=key), ng.diagonal(point, key=key)
        return factors.operator, diagonal.entries, statistics(ng.per_example(point, cotangents=cotangents))

    def one_by_one(params: Any, x: jax.Array) -> Any:
        factors = ng.kfac(case.model, GEOMETRY, params, x, key=key)
        diagonal = ng.diagonal(case.model, GEOMETRY, params, x, key=key)
        return factors.operator, diagonal.entries, statistics(ng.per_example(case.model, params, x, cotangents))

    def gradient(params: Any, x: jax.Array) -> Any:
        return jax.grad(lambda params: jnp.mean(losses(case.model(params, x), case.y)))(params)

    def kfac(params: Any, x: jax.Array) -> Any:
        return ng.kfac(case.model, GEOMETRY, params, x, key=key).operator

    functions = {"gradient": gradient, "kfac": kfac, "together": together, "one by one": one_by_one}
    return {name: Program(function, (case.params, case.x)) for name, function in functions.items()}
