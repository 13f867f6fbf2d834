import contextlib
import itertools
import os

import hypothesis
import jax
import pytest
from slow_cases import SLOW_CASES

pytest.register_assert_rewrite("helpers")

hypothesis.settings.register_profile(
    "natgrad",
    deadline=None,  # the first example pays for the compilation
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("natgrad")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        tests = SLOW_CASES.get(item.path.name, {})
        cases = " ".join([tests.get("", ""), tests.get(getattr(item, "originalname", ""), "")]).split()
        if hasattr(item, "callspec") and item.callspec.id in cases:
            item.add_marker("slow")


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
