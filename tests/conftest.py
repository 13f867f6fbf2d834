import collections
import contextlib
import hashlib
import itertools

import hypothesis
import jax
import pytest

pytest.register_assert_rewrite("helpers")

# The same examples in every run, so that a failing test is a failure of the last change. `pytest
# --hypothesis-profile=hunt` draws new ones.
hypothesis.settings.register_profile(
    "natgrad",
    deadline=None,  # the first example pays for the compilation
    derandomize=True,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.register_profile("hunt", hypothesis.settings.get_profile("natgrad"), derandomize=False)
hypothesis.settings.load_profile("natgrad")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the cases of a test marked `sample(n)`, all but `n` are slow.

    They are chosen by a hash of their names, the same for all tests of a file, which share what they compile."""
    groups = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample"):
            groups[item.path, item.originalname].append(item)
    for cases in groups.values():
        (count,) = cases[0].get_closest_marker("sample").args
        for item in sorted(cases, key=lambda item: _digest(item.path.name, item.callspec.id))[count:]:
            item.add_marker("slow")


def _digest(*names):
    return hashlib.sha256("/".join(names).encode()).hexdigest()


@pytest.fixture(autouse=True)
def arithmetic(request):
    """Float64 without implicit promotion, unless the test is marked otherwise."""
    marker = request.node.get_closest_marker
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(not marker("float32")))
        if not marker("users_defaults"):
            stack.enter_context(jax.numpy_dtype_promotion("strict"))
            stack.enter_context(jax.numpy_rank_promotion("raise"))
        yield


@pytest.fixture
def getkey():
    """A function whose every call returns a new key; the sequence is the same in each test."""
    seeds = itertools.count(2024)
    return lambda: jax.random.key(next(seeds))
