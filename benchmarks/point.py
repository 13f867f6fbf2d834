"""What several metrics cost at one point, together and one by one.

`together` runs the model once by `evaluate` and gives the point to `kfac`, `diagonal` and `gram`; `one by one` gives
each of them the model, which then runs three times. Called outside `jit`, natgrad compiles each call by itself, and
tests the outputs. `gradient` is the compiled gradient of the mean loss, for scale.

The forward pass is a small part of what these statistics cost, so that a point saves a few per cent of the time.
Inside one `jit` it saves nothing: XLA finds equal forward passes by itself, and both programs have the same flops (last
column).

The models are an MLP (784-1000-1000-10, batch size 512), as in the benchmark of products, and a convolutional network
(batch size 128). Cotangents are sampled, one draw an example. Single precision.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from harness import Program, Table, compile_timed, counts, interleaved_times, median_and_quartiles, quantity
from networks import convolutional
from products import GEOMETRY, Case, perceptron

import natgrad as ng

REPEATS = 15


def run(advance: Callable[[float], None]) -> Table:
    rows = []
    cases = {"MLP": perceptron(), "convolutional": convolutional()}
    for name, case in cases.items():
        arguments = case.params, case.x
        functions = {
            "gradient": jax.jit(gradient(case)),
            "together": statistics(case, is_shared=True),
            "one by one": statistics(case, is_shared=False),
        }
        times = interleaved_times({call: (function, arguments) for call, function in functions.items()}, REPEATS)
        seconds = {call: median_and_quartiles(times[call])[0] for call in functions}
        flops = {call: counts(compile_timed(Program(functions[call], arguments))[0])[0] for call in functions}
        for call in functions:
            ratios = f"{seconds[call] / seconds['gradient']:.2f}", f"{flops[call] / flops['gradient']:.2f}"
            rows.append((name, f"`{call}`", quantity(seconds[call], "s"), *ratios))
        advance(1 / len(cases))
    return Table(("model", "calls", "time", "time / gradient", "flops in one program / gradient"), rows)


def gradient(case: Case) -> Callable:
    def mean_loss(params: Any, x: jax.Array) -> jax.Array:
        return -jnp.mean(jax.vmap(ng.Categorical().log_prob)(case.model(params, x), case.y))

    return jax.grad(mean_loss)


def statistics(case: Case, *, is_shared: bool) -> Callable:
    key = jax.random.key(0)

    def calls(params: Any, x: jax.Array) -> Any:
        at: Any = (case.model, GEOMETRY, params, x)
        at = (ng.evaluate(*at),) if is_shared else at
        return ng.kfac(*at, key=key).operator, ng.diagonal(*at, key=key).entries, ng.gram(*at, key=key)

    return calls
