"""Every refusal of the optimiser says what was given, why it cannot work and what to do."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from models import normal
from zoo import classifier, classifier_problem

import natgrad as ng

CONSTRUCTORS = {
    "no objective": (lambda: ng.NaturalGradient(classifier), TypeError, "needs an `objective` for its model"),
    "wrong objective": (
        lambda: ng.NaturalGradient(classifier, 3),
        TypeError,
        "`NaturalGradient` needs an `objective`.*but got `int`",
    ),
    "two objectives": (
        lambda: ng.NaturalGradient(ng.Terms(a=ng.Term(classifier, ng.LeastSquares())), ng.LeastSquares()),
        ValueError,
        "got `Terms`, which has objectives of its own",
    ),
    "class for structure": (
        lambda: ng.NaturalGradient(classifier, ng.Categorical(), ng.KFAC),
        TypeError,
        "needs `structure` to be .* but got `KFAC`. Write `KFAC\\(\\)`",
    ),
    "number for an inner optimiser": (
        lambda: ng.InnerSolve(0.1),
        TypeError,
        "`InnerSolve` needs an optimiser of optax.*but got `float`",
    ),
    "no inner steps": (
        lambda: ng.InnerSolve(num_steps=0),
        ValueError,
        "`num_steps` to be a whole number of at least 1",
    ),
    "number for damping": (
        lambda: ng.NaturalGradient(classifier, ng.Categorical(), damping=0.1),
        TypeError,
        "needs `damping` to be `LevenbergMarquardt",
    ),
    "number for step": (
        lambda: ng.NaturalGradient(classifier, ng.Categorical(), step=0.1),
        TypeError,
        "needs `step` to be a step rule",
    ),
    "number for momentum": (
        lambda: ng.NaturalGradient(classifier, ng.Categorical(), momentum=0.9),
        TypeError,
        "needs `momentum` to be",
    ),
    "momentum nobody finds": (
        lambda: ng.NaturalGradient(classifier, ng.Categorical(), step=ng.ConstantStep(), momentum=ng.HeavyBall(None)),
        ValueError,
        "leaves its factor to the step rule, but `ConstantStep` does not find one",
    ),
    "momentum beside a search": (
        lambda: ng.NaturalGradient(classifier, ng.Categorical(), step=ng.TrustRegion(), momentum=ng.HeavyBall()),
        ValueError,
        "`TrustRegion` searches along one direction",
    ),
    "spring without damping": (
        lambda: ng.NaturalGradient(
            classifier, ng.Categorical(), damping=ng.ConstantDamping(0.0), step=ng.ConstantStep(), momentum=ng.Spring()
        ),
        ValueError,
        "`Spring` keeps the last update where damping decides",
    ),
    "decay of an unknown rate": (
        lambda: ng.NaturalGradient(classifier, ng.Categorical(), penalty=ng.WeightDecay(0.1)),
        ValueError,
        "`WeightDecay` is a part of the learning rate, but `QuadraticModel`",
    ),
    "negative decay": (
        lambda: ng.WeightDecay(-0.1),
        ValueError,
        "`WeightDecay` needs `value` to be a number of at least 0 or a schedule, but got -0.1",
    ),
    "negative l2": (
        lambda: ng.L2({"params['w']": -0.1}),
        ValueError,
        "`L2` needs `value\\[\"params\\['w'\\]\"\\]` to be a number of at least 0, but got -0.1",
    ),
    "number for a penalty": (
        lambda: ng.NaturalGradient(classifier, ng.Categorical(), penalty=0.1),
        TypeError,
        "needs `penalty` to be `L2\\(value\\)` or `WeightDecay\\(value\\)`, but got `float`",
    ),
    "class for a guard": (
        lambda: ng.NaturalGradient(classifier, ng.Categorical(), guard=ng.NoGuard),
        TypeError,
        "needs `guard` to be .* but got `NoGuard`. Write `NoGuard\\(\\)`",
    ),
    "rejections": (lambda: ng.Rollback(-1), ValueError, "`max_rejections` to be a whole number of at least 0"),
    "threshold": (lambda: ng.Rollback(threshold=0.0), ValueError, "`threshold` to be a number above 0, but got 0.0"),
    "guard decay": (lambda: ng.Rollback(decay=1.0), ValueError, "`decay` to be a number of at least 0 and below 1"),
    "term and objective": (
        lambda: ng.NaturalGradient(ng.Term(classifier, ng.LeastSquares()), ng.LeastSquares()),
        ValueError,
        "`NaturalGradient` got `Term`, which has objectives of its own, and an `objective`",
    ),
    "no micro-batch": (
        lambda: ng.NaturalGradient(classifier, ng.Categorical(), micro_batches=0),
        ValueError,
        "`micro_batches` needs a whole number of at least 1, but got 0",
    ),
    "loss": (lambda: ng.Objective(3, ng.Euclidean()), TypeError, "needs a function `loss\\(z, y\\)`.*but got `int`"),
    "geometry": (lambda: ng.Objective(classifier, ng.Categorical()), TypeError, "needs a geometry.*Fisher\\(family\\)"),
    "term model": (lambda: ng.Term(3, ng.LeastSquares()), TypeError, "`Term` needs a function"),
    "term weight": (
        lambda: ng.Term(classifier, ng.LeastSquares(), -1.0),
        ValueError,
        "`weight` above 0, one number, but got -1.0",
    ),
    "terms": (lambda: ng.Terms(), TypeError, "at least one `name=Term"),
    "damping shape": (
        lambda: ng.ConstantDamping(shape="round"),
        ValueError,
        '"identity" or "diagonal", but got \'round\'',
    ),
    "damping": (
        lambda: ng.ConstantDamping(-1.0),
        ValueError,
        "`value` to be a number of at least 0 or a schedule, but got -1.0",
    ),
    "multipliers": (
        lambda: ng.LevenbergMarquardt(multipliers={"params": 0.0}),
        ValueError,
        "`multipliers\\['params'\\]` to be a number above 0, but got 0.0",
    ),
    "initial damping": (lambda: ng.LevenbergMarquardt(initial=0.0), ValueError, "from 0 no factor leads away"),
    "damping decay": (
        lambda: ng.LevenbergMarquardt(decay=2.0),
        ValueError,
        "`decay` to be a number above 0 and below 1, but got 2.0",
    ),
    "heavy ball": (lambda: ng.HeavyBall(1.0), ValueError, "of at least 0 and below 1 or a schedule, but got 1.0"),
    "spring": (lambda: ng.Spring(1.5), ValueError, "of at least 0 and below 1, but got 1.5"),
    "rate": (lambda: ng.ConstantStep(-0.1), ValueError, "`learning_rate` to be a number above 0"),
    "clip": (lambda: ng.KLClip(0.0), ValueError, "`radius` to be a number above 0"),
    "validated radius": (
        lambda: ng.CrossValidated(radius=-1.0),
        ValueError,
        "`CrossValidated` needs `radius`.*got -1.0",
    ),
    "validated patience": (lambda: ng.CrossValidated(patience=0.0), ValueError, "needs `patience`.*got 0.0"),
    "validated decay": (
        lambda: ng.CrossValidated(1.0),
        ValueError,
        "`decay` to be a number of at least 0 and below 1, but got 1.0",
    ),
    "validated momentum": (
        lambda: ng.NaturalGradient(classifier, ng.Categorical(), step=ng.CrossValidated(), momentum=ng.HeavyBall()),
        ValueError,
        "averages natural gradients itself.*`HeavyBall` makes of it. Use `NoMomentum`",
    ),
    "radius": (lambda: ng.TrustRegion(0.0), ValueError, "`radius` to be a number above 0"),
    "shrink": (
        lambda: ng.TrustRegion(shrink=1.0),
        ValueError,
        "`shrink` to be a number above 0 and below 1, but got 1.0",
    ),
    "tries": (lambda: ng.ArmijoLineSearch(max_tries=0), ValueError, "`max_tries` to be a whole number of at least 1"),
    "sufficient": (
        lambda: ng.ArmijoLineSearch(sufficient=1.0),
        ValueError,
        "`sufficient` to be a number of at least 0 and below 1",
    ),
    "sizes": (lambda: ng.GridLineSearch(()), ValueError, "needs `sizes`, at least one number, but got \\(\\)"),
    "corrected eigenvalues": (
        lambda: ng.KFAC(blocks=ng.BlockRules(structures={"params['w']": "eigenvalue-corrected"})),
        ValueError,
        "`KFAC` keeps no corrected eigenvalues, but `params\\['w'\\]` shall have them. Use `EKFAC`",
    ),
    "part": (
        lambda: ng.KFAC(batch_fraction=0.0),
        ValueError,
        "fraction of every batch.*above 0 and of at most 1, but got 0.0",
    ),
    "part of exact": (lambda: ng.Exact(batch_fraction=2.0), ValueError, "above 0 and of at most 1, but got 2.0"),
    "solver": (lambda: ng.Exact(3), TypeError, "`Exact` needs a solver.*but got `int`"),
    "period": (lambda: ng.EKFAC(refresh_every=0), ValueError, "`refresh_every` to be a whole number of at least 1"),
    "decay": (
        lambda: ng.Diagonal(decay=0.0),
        ValueError,
        "`decay` to be a number above 0 and of at most 1, but got 0.0",
    ),
    "rules": (lambda: ng.KFAC(blocks="reduce"), TypeError, "`blocks` to be `BlockRules|Type-check error"),
    "rule": (
        lambda: ng.KFAC(blocks=ng.BlockRules(sharing="fold")),
        ValueError,
        "`BlockRules` needs `sharing` to be one of",
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_parts_refuse_what_they_cannot_use(name):
    build, kind, message = CONSTRUCTORS[name]
    with pytest.raises(kind, match=message):
        build()


def started(batch=None, **options):
    params, data = classifier_problem()
    opt = ng.NaturalGradient(classifier, ng.Categorical(), **options)
    return opt.init(params, data if batch is None else batch(*data))


INITS = {
    "not a pair": (dict(batch=lambda x, y: x), TypeError, "must be `\\(x, y\\)`"),
    "too many": (dict(batch=lambda x, y: (x, y, None, None)), TypeError, "of length 4"),
    "lengths": (
        dict(batch=lambda x, y: (x, y[:3])),
        ValueError,
        "12 examples in `x`, but `y` has shapes \\[\\(3,\\)\\]",
    ),
    "weights": (
        dict(batch=lambda x, y: (x, y, x)),
        ValueError,
        "weights of a batch.*have shape \\(12, 3\\)",
    ),
    "l2 path": (dict(penalty=ng.L2({"params['third']": 0.1})), ValueError, "no parameter at `params\\['third'\\]`"),
    "multiplier path": (
        dict(damping=ng.ConstantDamping(0.1, multipliers={"third": 2.0})),
        ValueError,
        "no parameter at `third`, which is a path in `multipliers`",
    ),
    "corrected units": (
        dict(structure=ng.EKFAC(), damping=ng.ConstantDamping(0.1, shape="diagonal")),
        ValueError,
        "`EKFAC` cannot be damped relative to the diagonal",
    ),
    "units without a metric": (
        dict(structure=ng.InnerSolve(), damping=ng.ConstantDamping(0.1, shape="diagonal")),
        ValueError,
        "`InnerSolve` forms no metric",
    ),
    "units and l2": (
        dict(damping=ng.ConstantDamping(0.1, shape="diagonal"), penalty=ng.L2(0.1)),
        ValueError,
        "`KFAC` cannot add `l2` to a metric that is damped relative",
    ),
    "units in turns": (
        dict(structure=ng.KFAC(stagger=True), damping=ng.ConstantDamping(0.1, shape="diagonal")),
        ValueError,
        "cannot be damped relative to the diagonal of the metric, whose units",
    ),
    "sample space": (
        dict(structure=ng.Exact(ng.SampleSpace()), damping=ng.ConstantDamping(0.0), step=ng.ConstantStep()),
        ValueError,
        "`SampleSpace` needs `damping` above 0",
    ),
}


@pytest.mark.parametrize("name", INITS)
def test_beginnings_that_cannot_work(name):
    options, kind, message = INITS[name]
    if name == "sample space":
        params, data = classifier_problem()
        opt = ng.NaturalGradient(classifier, ng.Categorical(), **options)
        with pytest.raises(kind, match=message):
            jax.eval_shape(opt.step, params, opt.init(params, data), data, None)
        return
    with pytest.raises(kind, match=message):
        started(**options)


def test_blocks_that_would_need_two_kinds_of_damping():
    params, data = classifier_problem()
    opt = ng.NaturalGradient(classifier, ng.Categorical(), penalty=ng.L2({"params['first']['w']": 0.1}))
    with pytest.raises(ValueError, match='share a block, but have different damping.*bias="separate"'):
        jax.eval_shape(opt.step, params, opt.init(params, data), data, None)
    opt = ng.NaturalGradient(
        classifier,
        ng.Categorical(),
        ng.KFAC(blocks=ng.BlockRules(bias="separate")),
        penalty=ng.L2({"params['first']['w']": 0.1}),
    )
    jax.eval_shape(opt.step, params, opt.init(params, data), data, None)


def test_terms_and_their_batches():
    params, (x, y) = classifier_problem()
    problem = ng.Terms(a=ng.Term(classifier, ng.Categorical()), b=ng.Term(classifier, ng.LeastSquares()))
    opt = ng.NaturalGradient(problem)
    with pytest.raises(ValueError, match="needs a batch for each, \\['a', 'b'\\], but got \\['a'\\]"):
        opt.init(params, {"a": (x, y)})
    with pytest.raises(ValueError, match="but got tuple"):
        opt.init(params, (x, y))
    only_first = lambda params, x: jnp.tanh(x @ params["first"]["w"])
    uneven = ng.NaturalGradient(
        ng.Terms(a=ng.Term(classifier, ng.Categorical()), b=ng.Term(only_first, ng.LeastSquares()))
    )
    with pytest.raises(
        ValueError, match="needs the same blocks in every term, but .*'first'.* are used in different ways"
    ):
        uneven.init(params, {"a": (x, y), "b": (x, None)})


def test_models_that_couple_examples_and_odd_parameters():
    params, (x, y) = classifier_problem()
    coupled = lambda params, x: classifier(params, x - jnp.mean(x, axis=0, keepdims=True))
    by_place = lambda params, x: classifier(params, x * jnp.arange(1.0, 1 + len(x))[:, None])
    for model in (coupled, by_place):
        with pytest.raises(
            ValueError, match="couples examples.*for 1[12] examples.*not the output for the example alone"
        ):
            ng.NaturalGradient(model, ng.Categorical()).init(params, (x, y))
    with pytest.raises(ValueError, match="without any array"):
        ng.NaturalGradient(classifier, ng.Categorical(), trainable=lambda leaf: False).init(params, (x, y))
    with pytest.raises(TypeError, match="`Diagonal` treats all parameters alike"):
        opt = ng.NaturalGradient(classifier, ng.Categorical(), ng.Diagonal())
        opt.report(opt.init(params, (x, y)))


def test_losses_and_parameters_that_are_no_numbers():
    params, (x, _) = classifier_problem()
    opt = ng.NaturalGradient(classifier, ng.Objective(lambda z, y: z**2, ng.Euclidean()), ng.Exact())
    with pytest.raises(ValueError, match="loss of one example must be one number, but has shape \\(3,\\)"):
        jax.eval_shape(opt.step, params, opt.init(params, (x, None)), (x, None))
    with pytest.raises(TypeError, match="got the Python number 0.5 at `params\\['rate'\\]`"):
        ng.NaturalGradient(lambda p, x: classifier(p, x), ng.LeastSquares()).init({**params, "rate": 0.5}, (x, None))


def test_fallbacks_are_warned_of_when_a_run_begins():
    params, x = {"w": normal(1, 16, 12)}, normal(2, 6, 16)
    mask = jnp.asarray(normal(3, 16, 12) > 0).astype(x.dtype)
    opt = ng.NaturalGradient(lambda params, x: jnp.tanh(x @ (params["w"] * mask)), ng.LeastSquares())
    batch = x, normal(4, 6, 12)
    for init in (lambda: opt.init(params, batch), lambda: ng.as_optax(opt, batch).init(params)):
        with pytest.warns(UserWarning, match="`NaturalGradient.init`: `params\\['w'\\]` is diagonal") as caught:
            init()
        # Not at a line of the package; that of the user is hidden here by those who check types at run time.
        package = str(Path(ng.__file__).parent)
        assert not any(warning.filename.startswith(package) for warning in caught)
    with pytest.warns(UserWarning, match="is diagonal"):
        state = opt.init(params, batch)
    assert opt.report(state)["params['w']"].is_fallback
    strict = ng.KFAC(blocks=ng.BlockRules(strict=True))
    with pytest.raises(ValueError, match="`NaturalGradient.init` with `strict=True` needs a structure for every"):
        ng.NaturalGradient(lambda params, x: jnp.tanh(x @ (params["w"] * mask)), ng.LeastSquares(), strict).init(
            params, batch
        )


def test_reports_tell_the_structure_that_steps_use():
    params, batch = classifier_problem()
    rules = ng.BlockRules(structures={"params['second']": "kronecker"})
    structures = []
    for structure in (ng.KFAC(), ng.EKFAC(), ng.EKFAC(blocks=rules)):
        opt = ng.NaturalGradient(classifier, ng.Categorical(), structure)
        report = opt.report(opt.init(params, batch))
        structures.append([report[f"params['{layer}']['w']"].structure for layer in ("first", "second")])
    kronecker, corrected = "kronecker", "eigenvalue-corrected"
    assert structures == [[kronecker] * 2, [corrected] * 2, [corrected, kronecker]]
