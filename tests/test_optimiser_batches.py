"""What the optimiser makes of its batches and parameters: weights of positions, padding, labels that cannot be, leaves
that are not to be trained; and that what a step reports is true."""

import warnings

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, compiled_step, ravel
from models import normal
from zoo import classifier, classifier_problem, integers

import natgrad as ng
from natgrad._check import check_number

STRUCTURES = {
    "kfac": ng.KFAC,
    "reduce": lambda: ng.KFAC(blocks=ng.BlockRules(sharing="reduce")),
    "ekfac": ng.EKFAC,
    "diagonal": ng.Diagonal,
    "exact": ng.Exact,
}


def tagger(params, x):
    """A label for every position of a sequence, which sees its neighbour on the left."""
    hidden = jnp.tanh(params["table"][x] @ params["w"])
    before = jnp.pad(hidden, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    return (hidden + before) @ params["out"] + params["bias"][None, None, :]


def sequences(length=4):
    """Six sequences, of which the last positions are padding."""
    params = {"table": normal(1, 7, 5), "w": normal(2, 5, 4), "out": normal(3, 4, 3), "bias": normal(4, 3)}
    x, y = integers(5, 0, 7, 6, length), integers(6, 0, 3, 6, length)
    lengths = np.array([4, 2, 3, 1, 4, 2])
    mask = jnp.asarray(np.arange(length)[None, :] < lengths[:, None], float)
    return params, x, y, mask


def optimiser(name, objective=None, **options):
    options = {"damping": ng.ConstantDamping(0.1), "step": ng.ConstantStep(0.5)} | options
    return ng.NaturalGradient(
        tagger, ng.Categorical() if objective is None else objective, STRUCTURES[name](), **options
    )


def one_step(name, batch, params=None, ignored=None):
    opt = optimiser(name, ng.Likelihood(ng.Categorical(), ignore_label=ignored))
    params = sequences()[0] if params is None else params
    return compiled_step(opt)(params, opt.init(params, jax.tree.map(jnp.asarray, batch)), batch)


# Padding and weights -------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", STRUCTURES)
def test_what_stands_in_padding_does_not_matter(name):
    """Neither in inputs nor in targets, for loss, gradient, metric and factors."""
    params, x, y, mask = sequences()
    expected, _, info = one_step(name, (x, y, mask))
    assert bool(info.accepted)
    for token, label in ((0, 0), (6, 2), (3, 1)):
        other = jnp.where(mask > 0, x, token), jnp.where(mask > 0, y, label), mask
        after, _, told = one_step(name, other)
        assert_close((after, told.loss), (expected, info.loss), rtol=1e-12)
    # Not even NaN, which a label cannot be but a weight of zero hides.
    hidden = jnp.where(mask > 0, y, 99)
    assert_close(one_step(name, (x, hidden, mask))[0], expected, rtol=1e-12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", STRUCTURES)
def test_an_ignored_label_is_a_weight_of_zero(name):
    params, x, y, mask = sequences()
    expected, _, info = one_step(name, (x, y, mask))
    after, _, told = one_step(name, (x, jnp.where(mask > 0, y, -100)), ignored=-100)
    assert_close((after, told.loss), (expected, info.loss), rtol=1e-12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", STRUCTURES)
def test_weights_of_positions_that_are_equal_are_weights_of_examples(name):
    params, x, y, _ = sequences()
    weights = jnp.asarray([1.0, 2.0, 0.5, 0.0, 1.0, 3.0])
    expected, _, info = one_step(name, (x, y, weights))
    after, _, told = one_step(name, (x, y, jnp.broadcast_to(weights[:, None], x.shape)))
    assert_close((after, told.loss), (expected, info.loss), rtol=1e-10)


def test_losses_and_gradients_of_weighed_positions_are_those_of_their_sum():
    """An example counts as much as its heaviest position, and the sum over positions is relative to that."""
    params, x, y, mask = sequences()
    weights = mask * jnp.asarray(np.random.default_rng(0).uniform(0.5, 2.0, mask.shape))

    def cost(params):
        each = -jax.vmap(jax.vmap(ng.Categorical().log_prob))(tagger(params, x), y)
        return jnp.sum(weights * each) / jnp.sum(jnp.max(weights, axis=1))

    opt = optimiser("exact", damping=ng.ConstantDamping(1e9), step=ng.ConstantStep(1.0))
    after, _, info = helpers.one_step(opt, params, (x, y, weights))
    np.testing.assert_allclose(info.loss, cost(params), rtol=1e-12)
    gradient = jax.tree.map(lambda a, b: 1e9 * (a - b), params, after)
    np.testing.assert_allclose(ravel(gradient), ravel(jax.grad(cost)(params)), atol=1e-6)


def test_the_exact_metric_of_weighed_positions_is_the_hessian_of_their_divergence():
    params, x, y, mask = sequences()
    z0 = tagger(params, x)
    fisher = ng.Fisher(ng.Categorical())

    def divergence(params):
        each = jax.vmap(jax.vmap(fisher.dissimilarity))(tagger(params, x), z0)
        return jnp.sum(mask * each) / jnp.sum(jnp.max(mask, axis=1))

    matrix = jax.hessian(lambda flat: divergence(jax.flatten_util.ravel_pytree(params)[1](flat)))(ravel(params))
    after, _, _ = one_step("exact", (x, y, mask))
    cost = lambda p: jnp.sum(mask * -jax.vmap(jax.vmap(ng.Categorical().log_prob))(tagger(p, x), y)) / 6
    step = np.linalg.solve(matrix + 0.1 * np.eye(len(matrix)), ravel(jax.grad(cost)(params)))
    np.testing.assert_allclose(ravel(after), ravel(params) - 0.5 * step, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_weights_of_low_precision_are_summed_in_single_precision():
    params, (x, y) = classifier_problem()
    rows = np.arange(1002) % 12
    parts = dict(structure=ng.Diagonal(), damping=ng.ConstantDamping(0.1), step=ng.ConstantStep(0.1))
    opt = ng.NaturalGradient(classifier, ng.Categorical(), **parts, micro_batches=4)
    losses = []
    for weights in (jnp.ones(1002), jnp.full(1002, 100, jnp.float16), jnp.ones(1002, jnp.bfloat16)):
        batch = x[rows], y[rows], weights
        losses.append(compiled_step(opt)(params, opt.init(params, batch), batch)[2].loss)
    np.testing.assert_allclose(losses[1:], losses[0], rtol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [dict(structure=ng.Diagonal(batch_fraction=0.25)), dict(micro_batches=4)], ids=str)
def test_a_part_without_weight_is_no_metric(options):
    """The examples of the first turn do not count, and those of the second do."""
    params, (x, y) = classifier_problem()
    weights = jnp.ones(12).at[::4].set(0.0)
    options = {"structure": ng.Diagonal(), "damping": ng.ConstantDamping(0.01), "step": ng.ConstantStep(0.1)} | options
    opt = ng.NaturalGradient(classifier, ng.Categorical(), **options)
    step, state = compiled_step(opt), opt.init(params, (x, y, weights))
    after, state, info = step(params, state, (x, y, weights))
    assert info.result == ng.STEP_RESULTS.invalid_batch and float(state.structure.average.weight) == 0
    assert_close(after, params)
    assert bool(step(params, state, (x, y, weights))[2].accepted)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", [ng.Exponential, ng.Gamma, ng.Geometric, ng.Beta])
def test_padding_stays_inside_the_domain_of_a_family(family):
    """Nothing is evaluated at zeros, where these families are not defined."""
    size = 2 if family in (ng.Gamma, ng.Beta) else 1
    signs = jnp.asarray([1.0, -1.0]) if family is ng.Gamma else jnp.ones(2) if family is ng.Beta else -jnp.ones(1)
    model = lambda params, x: jnp.exp(x @ params).reshape(*x.shape[:2], size) * signs[None, None, :]
    model = model if size == 2 else (lambda params, x: -jnp.exp(x @ params)[..., 0])
    x, mask = normal(1, 4, 3, 2), jnp.ones((4, 3)).at[1, 2].set(0.0).at[3, 0].set(0.0)
    y = jnp.full((4, 3), 2.0 if family is not ng.Beta else 0.5)
    opt = ng.NaturalGradient(model, family(), ng.Exact(), ng.ConstantDamping(1.0), step=ng.ConstantStep(0.1))
    params, batch = 0.1 * normal(2, 2, size), (x, y, mask)
    state = opt.init(params, batch)
    with jax.debug_nans(True):
        _, _, info = opt.step(params, state, batch)
    assert bool(info.accepted)


# Targets -------------------------------------------------------------------------------------------------------------


TARGETS = {
    "below zero": (
        ng.Categorical(),
        lambda y: y.at[7].set(-1),
        "target of example 7 is `-1`.*`Categorical` needs labels of at least 0",
    ),
    "too large": (ng.Categorical(), lambda y: y.at[3].set(3), "target of example 3 is `3`.*below 3.*ignore_label"),
    "minimal": (ng.MinimalCategorical(), lambda y: y.at[2].set(4), "target of example 2 is `4`.*`MinimalCategorical`"),
    "count": (ng.Poisson(), lambda y: jnp.ones((12, 3)).at[5, 1].set(-2.0), "example 5.*`Poisson` needs.*at least 0"),
    "bits": (ng.Bernoulli(), lambda y: jnp.ones((12, 3)).at[5, 1].set(2.0), "example 5.*`Bernoulli` needs"),
    "nan": (
        ng.LeastSquares(),
        lambda y: jnp.ones((12, 3)).at[4, 0].set(jnp.nan),
        "example 4.*`LeastSquares` needs|1 of its 36 entries not finite",
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TARGETS)
def test_targets_that_cannot_be_are_refused(name):
    """By `init` and `step` with place and value; by a compiled step with a result, and nothing changes."""
    objective, change, message = TARGETS[name]
    params, (x, y) = classifier_problem()
    opt = ng.NaturalGradient(classifier, objective, ng.Exact(), ng.ConstantDamping(0.1), step=ng.ConstantStep(0.1))
    broken = x, change(y)
    for use in (lambda: opt.init(params, broken), lambda: ng.Problem(classifier, objective, params, broken)):
        with pytest.raises(ValueError, match=message):
            use()
    good = x, (y if broken[1].ndim == 1 else jnp.ones((12, 3)))
    state = opt.init(params, good)
    with pytest.raises(ValueError, match=message):
        opt.step(params, state, broken)
    after, later, info = compiled_step(opt)(params, state, broken)
    assert info.result == ng.STEP_RESULTS.invalid_batch and not bool(info.accepted)
    assert_close(after, params)
    # A weight of zero leaves the example out.
    weights = jnp.ones(12).at[np.array([2, 3, 4, 5, 7])].set(0.0)
    assert bool(helpers.one_step(opt, params, (*broken, weights))[2].accepted)


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_weights_that_cannot_be_are_refused(weight):
    params, (x, y) = classifier_problem()
    opt = ng.NaturalGradient(
        classifier, ng.Categorical(), ng.Exact(), ng.ConstantDamping(0.1), step=ng.ConstantStep(0.1)
    )
    weights = jnp.ones(12).at[2].set(weight)
    with pytest.raises(ValueError, match="the weight of example 2 is .*finite and not negative"):
        opt.init(params, (x, y, weights))
    _, _, info = compiled_step(opt)(params, opt.init(params, (x, y)), (x, y, weights))
    assert info.result == ng.STEP_RESULTS.invalid_batch


def test_a_column_of_labels_is_a_list_of_labels():
    params, (x, y) = classifier_problem()
    opt = ng.NaturalGradient(
        classifier, ng.Categorical(), ng.Exact(), ng.ConstantDamping(0.1), step=ng.ConstantStep(0.1)
    )
    ends = [helpers.one_step(opt, params, (x, own)) for own in (y, y[:, None])]
    assert_close(ends[0][0], ends[1][0], rtol=1e-12)
    with pytest.raises(ValueError, match="target of shape \\(\\) for the output of one example, but got \\(2,\\)"):
        opt.init(params, (x, jnp.stack([y, y], axis=1)))


@pytest.mark.parametrize(("dtype", "classes"), [(np.uint8, 256), (np.uint8, 300), (np.int8, 128), (np.int16, 200)])
def test_labels_of_few_bits_do_not_wrap_around(dtype, classes):
    z = normal(1, classes)
    for label in (1, 100, 127):
        expected = ng.Categorical().log_prob(z, label)
        assert_close(ng.Categorical().log_prob(z, jnp.asarray(label, dtype)), expected)
        assert_close(-ng.Likelihood(ng.Categorical()).loss(z, jnp.asarray(label, dtype)), expected)
    # 156 is -100 in eight bits.
    counted = ng.Likelihood(ng.Categorical(), ignore_label=-100).counted(jnp.asarray([156, 3], np.uint8))
    assert np.all(counted)


def test_a_log_probability_of_an_impossible_label_is_not_that_of_another():
    with pytest.raises(ValueError, match="labels"):
        ng.Categorical().log_prob(jnp.zeros(3), -1)
    assert np.isnan(ng.Likelihood(ng.Categorical()).loss(jnp.zeros(3), jnp.asarray(-1)))


def test_only_labels_can_be_ignored():
    with pytest.raises(ValueError, match="`Likelihood` can ignore a label of families of labels.*`Poisson` has none"):
        ng.Likelihood(ng.Poisson(), ignore_label=-1)


# Parameters ----------------------------------------------------------------------------------------------------------


TRAINABLE = {
    "path": "params['second']",
    "paths": ["params['second']['w']", "params['second']['b']"],
    "mapping": {"params['first']": False},
    "chosen": {"params['second']": True},
    "function of the leaf": lambda leaf: leaf.shape[-1] == 3,
    "function of path and leaf": lambda path, leaf: path.startswith("params['second']"),
    "tree": {"first": False, "second": True},
    "generator": lambda: (path for path in ["params['second']"]),
    "function of anything": lambda *given: given[0].startswith("params['second']"),
    "whole tree": {"first": {"w": False, "b": False}, "second": {"w": True, "b": True}},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TRAINABLE)
def test_ways_to_say_what_is_trained(name):
    params, batch = classifier_problem()
    chosen = TRAINABLE[name]() if name == "generator" else TRAINABLE[name]
    parts = dict(structure=ng.Diagonal(), damping=ng.ConstantDamping(0.1), step=ng.ConstantStep())
    opt = ng.NaturalGradient(classifier, ng.Categorical(), **parts, trainable=chosen)
    after, _, _ = helpers.one_step(opt, params, batch)
    assert_close(after["first"], params["first"])
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), after["second"], params["second"])
    assert all(jax.tree.leaves(moved))


def test_what_is_said_of_trainable_parameters_must_make_sense():
    params, batch = classifier_problem()
    start = lambda trainable: ng.NaturalGradient(classifier, ng.Categorical(), trainable=trainable).init(params, batch)
    with pytest.raises(ValueError, match="no parameter at `params\\['third'\\]`"):
        start("params['third']")
    with pytest.raises(TypeError, match="`trainable` to be a path such as.*but got `int`"):
        start(3)


def test_complex_parameters_are_refused_unless_they_are_not_trained():
    params, batch = classifier_problem()
    given = {**params, "phase": jnp.ones(2, complex)}
    model = lambda params, x: classifier(params, x) * jnp.sum(jnp.abs(params["phase"]))
    remedy = "trainable={\"params\\['phase'\\]\": False}"
    for trainable in (None, True, lambda leaf: True, ["params['first']", "params['phase']"], {"params['phase']": True}):
        with pytest.raises(TypeError, match=f"`params\\['phase'\\]` is `complex128`.*{remedy}"):
            ng.NaturalGradient(model, ng.Categorical(), trainable=trainable).init(given, batch)
    opt = ng.NaturalGradient(
        model, ng.Categorical(), ng.Diagonal(), step=ng.ConstantStep(0.1), trainable={"params['phase']": False}
    )
    after, _, _ = helpers.one_step(opt, given, batch)
    assert_close(after["phase"], given["phase"])


def test_statistics_that_a_model_keeps_are_not_trained_without_a_word():
    params, batch = classifier_problem()
    given = {"params": params, "batch_stats": {"mean": jnp.zeros(2)}}
    model = lambda given, x: classifier(given["params"], x) + jnp.sum(given["batch_stats"]["mean"])
    start = lambda **options: ng.NaturalGradient(model, ng.Categorical(), ng.Diagonal(), **options).init(given, batch)
    remedy = "trainable={\"params\\['batch_stats'\\]\": False}"
    with pytest.warns(UserWarning, match=f"would train `params\\['batch_stats'\\]\\['mean'\\]`.*{remedy}"):
        start()
    with pytest.warns(UserWarning, match=remedy):
        start(trainable=lambda path, leaf: "b" not in path.split("'")[-2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(trainable={"params['batch_stats']": False})
        start(trainable={"params": True, "batch_stats": False})
        start(trainable=["params['params']", "params['batch_stats']"])


@pytest.mark.users_defaults
def test_flax_variables_are_trained_without_their_statistics():
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
            return nn.Dense(3)(jnp.tanh(x))

    net, (_, (x, y)) = Net(), classifier_problem()
    variables = net.init(jax.random.key(0), x, train=False)
    model = lambda variables, x: net.apply(variables, x, train=False)
    opt = ng.NaturalGradient(model, ng.Categorical(), ng.Diagonal(), trainable={"params": True, "batch_stats": False})
    after, _, info = compiled_step(opt)(variables, opt.init(variables, (x, y)), (x, y))
    assert bool(info.accepted)
    assert_close(after["batch_stats"], variables["batch_stats"])


def test_a_model_without_data_has_no_weights():
    opt = ng.NaturalGradient(lambda w: w, ng.LeastSquares())
    with pytest.raises(ValueError, match="no examples to weigh"):
        opt.init(jnp.ones(2), (None, None, jnp.ones(1)))


def test_parameters_that_no_output_depends_on_are_named():
    params, batch = classifier_problem()
    given = {**params, "spare": jnp.ones(3)}
    stopped = lambda params, x: classifier(params, x) + jax.lax.stop_gradient(jnp.sum(params["spare"]))
    for model in (classifier, stopped):
        with pytest.warns(UserWarning, match="no output depends on `params\\['spare'\\]`.*trainable="):
            ng.NaturalGradient(model, ng.Categorical(), ng.Diagonal()).init(given, batch)


# What a step reports -------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", STRUCTURES)
def test_healthy_steps_pass_under_debug_nans(name):
    params, batch = classifier_problem()
    opt = ng.NaturalGradient(classifier, ng.Categorical(), STRUCTURES[name]())
    state = opt.init(params, batch)
    step = compiled_step(opt)
    with jax.debug_nans(True):
        for number in range(6):
            params, state, info = step(params, state, batch, jax.random.key(number))
            assert -1 <= float(info.cosine) <= 1
    assert not bool(info.divergence.is_known) and np.isnan(float(info.divergence))
    assert repr(info.divergence) == "Quantity(not measured)"


@pytest.mark.slow
@pytest.mark.parametrize("step", [ng.KLClip, ng.CrossValidated, ng.TrustRegion, ng.GridLineSearch, ng.ArmijoLineSearch])
def test_step_rules_pass_under_debug_nans(step):
    params, batch = classifier_problem()
    opt = ng.NaturalGradient(classifier, ng.Categorical(), ng.Diagonal(), step=step())
    state = opt.init(params, batch)
    with jax.debug_nans(True):
        for number in range(3):
            params, state, _ = compiled_step(opt)(params, state, batch, jax.random.key(number))


def test_the_loss_of_a_step_is_that_of_the_model_on_its_batch():
    """Also of one that couples examples, where nothing is concrete before the step, or nothing is checked."""
    params, (x, y) = classifier_problem()
    coupled = lambda params, x: classifier(params, x - jnp.mean(x, axis=0, keepdims=True))
    true = -jnp.mean(jax.vmap(ng.Categorical().log_prob)(coupled(params, x), y))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (x, y))
    for check in (True, False):
        term = ng.Term(coupled, ng.Categorical(), check=check)
        opt = ng.NaturalGradient(term, structure=ng.Diagonal(), step=ng.ConstantStep(0.1))
        after, _, info = compiled_step(opt)(params, opt.init(params, shapes), (x, y))
        np.testing.assert_allclose(info.loss, true, rtol=1e-12)
        assert (info.result == ng.STEP_RESULTS.coupled) == check and bool(info.accepted) == (not check)
        if check:
            assert_close(after, params)


STEPS = {"default": None, "constant": ng.ConstantStep(0.5), "clip": ng.KLClip(), "validated": ng.CrossValidated()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", STEPS)
def test_steps_can_be_differentiated(name):
    """The gradient of a result of two steps, against finite differences."""
    params, batch = classifier_problem()
    opt = ng.NaturalGradient(classifier, ng.Categorical(), ng.Diagonal(), step=STEPS[name])
    start = opt.init(params, batch)

    @jax.jit
    def ends(scale):
        now, state = jax.tree.map(lambda leaf: scale * leaf, params), start
        for _ in range(2):
            now, state, _ = opt.step(now, state, batch)
        return jnp.sum(ravel(now) ** 2)

    found, gap = jax.grad(ends)(1.0), 1e-5
    np.testing.assert_allclose(found, (ends(1 + gap) - ends(1 - gap)) / (2 * gap), rtol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["kfac", "diagonal"])
def test_a_first_batch_that_cannot_be_used_says_so_outside_jit_too(name):
    params, (x, y) = classifier_problem()
    opt = ng.NaturalGradient(classifier, ng.Categorical(), STRUCTURES[name]())
    after, _, info = opt.step(params, opt.init(params, (x, y)), (x.at[0, 0].set(jnp.nan), y))
    assert info.result == ng.STEP_RESULTS.restored
    assert_close(after, params)


@pytest.mark.parametrize("step", [ng.TrustRegion, ng.GridLineSearch])
def test_numbers_of_a_batch_that_cannot_be_used_are_not_known(step):
    params, (x, y) = classifier_problem()
    opt = ng.NaturalGradient(classifier, ng.Categorical(), ng.Diagonal(), ng.ConstantDamping(0.1), step=step())
    _, _, info = compiled_step(opt)(params, opt.init(params, (x, y)), (x, y.at[0].set(-1)))
    assert info.result == ng.STEP_RESULTS.invalid_batch
    assert not bool(info.loss_after.is_known) and not bool(info.actual_decrease.is_known)


# With other libraries ------------------------------------------------------------------------------------------------


def transformation(batch, **options):
    parts = ng.Diagonal(), ng.ConstantDamping(0.1)
    return ng.scale_by_natural_gradient(classifier, ng.Categorical(), batch, *parts, **options)


def loss_gradient(params, batch):
    return jax.grad(lambda p: -jnp.mean(jax.vmap(ng.Categorical().log_prob)(classifier(p, batch[0]), batch[1])))(params)


@pytest.mark.parametrize("kind", ["masked", "multi_transform"])
def test_parts_of_the_parameters_by_optax(kind):
    """The second layer by natural gradients, given the first, which another transformation takes or nobody."""
    params, batch = classifier_problem()
    labels = {"first": "plain", "second": "natural"}
    natural = transformation(batch, all_params=params)
    if kind == "masked":
        whole = optax.masked(natural, {"first": False, "second": True})
    else:
        whole = optax.multi_transform({"natural": natural, "plain": optax.set_to_zero()}, labels)
    gradient = loss_gradient(params, batch)
    updates, _ = jax.jit(whole.update)(gradient, whole.init(params), params, batch=batch, all_params=params)
    only = ng.scale_by_natural_gradient(
        lambda own, x: classifier({**params, **own}, x),
        ng.Categorical(),
        batch,
        ng.Diagonal(),
        ng.ConstantDamping(0.1),
    )
    own = {"second": params["second"]}
    expected, _ = jax.jit(only.update)({"second": gradient["second"]}, only.init(own), own, batch=batch)
    assert_close(updates["second"], expected["second"], rtol=1e-10)
    # `masked` passes on what it leaves out, and `set_to_zero` does not.
    others = gradient["first"] if kind == "masked" else jax.tree.map(jnp.zeros_like, gradient["first"])
    assert_close(updates["first"], others)


def test_parameters_that_optax_leaves_out_have_to_be_given():
    params, batch = classifier_problem()
    mask = {"first": False, "second": True}
    message = "only some of the parameters.*`as_optax\\(opt, batch, all_params=params\\)`"
    with pytest.raises(ValueError, match=message):
        optax.masked(transformation(batch), mask).init(params)
    masked = optax.masked(transformation(batch, all_params=params), mask)
    with pytest.raises(ValueError, match="`update\\(grads, state, params, batch=batch, all_params=params\\)`"):
        masked.update(params, masked.init(params), params, batch=batch)


def test_optax_leaves_frozen_parameters_alone():
    params, batch = classifier_problem()
    natural = transformation(batch, trainable={"params['first']": False})
    updates, _ = jax.jit(natural.update)(loss_gradient(params, batch), natural.init(params), params, batch=batch)
    assert_close(updates["first"], jax.tree.map(jnp.zeros_like, params["first"]))


def test_optax_raises_where_there_is_no_step_to_take():
    params, (x, y) = classifier_problem()
    natural = transformation((x, y))
    state, broken = natural.init(params), (x, y.at[4].set(7))
    with pytest.raises(ValueError, match="the target of example 4 is `7`"):
        natural.update(params, state, params, batch=broken)
    with pytest.raises(Exception, match="A target is invalid"):
        jax.block_until_ready(jax.jit(natural.update)(params, state, params, batch=broken))


def test_states_are_written_and_read_by_flax():
    from flax import serialization

    params, batch = classifier_problem()
    opt = ng.NaturalGradient(classifier, ng.Categorical(), ng.Diagonal(), step=ng.ConstantStep(0.1))
    start = opt.init(params, batch)
    after, state, _ = compiled_step(opt)(params, start, batch)
    read = serialization.from_bytes(start, serialization.to_bytes(state))
    assert jax.tree.structure(read) == jax.tree.structure(state)
    assert_close(jax.tree.leaves(read), jax.tree.leaves(state))
    other = ng.NaturalGradient(classifier, ng.Categorical(), ng.Exact(), step=ng.ConstantStep(0.1)).init(params, batch)
    with pytest.raises(ValueError, match="state of another optimiser"):
        serialization.from_bytes(other, serialization.to_bytes(state))


def test_weight_decay_by_path_and_by_schedule():
    params, batch = classifier_problem()
    build = lambda **options: ng.NaturalGradient(
        classifier, ng.Categorical(), ng.Diagonal(), ng.ConstantDamping(0.1), step=ng.ConstantStep(0.5), **options
    )
    step = lambda opt: helpers.one_step(opt, params, batch)[0]
    plain, decayed = step(build()), step(build(penalty=ng.WeightDecay({"params['first']": 0.2})))
    assert_close(decayed["second"], plain["second"])
    expected = jax.tree.map(lambda after, before: after - 0.5 * 0.2 * before, plain["first"], params["first"])
    assert_close(decayed["first"], expected, rtol=1e-10)
    scheduled = step(build(penalty=ng.WeightDecay(optax.exponential_decay(0.2, 10, 0.5))))
    assert_close(scheduled["first"], expected, rtol=1e-10)
    with pytest.raises(ValueError, match="no parameter at `third`, which is a path in `WeightDecay`"):
        step(build(penalty=ng.WeightDecay({"third": 0.1})))


SCHEDULED = {
    "initial": lambda s: ng.LevenbergMarquardt(initial=s),
    "decay": lambda s: ng.Spring(s),
    "patience": lambda s: ng.CrossValidated(patience=s),
    "part": lambda s: ng.KFAC(batch_fraction=s),
    "scale": lambda s: ng.ConstantDamping(scale=s),
    "l2": lambda s: ng.L2(s),
    "first size": lambda s: ng.ArmijoLineSearch(initial=s),
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_schedules_that_would_be_ignored_are_refused(name):
    # Where an argument is annotated, types that are checked at run time refuse it before the class does.
    message = "a schedule is not possible here, since it would be read once|Type-check error"
    with pytest.raises(TypeError, match=message):
        SCHEDULED[name](optax.constant_schedule(0.1))


def test_numbers_are_checked():
    with pytest.raises(TypeError, match="needs `b` to be a number above 0, but got a function: a schedule is not"):
        check_number(optax.constant_schedule(0.1), "`b`", above=0)
    with pytest.raises(TypeError, match="needs `b` to be a number, but got `str`"):
        check_number("0.1", "`b`")
    with pytest.raises(TypeError, match="or a schedule, but got `ndarray`"):
        check_number(np.ones(2), "`b`", schedules=True)
    check_number(optax.constant_schedule(0.1), "`b`", schedules=True)


# Look-up tables ------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", STRUCTURES)
def test_rows_that_are_never_read_do_not_dilute_the_damping(name):
    """Damping starts from the mean over the entries that some example reads."""
    model = lambda params, x: jnp.tanh(params["table"][x]) @ params["out"]
    small = {"table": normal(1, 8, 4), "out": normal(2, 4, 3)}
    large = {"table": jnp.concatenate([small["table"], normal(3, 500, 4)]), "out": small["out"]}
    batch = jnp.arange(8), integers(4, 0, 3, 8)
    ends = []
    for params in (small, large):
        opt = ng.NaturalGradient(model, ng.Categorical(), STRUCTURES[name]())
        after, _, info = helpers.one_step(opt, params, batch)
        ends.append((float(info.damping), after["table"][:8]))
    if name == "exact":
        # It draws a sample, which is another one for another shape.
        np.testing.assert_allclose(ends[1][0], ends[0][0], rtol=0.5)
    else:
        assert_close(ends[1], ends[0], rtol=1e-6)
