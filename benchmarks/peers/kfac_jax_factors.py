"""What the factors of kfac-jax and their inverses cost, next to a gradient in the same JAX.

Runs in an environment of its own, made from `requirements/kfac-jax.txt`, and prints JSON. The perceptron is
784-1000-1000-10 with ReLU on a batch of 512 in single precision. `factors` is one update of the estimator with its
default mode, `inverses` its cached inverses with factored damping. "compile" is tracing and compiling; the estimator
is also set up, which finds the layers of the model, and that is counted on its own."""

# pyright: reportMissingImports=false

import json
import statistics
import time

import jax
import jax.numpy as jnp
import kfac_jax

REPEATS = 15
SIZES = (784, 1000, 1000, 10)


def model(params, x):
    for k, (w, b) in enumerate(params):
        x = x @ w + b
        x = jax.nn.relu(x) if k < len(params) - 1 else x
    return x


def loss(params, batch):
    x, y = batch
    logits = model(params, x)
    kfac_jax.register_softmax_cross_entropy_loss(logits, y)
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y])


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 2 * len(SIZES))
    params = [
        (jax.random.normal(keys[k], (d, o)) / d**0.5, jnp.zeros(o))
        for k, (d, o) in enumerate(zip(SIZES, SIZES[1:], strict=False))
    ]
    x = jax.random.normal(keys[-1], (512, SIZES[0]))
    batch = x, jax.random.randint(keys[-2], (512,), 0, SIZES[-1])
    cotangents = jax.random.normal(keys[-3], (512, SIZES[-1]))
    rng = jax.random.PRNGKey(0)

    start = time.perf_counter()
    estimator = kfac_jax.BlockDiagonalCurvature(loss, default_estimation_mode="ggn_curvature_prop")
    estimator.finalize((params, batch))
    state = estimator.init(rng, (params, batch), exact_powers_to_cache=None, approx_powers_to_cache=-1)
    spent = {"setup": time.perf_counter() - start}

    def gradient(params, x, cotangents):
        return jax.vjp(lambda params: model(params, x), params)[1](cotangents)[0]

    def factors(state, rng, params, batch):
        return estimator.update_curvature_matrix_estimate(state, 0.95, 1.0, 0.0, 512, rng, (params, batch))

    def inverses(state):
        return estimator.update_cache(
            state, 1e-3, exact_powers=None, approx_powers=-1, eigenvalues=False, pmap_axis_name=None
        )

    programs = {
        "gradient": (gradient, (params, x, cotangents)),
        "factors": (factors, (state, rng, params, batch)),
        "inverses": (inverses, (state,)),
    }
    compiled = {}
    for name, (function, arguments) in programs.items():
        start = time.perf_counter()
        compiled[name] = jax.jit(function).lower(*arguments).compile()
        spent[name] = time.perf_counter() - start
    state = compiled["factors"](state, rng, params, batch)
    runs = {name: arguments for name, (_, arguments) in programs.items()}
    runs |= {"factors": (state, rng, params, batch), "inverses": (state,)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, arguments in runs.items():
            jax.block_until_ready(compiled[name](*arguments))
            start = time.perf_counter()
            jax.block_until_ready(compiled[name](*arguments))
            times[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(own) for name, own in times.items()}
    ratios = {name: seconds[name] / seconds["gradient"] for name in ("factors", "inverses")}
    print(json.dumps({"seconds": seconds, "ratios": ratios, "compile": spent, "version": kfac_jax.__version__}))


if __name__ == "__main__":
    main()
