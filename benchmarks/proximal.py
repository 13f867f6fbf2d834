"""What the steps of the proximal family cost, on a network with a thousand parameters.

A perceptron with tanh classifies 200 random points in three classes. The dissimilarity is the mean divergence of its
predictions, and the strength ten. Every step is one compiled program; "next to" is its time over that of a gradient of
the cost, interleaved. The inner iteration of the exact ones is that of BFGS with limited memory, stopped at 200 steps;
the trust region is not among them, since it solves for all parameters with a dense Jacobian.

The decrease of the cost is that of one step, and the residual that of the condition which the step should meet. There
is no mirror step here: units of tanh saturate, so that the dissimilarity is bounded while the linear cost falls
forever, and the step says that it was not found. The proximal point is on its way after 200 steps."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from harness import Program, Table, measure, quantity
from networks import tanh_perceptron

import natgrad as ng

SIZES = (10, 64, 3)
STEPS: dict[str, Callable] = {
    "natural step, damping 0.01": lambda problem, w: ng.natural_step(problem, w, damping=0.01),
    "natural step by conjugate gradients": lambda problem, w: ng.natural_step(
        problem, w, damping=0.01, solver=ng.CG(max_steps=20)
    ),
    "mirror step": lambda problem, w: ng.mirror_step(problem, w, max_steps=200),
    "proximal point": lambda problem, w: ng.proximal_point(problem, w, max_steps=200),
}


def run(advance: Callable[[float], None]) -> Table:
    network, params = tanh_perceptron(SIZES)
    x = jax.random.normal(jax.random.key(1), (200, SIZES[0]))
    y = jnp.argmax(x[:, :3], axis=-1)
    loss = lambda z, y: -ng.Categorical().log_prob(z, y)
    cost = lambda w: jnp.mean(jax.vmap(loss)(network(w, x), y))
    space = ng.FunctionSpace(network, ng.Fisher(ng.Categorical()), x)
    problem = ng.ProximalProblem(cost, space, 10.0)
    programs = {"gradient": Program(jax.grad(cost), (params,))}
    programs |= {name: Program(lambda w, step=step: step(problem, w), (params,)) for name, step in STEPS.items()}
    costs = measure(programs, repeats=5)
    advance(0.8)
    rows, start = [], float(cost(params))
    for name, own in costs.items():
        cells = quantity(own.seconds, "s"), f"{own.seconds / costs['gradient'].seconds:,.0f}"
        found = jax.jit(STEPS[name])(problem, params) if name in STEPS else None
        told = ("-",) * 4
        if found is not None:
            outcome = "successful" if found.result == ng.PROXIMAL_RESULTS.successful else "not to tolerance"
            told = f"{start - found.cost:.3g}", f"{found.residual:.0e}", f"{found.num_steps}", outcome
        rows.append((name, *cells, quantity(own.temporary_bytes, "B"), *told, quantity(own.compile_seconds, "s")))
    advance(0.2)
    columns = ("step", "time", "next to", "temporary", "decrease", "residual", "inner steps", "outcome", "compile")
    return Table(columns, rows)
