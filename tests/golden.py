"""Figures that a change of the code's shape must not change, in double precision.

`python tests/golden.py` computes them anew and writes them to `tests/data/golden.json`. Do that only for a change that
is meant to change what users compute, and say so in the changelog."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from zoo import ZOO, classifier, classifier_problem

import natgrad as ng

FILE = Path(__file__).parent / "data" / "golden.json"

STRUCTURES = {"kfac": ng.KFAC, "ekfac": ng.EKFAC, "diagonal": ng.Diagonal, "exact": ng.Exact}
RULES = {
    "quadratic": ng.QuadraticModel,
    "constant": lambda: ng.ConstantStep(0.1),
    "clip": ng.KLClip,
    "trust": ng.TrustRegion,
    "armijo": ng.ArmijoLineSearch,
    "grid": ng.GridLineSearch,
    "validated": ng.CrossValidated,
}
MODELS = ("mlp", "convnet", "transformer_tied", "lstm_scan", "scan_layers", "tied_mixed", "odd", "moe")


def run(structure: str, rule: str) -> dict[str, list[float]]:
    """Losses of ten steps, and the length of what the optimiser ends with."""
    params, batch = classifier_problem()
    opt = ng.NaturalGradient(classifier, ng.Categorical(), STRUCTURES[structure](), step=RULES[rule]())
    state = opt.init(params, batch)
    step = jax.jit(opt.step)
    losses = []
    for k in range(10):
        params, state, info = step(params, state, batch, jax.random.key(k))
        losses.append(float(info.loss))
    return {"losses": losses, "params": [length(params)], "structure": [length(state.structure)]}


def metrics(model: str) -> dict[str, list[float]]:
    """Lengths of metrics, and of natural gradients by them."""
    case = ZOO[model]()
    geometry = ng.Euclidean()
    key = jax.random.key(0)
    x = ng.Batch(case.x, in_axes=case.in_axes)
    gradient = jax.tree.map(
        lambda leaf: jnp.sin(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape), case.params
    )

    def figures(params, gradient):
        kfac = ng.kfac(case.model, geometry, params, x, key=key)
        ekfac = ng.ekfac(case.model, geometry, params, x, key=key)
        diagonal = ng.diagonal(case.model, geometry, params, x)
        gram = ng.gram(case.model, geometry, params, x, key=key)
        inverses = [metric.inverse(0.1).mv(gradient) for metric in (kfac, ekfac)]
        inverses += [kfac.inverse(0.1, factored=True).mv(gradient)]
        return [kfac.diagonal(), ekfac.diagonal(), diagonal.entries, gram, *inverses]

    return {"lengths": [length(tree) for tree in jax.jit(figures)(case.params, gradient)]}


def length(tree) -> float:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return float(np.sqrt(sum(np.sum(np.asarray(leaf, float) ** 2) for leaf in leaves)))


CASES: dict[str, Callable[[], dict[str, list[float]]]] = {
    **{f"{s}-{r}": lambda s=s, r=r: run(s, r) for s in STRUCTURES for r in RULES},
    **{f"metrics-{model}": lambda model=model: metrics(model) for model in MODELS},
}


if __name__ == "__main__":
    with jax.enable_x64(True):
        FILE.write_text(json.dumps({name: case() for name, case in CASES.items()}, indent=1) + "\n")
