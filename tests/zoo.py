"""Small models that use their parameters in as many ways as there are, to compare what is known of the gradients of
single examples with the gradients themselves.

Models obey strict promotion of dtypes and ranks, except inside the layers of other libraries."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from models import normal


class ZooCase(NamedTuple):
    """A model, its parameters and a small batch."""

    model: Callable  # model(params, x) -> z, the axis of the batch leading in each output
    params: Any
    x: Any
    in_axes: Any = 0  # where the axis of the batch is in `x`, as for `jax.vmap`


def integers(seed: int, low: int, high: int, *shape: int) -> jax.Array:
    """Integers from `low` to below `high`: tokens, indices, bits."""
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, size=shape).astype(jnp.result_type(int)))


def filled(shapes, seed: int = 100):
    """Parameters of the given shapes, whatever the initialiser of a library would have made of them."""
    leaves, structure = jax.tree.flatten(shapes)
    return jax.tree.unflatten(structure, [normal(seed + i, *leaf.shape) for i, leaf in enumerate(leaves)])


@contextlib.contextmanager
def users_defaults():
    """Other libraries promote dtypes and ranks, as JAX does unless told otherwise."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def along(vector, x):
    """The vector as an array of the rank of `x`, along its last axis."""
    return lax.expand_dims(vector, range(x.ndim - 1))


def affine(x, w, b):
    y = x @ w
    return y + along(b, y)


def classifier(params, x):
    """Two layers, for the laws of the optimiser."""
    hidden = jnp.tanh(affine(x, **params["first"]))
    return affine(hidden, **params["second"])


@functools.cache
def classifier_problem():
    """Parameters of the classifier and a batch of inputs and labels."""
    params = {
        "first": {"w": normal(1, 3, 4), "b": 0.1 * normal(2, 4)},
        "second": {"w": normal(3, 4, 3), "b": 0.1 * normal(4, 3)},
    }
    return params, (normal(5, 12, 3), integers(6, 0, 3, 12))


@functools.cache
def libraries():
    """A perceptron with one hidden layer and the same weights in every library of networks, and a batch."""
    import haiku as hk
    from flax import linen, nnx

    w, b, v, c = normal(2, 4, 5), normal(3, 5), normal(4, 5, 3), normal(5, 3)
    flax = linen.Sequential([linen.Dense(5), jnp.tanh, linen.Dense(3)])
    haiku = hk.without_apply_rng(
        hk.transform(lambda x: hk.Linear(3, name="last")(jnp.tanh(hk.Linear(5, name="first")(x))))
    )
    equinox = eqx.nn.MLP(4, 3, 5, 1, jnp.tanh, key=jax.random.key(0))
    equinox = eqx.tree_at(
        lambda m: [leaf for layer in m.layers for leaf in (layer.weight, layer.bias)], equinox, [w.T, b, v.T, c]
    )
    parts, static = eqx.partition(equinox, eqx.is_array)
    layers = nnx.Sequential(nnx.Linear(4, 5, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(5, 3, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(layers)
    given = iter([b, w, c, v])
    state = jax.tree.map(lambda leaf: next(given), state)
    models = {
        "plain": (lambda p, x: affine(jnp.tanh(affine(x, *p[0])), *p[1]), [(w, b), (v, c)]),
        "flax": (
            flax.apply,
            {"params": {f"layers_{k}": {"kernel": a, "bias": d} for k, a, d in ((0, w, b), (2, v, c))}},
        ),
        "nnx": (lambda p, x: nnx.merge(graph, p)(x), state),
        "haiku": (haiku.apply, {"first": {"w": w, "b": b}, "last": {"w": v, "b": c}}),
        "equinox": (lambda p, x: jax.vmap(eqx.combine(p, static))(x), parts),
    }
    return models, normal(1, 6, 4)


def layer_norm(x, scale, shift):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    normalised = centred * lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)
    return normalised * along(scale, x) + along(shift, x)


# Layers one after the other.


def mlp():
    params = [
        {"w": normal(1, 5, 7), "b": normal(2, 7)},
        {"w": normal(3, 7, 6), "b": normal(4, 6)},
        {"w": normal(5, 6, 3), "b": normal(6, 3)},
    ]

    def model(params, x):
        first, second, last = params
        x = jax.nn.gelu(affine(x, **first))
        x = jax.nn.relu(affine(x, **second))
        return affine(x, **last)

    return ZooCase(model, params, normal(7, 5, 5))


def convnet():
    """Convolutions of every kind: padded, then grouped with a stride, then depthwise with holes."""
    params = {
        "kernel": normal(1, 3, 3, 2, 6),
        "bias": normal(2, 6),
        "grouped": normal(3, 3, 3, 3, 8),
        "grouped_bias": normal(4, 8),
        "depthwise": normal(5, 3, 3, 1, 8),
        "head": {"w": normal(6, 8 * 2 * 2, 4), "b": normal(7, 4)},
    }
    convolve = functools.partial(lax.conv_general_dilated, padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def model(params, x):
        x = convolve(x, params["kernel"], (1, 1))
        x = jax.nn.relu(x + along(params["bias"], x))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = convolve(x, params["grouped"], (2, 2), feature_group_count=2)
        x = jax.nn.relu(x + along(params["grouped_bias"], x))
        x = convolve(x, params["depthwise"], (1, 1), feature_group_count=8, rhs_dilation=(2, 2))
        return affine(x.reshape(x.shape[0], -1), **params["head"])

    return ZooCase(model, params, normal(8, 5, 8, 8, 2))


def conv_nchw_transpose():
    """Channels before space, as in other frameworks, and a transposed convolution, that is one with a dilated input."""
    params = {"kernel": normal(1, 5, 3, 3, 3), "transposed": normal(2, 3, 3, 5, 4)}

    def model(params, x):
        x = lax.conv_general_dilated(
            x, params["kernel"], (2, 2), [(1, 1), (1, 1)], dimension_numbers=("NCHW", "OIHW", "NCHW")
        )
        x = jnp.transpose(jnp.tanh(x), (0, 2, 3, 1))
        return jnp.mean(lax.conv_transpose(x, params["transposed"], (2, 2), "SAME"), axis=(1, 2))

    return ZooCase(model, params, normal(3, 4, 3, 6, 6))


def conv1d3d():
    """Convolutions in one dimension and, of the same numbers reshaped, in three."""
    params = {"line": normal(1, 3, 2, 4), "line_bias": normal(2, 4), "space": normal(3, 2, 2, 2, 1, 3)}

    def model(params, x):
        x = lax.conv_general_dilated(x, params["line"], (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        x = jnp.tanh(x + along(params["line_bias"], x)).reshape(x.shape[0], 2, 3, 4, 1)
        x = lax.conv_general_dilated(
            x, params["space"], (1, 1, 1), "VALID", dimension_numbers=("NDHWC", "DHWIO", "NDHWC")
        )
        return jnp.sum(x**2, axis=(1, 2, 3))

    return ZooCase(model, params, normal(4, 5, 12, 2))


def transformer(tied: bool):
    """A causal block between an embedding and a head. Tied: the head is the embedding. Otherwise the head is its own,
    and the block is recomputed in the backward pass."""
    vocabulary, width, length, heads = 7, 6, 4, 2
    params = {
        "embedding": normal(1, vocabulary, width),
        "position": normal(2, length, width),
        "attention_norm": {"scale": normal(3, width), "shift": normal(4, width)},
        "qkv": {"w": normal(5, width, 3 * width), "b": normal(6, 3 * width)},
        "attention_out": normal(7, width, width),
        "mlp_norm": {"scale": normal(8, width), "shift": normal(9, width)},
        "mlp_in": {"w": normal(10, width, 8), "b": normal(11, 8)},
        "mlp_out": {"w": normal(12, 8, width), "b": normal(13, width)},
    }
    if not tied:
        params["head"] = normal(14, width, vocabulary)
    causal = np.tril(np.ones((length, length), bool))

    def block(params, x):
        qkv = affine(layer_norm(x, **params["attention_norm"]), **params["qkv"])
        split_heads = lambda a: a.reshape(x.shape[0], length, heads, width // heads)
        q, k, v = (split_heads(a) for a in jnp.split(qkv, 3, axis=-1))
        scores = jnp.einsum("nthd,nshd->nhts", q, k) / (width // heads) ** 0.5
        weights = jax.nn.softmax(jnp.where(causal[None, None], scores, -1e9), axis=-1)
        mixed = jnp.einsum("nhts,nshd->nthd", weights, v).reshape(x.shape)
        x = x + mixed @ params["attention_out"]
        hidden = jax.nn.gelu(affine(layer_norm(x, **params["mlp_norm"]), **params["mlp_in"]))
        return x + affine(hidden, **params["mlp_out"])

    def tied_model(params, tokens):
        x = jnp.take(params["embedding"], tokens, axis=0) + params["position"][None]
        return block(params, x) @ params["embedding"].T

    def untied_model(params, tokens):
        x = params["embedding"][tokens] + params["position"][None]
        return jax.checkpoint(block)(params, x) @ params["head"]

    return ZooCase(tied_model if tied else untied_model, params, integers(15, 0, vocabulary, 4, length))


# Loops, over time and over layers.


def lstm_scan():
    """The state at the start is a parameter, and there are two outputs: at the end and all along."""
    width, length = 4, 5
    params = {
        "in": normal(1, 3, 4 * width),
        "state": normal(2, width, 4 * width),
        "bias": normal(3, 4 * width),
        "start": normal(4, width),
        "out": normal(5, width, 3),
    }

    def model(params, x):
        def cell(state, inputs):
            h, c = state
            gates = inputs @ params["in"] + h @ params["state"] + params["bias"][None, :]
            write, keep, content, read = jnp.split(gates, 4, axis=-1)
            c = jax.nn.sigmoid(keep) * c + jax.nn.sigmoid(write) * jnp.tanh(content)
            h = jax.nn.sigmoid(read) * jnp.tanh(c)
            return (h, c), h

        shape = (x.shape[0], width)
        start = (jnp.broadcast_to(params["start"], shape), jnp.zeros(shape, x.dtype))
        (h, _), along_time = lax.scan(cell, start, jnp.swapaxes(x, 0, 1))
        return h @ params["out"], jnp.swapaxes(along_time, 0, 1)

    return ZooCase(model, params, normal(6, 4, length, 3))


def rnn_unrolled():
    """The same weights at every time, each time an operation of its own."""
    params = {"in": normal(1, 3, 5), "state": normal(2, 5, 5), "bias": normal(3, 5)}

    def model(params, x):
        h = jnp.zeros((x.shape[0], 5), x.dtype)
        for t in range(x.shape[1]):
            h = jnp.tanh(x[:, t] @ params["in"] + h @ params["state"] + params["bias"][None, :])
        return h

    return ZooCase(model, params, normal(4, 4, 4, 3))


def scan_layers(remat: bool = False, reverse: bool = False):
    """Stacked layers that also share a weight, at several positions of each example. The loop stacks a sum over the
    batch that nobody uses."""
    depth, width, hidden = 3, 4, 6
    params = {
        "in": normal(1, 3, width),
        "layers": {
            "gain": normal(2, depth, width),
            "w": normal(3, depth, width, hidden),
            "b": normal(4, depth, hidden),
            "v": normal(5, depth, hidden, width),
        },
        "shared": normal(6, width, width),
    }

    def model(params, x):
        def layer(x, own):
            y = jnp.tanh(affine(x * along(own["gain"], x), own["w"], own["b"])) @ own["v"]
            return x + y @ params["shared"], jnp.sum(y)

        step = jax.checkpoint(layer) if remat else layer
        return lax.scan(step, x @ params["in"], params["layers"], reverse=reverse)[0]

    return ZooCase(model, params, normal(7, 4, 5, 3))


def deep_remat():
    """Residual blocks with a normalisation, recomputed in the backward pass of a scan over stacked layers."""
    depth, width, hidden = 3, 4, 6
    params = {
        "norm": {"scale": normal(1, depth, width), "shift": normal(2, depth, width)},
        "in": {"w": normal(3, depth, width, hidden), "b": normal(4, depth, hidden)},
        "out": {"w": normal(5, depth, hidden, width), "b": normal(6, depth, width)},
    }

    def model(params, x):
        @jax.checkpoint
        def block(x, own):
            hidden = jax.nn.gelu(affine(layer_norm(x, **own["norm"]), **own["in"]))
            return x + affine(hidden, **own["out"]), None

        return lax.scan(block, x, params)[0]

    return ZooCase(model, params, normal(7, 4, 5, width))


def fori_layers():
    """Stacked layers, taken from the stack by index."""
    params = {"w": normal(1, 3, 5, 5), "b": normal(2, 3, 5)}

    def model(params, x):
        return lax.fori_loop(0, 3, lambda i, x: jnp.tanh(affine(x, params["w"][i], params["b"][i])), x)

    return ZooCase(model, params, normal(3, 5, 5))


def carry_params():
    """The parameters travel through the loop in its state."""
    params = {"w": normal(1, 5, 5), "b": normal(2, 5)}

    def model(params, x):
        layer = lambda _, state: (state[0], jnp.tanh(affine(state[1], **state[0])))
        return lax.fori_loop(0, 3, layer, (params, x))[1]

    return ZooCase(model, params, normal(3, 5, 5))


def nested_scan():
    """A scan over stacked recurrent layers, each a scan over time."""
    depth, width, length = 2, 4, 5
    params = {
        "in": normal(1, depth, width, width),
        "state": normal(2, depth, width, width),
        "start": normal(3, depth, width),
    }

    def model(params, x):
        def layer(sequence, own):
            def cell(h, inputs):
                h = jnp.tanh(inputs @ own["in"] + h @ own["state"])
                return h, h

            start = jnp.broadcast_to(own["start"], (x.shape[0], width))
            return lax.scan(cell, start, sequence)[1], None

        return lax.scan(layer, jnp.swapaxes(x, 0, 1), params)[0][-1]

    return ZooCase(model, params, normal(4, 4, length, width))


def tied_scan():
    """A weight used before a loop, transposed inside it, and in a loop over the batch itself; a stack of weights used
    both by a loop and by a slice."""
    params = {"w": normal(1, 4, 4), "stack": normal(2, 3, 4, 4), "start": normal(3, 4)}

    def model(params, x):
        sequence = jnp.swapaxes(x @ params["w"], 0, 1)
        start = jnp.zeros(sequence.shape[1:], x.dtype) + params["start"][None, :]
        h, _ = lax.scan(lambda h, inputs: (jnp.tanh(h @ params["w"].T + inputs), None), start, sequence)
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["stack"])
        return h @ params["stack"][0] + lax.map(lambda row: row @ params["w"], h)

    return ZooCase(model, params, normal(4, 4, 3, 4))


# Branches and choices.


def cond_data():
    """A branch for each example, which `vmap` makes a selection."""
    params = {"a": normal(1, 4, 4), "b": normal(2, 4, 4), "shift": normal(3, 4), "scale": normal(4)}

    def one(params, x):
        positive = lambda x: jnp.tanh(x @ params["a"]) * params["scale"]
        negative = lambda x: jnp.tanh(x @ params["b"]) + params["shift"]
        return lax.cond(x[0] > 0, positive, negative, x) @ params["a"]

    return ZooCase(jax.vmap(one, in_axes=(None, 0)), params, normal(5, 6, 4))


def cond_param():
    """A branch for the whole batch, chosen by a parameter that one of the branches also uses."""
    params = {"a": normal(1, 4, 4), "b": normal(2, 4, 4), "shift": normal(3, 4)}

    def model(params, x):
        shifted = lambda x: jnp.tanh(affine(x, params["b"], params["shift"]))
        plain = lambda x: jnp.tanh(x @ params["a"])
        return lax.cond(params["shift"][0] > 0, shifted, plain, x) @ params["a"]

    return ZooCase(model, params, normal(4, 6, 4))


def moe():
    """Each example takes the weight of its best expert from the stack; a second layer mixes all experts."""
    params = {"router": normal(1, 4, 3), "best": normal(2, 3, 4, 4), "all": normal(3, 3, 4, 4)}

    def model(params, x):
        gates = jax.nn.softmax(x @ params["router"], axis=-1)
        best = jnp.argmax(gates, axis=-1)
        chosen = jnp.einsum("nd,ndo->no", x, params["best"][best])
        chosen = chosen * jnp.take_along_axis(gates, best[:, None], axis=1)
        return jnp.tanh(chosen) + jnp.einsum("nd,edo,ne->no", x, params["all"], gates)

    return ZooCase(model, params, normal(4, 5, 4))


def dropout_keys():
    """Every example brings its own random key."""
    params = {"w": normal(1, 4, 8), "b": normal(2, 8), "v": normal(3, 8, 3)}

    def one(params, x):
        points, key = x
        hidden = jax.nn.relu(affine(points, params["w"], params["b"]))
        kept = jax.random.bernoulli(key, np.float32(0.5), hidden.shape)  # the same draws in either precision
        return jnp.where(kept, 2 * hidden, 0.0) @ params["v"]

    keys = jnp.asarray(np.random.default_rng(4).integers(2**32, size=(5, 2), dtype=np.uint32))
    return ZooCase(jax.vmap(one, in_axes=(None, 0)), params, (normal(5, 5, 4), keys))


def masked_lookup():
    """Indices outside of the table: read as zeros, read as the nearest row, or counted from the end."""
    params = {"filled": normal(1, 5, 3), "clipped": normal(2, 5, 3), "taken": normal(3, 5, 3), "out": normal(4, 3, 2)}

    def model(params, x):
        filled = params["filled"].at[x["outside"]].get(mode="fill", fill_value=0)
        clipped = params["clipped"].at[x["outside"]].get(mode="clip")
        taken = jnp.take(params["taken"], x["from_end"], axis=0)
        return jnp.tanh(filled + clipped * taken) @ params["out"]

    x = {"outside": integers(5, -9, 9, 4, 6), "from_end": integers(6, -5, 5, 4, 6)}
    return ZooCase(model, params, x)


# Unusual uses of a weight.


@jax.custom_vjp
def straight_through(x, w):
    """A layer whose derivative is, on purpose, that of something else: the rule has to be used, not the function."""
    return jnp.tanh(x @ w)


straight_through.defvjp(
    lambda x, w: (straight_through(x, w), (x, w)),
    lambda inputs, g: (0.5 * g @ inputs[1].T, 3.0 * inputs[0].T @ g),
)


def odd():
    """Weights that are computed from parameters, parameters that meet no data or the data more than once, and one that
    is not used at all."""
    params = {
        "direction": normal(1, 5, 4),
        "length": normal(2, 4),
        "frozen": normal(3, 5, 4),
        "low": normal(4, 5, 2),
        "rank": normal(5, 2, 4),
        "pruned": normal(6, 5, 4),
        "custom": normal(7, 4, 4),
        "queries": normal(8, 3, 5),
        "query_weight": normal(9, 5, 4),
        "temperature": normal(10),
        "fused": normal(11, 12, 4),
        "powers": normal(12, 4),
        "log_std": normal(13, 2),
        "unused": normal(14, 3),
    }
    mask = integers(15, 0, 2, 5, 4)

    def model(params, x):
        norms = jnp.linalg.norm(params["direction"], axis=0, keepdims=True)
        y = x @ (params["length"][None, :] * params["direction"] / norms)
        y = y + x @ (params["frozen"] + params["low"] @ params["rank"])
        y = y + x @ (params["pruned"] * mask.astype(x.dtype)) / 5**0.5
        y = straight_through(y, params["custom"])

        queries = params["queries"] @ params["query_weight"]
        y = y + jnp.exp(params["temperature"]) * (jax.nn.softmax(y @ queries.T, axis=-1) @ queries)

        first, second, third = jnp.split(params["fused"], 3)
        y = jnp.tanh(y @ first) @ second + y @ third.T

        powers = params["powers"][None, :]
        y = y**2 * powers + jnp.sin(y * powers) + jnp.maximum(y, powers) - lax.stop_gradient(powers)
        return y, jnp.broadcast_to(params["log_std"], (x.shape[0], 2))

    return ZooCase(model, params, normal(16, 6, 5))


def tied_mixed():
    """A weight used in both directions, and a table that is looked up twice, multiplied by, and is the head."""
    params = {"table": normal(1, 6, 4), "w": normal(2, 4, 4)}

    def model(params, tokens):
        x = params["table"][tokens]
        x = jnp.tanh(x @ params["w"]) @ params["w"].T
        x = x + jax.nn.softmax(x @ params["table"].T, axis=-1) @ params["table"]
        x = x + params["table"][tokens[:, ::-1]]
        return x @ params["table"].T

    return ZooCase(model, params, integers(3, 0, 6, 4, 5))


def weight_in_elementwise():
    """A dense layer without a product of matrices, and a parameter that is summed and sorted."""
    params = {"w": normal(1, 5, 4), "k": normal(2, 3, 4)}

    def model(params, x):
        y = jnp.sum(x[:, :, None] * params["w"][None], axis=1)
        return jnp.cumsum(y, axis=1) * jnp.sum(params["k"], axis=0)[None] + jnp.sort(params["k"][0])[None]

    return ZooCase(model, params, normal(3, 4, 5))


def batched_einsum():
    """Products with axes that are neither the batch's nor summed, of three arrays, and with the weight on the left."""
    params = {
        "heads": normal(1, 2, 3, 3),
        "mixture": normal(2, 4, 6, 5),
        "gates": normal(3, 6, 4),
        "transposed": normal(4, 3, 5),
        "left": normal(5, 2, 3),
    }

    def model(params, x):
        x = jnp.tanh(jnp.einsum("nhd,hde->nhe", x, params["heads"])).reshape(x.shape[0], 6)
        x = jnp.tanh(jnp.einsum("nd,edo,ne->no", x, params["mixture"], x @ params["gates"]))
        x = jnp.tanh(x @ params["transposed"].T)
        return jax.vmap(lambda row: params["left"] @ row)(x)

    return ZooCase(model, params, normal(6, 5, 2, 3))


def shared_input():
    """Part of the input is the same for every example."""
    params = {"w": normal(1, 3, 4), "mix": normal(2, 4, 3), "v": normal(3, 4, 2)}

    def model(params, x):
        points, matrix = x
        hidden = jnp.tanh(points @ matrix @ params["w"])
        return jnp.tanh(hidden @ (params["mix"] @ matrix.T)) @ params["v"]

    return ZooCase(model, params, (normal(4, 5, 4), normal(5, 4, 3)), in_axes=(0, None))


def tree_output():
    """Outputs of several ranks, among them one number for each example."""
    params = {"w": normal(1, 4, 6), "b": normal(2, 6), "energy": normal(3, 6), "table": normal(4, 3, 2)}

    def model(params, x):
        hidden = jnp.tanh(affine(x, params["w"], params["b"]))
        return {
            "energy": hidden @ params["energy"],
            "vector": hidden[:, :3] @ params["table"],
            "matrix": hidden.reshape(x.shape[0], 2, 3) * params["table"].T[None],
        }

    return ZooCase(model, params, normal(5, 5, 4))


# Derivatives, solvers and foreign code inside the model.


def pinn():
    """The residual of a differential equation: first and second derivatives of a network by its input."""
    params = [
        {"w": normal(1, 2, 6), "b": normal(2, 6)},
        {"w": normal(3, 6, 6), "b": normal(4, 6)},
        {"w": normal(5, 6, 1), "b": normal(6, 1)},
    ]

    def residual(params, x):
        def u(x):
            first, second, last = params
            hidden = jnp.tanh(affine(jnp.tanh(affine(x, **first)), **second))
            return affine(hidden, **last)[0]

        return jnp.stack([jnp.trace(jax.hessian(u)(x)) + u(x) ** 3, jax.grad(u)(x)[0]])

    return ZooCase(jax.vmap(residual, in_axes=(None, 0)), params, normal(7, 6, 2))


def equilibrium_cell(w, x, z):
    return jnp.tanh(z @ w / 6 + x)


@jax.custom_vjp
def equilibrium(w, x):
    """The fixed point of the cell in `z`, for as many iterations as it takes."""
    tolerance = 4 * float(jnp.finfo(x.dtype).eps)

    def moving(state):
        z, previous, count = state
        return (jnp.max(jnp.abs(z - previous)) > tolerance) & (count < 200)

    def step(state):
        z, _, count = state
        return equilibrium_cell(w, x, z), z, count + 1

    return lax.while_loop(moving, step, (jnp.zeros_like(x), jnp.ones_like(x), 0))[0]


def equilibrium_forward(w, x):
    z = equilibrium(w, x)
    return z, (w, x, z)


def equilibrium_backward(solution, g):
    w, x, z = solution
    pull_z = jax.vjp(lambda z: equilibrium_cell(w, x, z), z)[1]
    u = lax.fori_loop(0, 60, lambda _, u: g + pull_z(u)[0], g)
    return jax.vjp(lambda w, x: equilibrium_cell(w, x, z), w, x)[1](u)


equilibrium.defvjp(equilibrium_forward, equilibrium_backward)


def deq_opaque():
    """A fixed point, which has a derivative by the implicit function theorem only."""
    params = {"in": normal(1, 3, 5), "w": normal(2, 5, 5), "out": normal(3, 5, 2)}
    model = lambda params, x: equilibrium(params["w"], x @ params["in"]) @ params["out"]
    return ZooCase(model, params, normal(4, 4, 3))


@jax.custom_vjp
def foreign_matmul(x, w):
    """A product that is computed outside of JAX."""
    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    multiply = lambda x, w: np.matmul(np.asarray(x), np.asarray(w))
    return jax.pure_callback(multiply, shape, x, w, vmap_method="broadcast_all")


foreign_matmul.defvjp(
    lambda x, w: (foreign_matmul(x, w), (x, w)),
    lambda inputs, g: (g @ inputs[1].T, inputs[0].T @ g),
)


def custom_kernel():
    """A dense layer that is not differentiable but by its own rule."""
    params = {"w": normal(1, 4, 5), "b": normal(2, 5), "v": normal(3, 5, 2)}

    def model(params, x):
        hidden = jnp.tanh(foreign_matmul(x, params["w"]) + params["b"][None, :])
        return hidden @ params["v"]

    return ZooCase(model, params, normal(4, 5, 4))


def shard_mapped():
    """A layer that is spread over the devices of a mesh, of which there is one: the batch divided, weights repeated."""
    params = {"inside": {"w": normal(1, 4, 5), "b": normal(2, 5)}, "outside": normal(3, 5, 2)}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("batch",))
    divided, repeated = PartitionSpec("batch"), PartitionSpec()
    layer = jax.shard_map(affine, mesh=mesh, in_specs=(divided, repeated, repeated), out_specs=divided)

    def model(params, x):
        return jnp.tanh(layer(x, params["inside"]["w"], params["inside"]["b"])) @ params["outside"]

    return ZooCase(model, params, normal(4, 5, 4))


# Models in other libraries. Those that the package itself does not need are imported where they are used.


@users_defaults()
def flax_case(network, x):
    shapes = jax.eval_shape(lambda: network.init(jax.random.key(0), x))
    return ZooCase(users_defaults()(network.apply), filled(shapes), x)


def flax_linen():
    """Convolution, pooling, normalisation and attention of Flax."""
    from flax import linen as nn

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(4, (3, 3))(x))
            x = nn.LayerNorm()(nn.avg_pool(x, (2, 2), (2, 2)))
            x = x.reshape(x.shape[0], -1, 4)
            x = nn.MultiHeadDotProductAttention(num_heads=2)(x, x)
            return nn.Dense(3)(jnp.mean(x, axis=1))

    return flax_case(Network(), normal(1, 4, 4, 4, 2))


def flax_linen_rnn():
    """Recurrent cells of Flax, whose gates are parameters of their own."""
    from flax import linen as nn

    dtype = jnp.result_type(float)

    class Network(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(7, 3, param_dtype=dtype)(tokens)
            x = nn.RNN(nn.LSTMCell(4, param_dtype=dtype))(x)
            x = nn.RNN(nn.GRUCell(4, param_dtype=dtype))(x)
            return nn.Dense(2, param_dtype=dtype)(x[:, -1])

    return flax_case(Network(), integers(1, 0, 7, 4, 5))


def flax_linen_scan_remat():
    """Stacked layers by the scan of Flax, recomputed in the backward pass."""
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(4)(nn.relu(nn.Dense(6)(nn.LayerNorm()(x)))), None

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return nn.Dense(2)(layers()(x, None)[0])

    return flax_case(Network(), normal(1, 4, 4))


@users_defaults()
def flax_nnx():
    """Modules of Flax that hold their parameters, and an embedding that is also a head."""
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs):
            own = {"param_dtype": jnp.result_type(float), "rngs": rngs}
            self.embed = nnx.Embed(7, 4, **own)
            self.norm = nnx.LayerNorm(4, **own)
            # Without a rate of dropout, even one that is switched off, the softmax would be in float32.
            dropout = {"dropout_rate": 0.5, "deterministic": True}
            self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=4, decode=False, **dropout, **own)
            self.out = nnx.Linear(4, 3, **own)

        def __call__(self, tokens):
            x = self.embed(tokens)
            x = x + self.attention(self.norm(x))
            return jnp.mean(self.out(x), axis=1), self.embed.attend(x)

    abstract = nnx.eval_shape(lambda: Network(nnx.Rngs(0)))
    graph, shapes, rest = nnx.split(abstract, nnx.Param, ...)
    model = lambda params, tokens: nnx.merge(graph, params, rest)(tokens)
    return ZooCase(users_defaults()(model), filled(shapes), integers(1, 0, 7, 4, 5))


@users_defaults()
def equinox_case(build: Callable, x):
    """A module of Equinox, which is a function of one example and its own parameters."""
    shapes, rest = eqx.partition(
        eqx.filter_eval_shape(build, jax.ShapeDtypeStruct((2,), jnp.uint32)),
        lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct),
    )
    model = lambda params, x: jax.vmap(eqx.combine(params, rest))(x)
    return ZooCase(users_defaults()(model), filled(shapes), x)


def eqx_model():
    """Embedding, attention, normalisation, a recurrent cell and a perceptron of Equinox."""

    class Network(eqx.Module):
        embedding: eqx.nn.Embedding
        attention: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm
        cell: eqx.nn.GRUCell
        mlp: eqx.nn.MLP

        def __call__(self, tokens):
            x = jax.vmap(self.embedding)(tokens)
            x = jax.vmap(self.norm)(x + self.attention(x, x, x))
            h, _ = lax.scan(lambda h, inputs: (self.cell(inputs, h), None), jnp.zeros(3, x.dtype), x)
            return self.mlp(h)

    def build(key):
        return Network(
            eqx.nn.Embedding(7, 4, key=key),
            eqx.nn.MultiheadAttention(2, 4, key=key),
            eqx.nn.LayerNorm(4),
            eqx.nn.GRUCell(4, 3, key=key),
            eqx.nn.MLP(3, 2, 5, 2, key=key),
        )

    return equinox_case(build, integers(1, 0, 7, 4, 5))


def eqx_conv():
    """Convolutions, one of them grouped, pooling and normalisation of Equinox."""

    def build(key):
        return eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(2, 4, 3, padding=1, key=key),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.MaxPool2d(2, 2),
                eqx.nn.GroupNorm(2, 4),
                eqx.nn.Conv2d(4, 6, 3, groups=2, key=key),
                eqx.nn.Lambda(jnp.ravel),
                eqx.nn.Linear(6, 3, key=key),
            ]
        )

    return equinox_case(build, normal(1, 4, 2, 6, 6))


@users_defaults()
def haiku_mlp():
    """Layers of Haiku, whose parameters are dictionaries by the name of the layer."""
    import haiku as hk

    def network(x):
        x = hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(jnp.tanh(hk.Linear(5)(x)))
        return hk.nets.MLP([6, 3])(x)

    transformed = hk.without_apply_rng(hk.transform(network))
    x = normal(1, 5, 4)
    shapes = jax.eval_shape(lambda: transformed.init(jax.random.PRNGKey(0), x))
    return ZooCase(users_defaults()(transformed.apply), filled(shapes), x)


ZOO: dict[str, Callable[[], ZooCase]] = {
    "mlp": mlp,
    "convnet": convnet,
    "conv_nchw_transpose": conv_nchw_transpose,
    "conv1d3d": conv1d3d,
    "transformer_tied": lambda: transformer(tied=True),
    "transformer_untied_remat": lambda: transformer(tied=False),
    "lstm_scan": lstm_scan,
    "rnn_unrolled": rnn_unrolled,
    "scan_layers": scan_layers,
    "scan_layers_remat_reverse": lambda: scan_layers(remat=True, reverse=True),
    "deep_remat": deep_remat,
    "fori_layers": fori_layers,
    "carry_params": carry_params,
    "nested_scan": nested_scan,
    "tied_scan": tied_scan,
    "cond_data": cond_data,
    "cond_param": cond_param,
    "moe": moe,
    "dropout_keys": dropout_keys,
    "masked_lookup": masked_lookup,
    "odd": odd,
    "tied_mixed": tied_mixed,
    "weight_in_elementwise": weight_in_elementwise,
    "batched_einsum": batched_einsum,
    "shared_input": shared_input,
    "tree_output": tree_output,
    "pinn": pinn,
    "deq_opaque": deq_opaque,
    "custom_kernel": custom_kernel,
    "shard_mapped": shard_mapped,
    "flax_linen": flax_linen,
    "flax_linen_rnn": flax_linen_rnn,
    "flax_linen_scan_remat": flax_linen_scan_remat,
    "flax_nnx": flax_nnx,
    "eqx_model": eqx_model,
    "eqx_conv": eqx_conv,
    "haiku_mlp": haiku_mlp,
}
