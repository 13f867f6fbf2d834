"""What users compute stays as it was."""

import json

import golden
import numpy as np
import pytest


@pytest.mark.sample(1)
@pytest.mark.users_defaults
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", golden.CASES)
def test_figures_are_those_on_record(name):
    expected = json.loads(golden.FILE.read_text())[name]
    found = golden.CASES[name]()
    assert found.keys() == expected.keys()
    for what, numbers in expected.items():
        np.testing.assert_allclose(found[what], numbers, rtol=1e-8, atol=1e-12, err_msg=f"{name}, {what}")
