"""Ready-made problems, problems made from files, and the fetching of published data."""

import functools
import gzip
import hashlib
import http.server
import io
import struct
import sys
import tarfile
import threading
import time

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natgrad as ng
from natgrad._problem import Problem
from natgrad.problems import PROBLEMS, data, from_file
from natgrad.problems._mlp import column_scaling, split_examples
from natgrad.problems._poisson_pde import exact, grid, laplacian, poisson_pde, residual
from natgrad.problems._readers import idx_array, read_csv

pytestmark = pytest.mark.users_defaults

FILES = {"mnist-autoencoder": data.MNIST_TEST_IMAGES, "chars": data.MOBY_DICK}


@functools.cache
def made(name: str, seed: int = 0) -> Problem:
    if PROBLEMS[name].is_fetched and data.local_path(FILES[name]) is None:
        pytest.skip(f"`{FILES[name].kept_name}` is neither in the directory named by NATGRAD_DATA nor in the cache")
    with jax.enable_x64(PROBLEMS[name].is_double):
        return PROBLEMS[name].make(seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_gradient_step_lowers_the_loss(name):
    problem = made(name)
    with jax.enable_x64(PROBLEMS[name].is_double):
        # One program for both, since nearly all the time is compilation.
        value_and_grad = jax.jit(jax.value_and_grad(problem.loss))
        loss, gradient = value_and_grad(problem.params, problem.batch())
        squared = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient))
        rate = min(1e-3, float(0.01 * loss / squared))
        params = jax.tree.map(lambda leaf, slope: leaf - rate * slope, problem.params, gradient)
        after, _ = value_and_grad(params, problem.batch())
    assert np.isfinite(loss)
    assert after < loss


@pytest.mark.parametrize("name", PROBLEMS)
def test_precision_is_as_promised(name):
    problem, dtype = made(name), np.float64 if PROBLEMS[name].is_double else np.float32
    leaves = jax.tree.leaves((problem.params, problem.data, problem.held_out))
    assert {leaf.dtype for leaf in leaves if np.issubdtype(leaf.dtype, np.floating)} == {np.dtype(dtype)}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PROBLEMS)
def test_seeds_draw_other_parameters_for_the_same_data(name):
    first, again, second = made(name), made.__wrapped__(name), made(name, 1)
    differ = lambda a, b: any((x != y).any() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))
    assert not differ(first.params, again.params)
    assert differ(first.params, second.params)
    assert not differ((first.data, first.held_out), (second.data, second.held_out))


@pytest.mark.parametrize("name", PROBLEMS)
def test_names_and_descriptions(name):
    problem = made(name)
    assert problem.name == name
    assert problem.about and PROBLEMS[name].about and "\n" not in PROBLEMS[name].about


@pytest.mark.parametrize(
    ("name", "training", "held_out"),
    [
        ("digits", 1438, 359),
        ("digits-autoencoder", 1438, 359),
        ("diabetes", 354, 88),
        ("mnist-autoencoder", 2000, 1000),
    ],
)
def test_what_is_held_out_is_not_trained_on(name, training, held_out):
    problem = made(name)
    rows = [{row.tobytes() for row in np.asarray(part[0])} for part in (problem.data, problem.held_out)]
    assert not rows[0] & rows[1]
    assert (problem.num_examples, problem.num_held_out) == (training, held_out)


def test_characters_that_are_held_out_come_last():
    problem = made("chars")
    text, _ = data.in_numbers(data.moby_dick()[: 33 * (problem.num_examples + problem.num_held_out)])
    assert problem.num_params <= 50_000
    assert problem.data[1].shape[1:] == (32,)
    np.testing.assert_array_equal(np.asarray(problem.held_out[0])[-1], text[-33:-1])
    np.testing.assert_array_equal(np.asarray(problem.held_out[1])[-1], text[-32:])


@pytest.mark.float32
def test_characters_do_not_see_what_follows():
    problem = made("chars")
    x = problem.data[0][:1]
    changed = x.at[:, 20].set((x[:, 20] + 1) % 10)
    before, after = (np.asarray(problem.model(problem.params, each))[0] for each in (x, changed))
    np.testing.assert_array_equal(before[:20], after[:20])
    assert (before[20:] != after[20:]).any(axis=1).any()


@pytest.mark.slow
@pytest.mark.float32
def test_every_parameter_of_the_characters_has_a_kronecker_block():
    problem = made("chars")
    metric = ng.kfac(
        problem.model, ng.Fisher(ng.Categorical()), problem.params, problem.data[0][:2], key=jax.random.key(0)
    )
    assert "diagonal" not in str(metric.report())


# Poisson's equation


def test_the_laplacian_of_the_exact_solution():
    interior, boundary = grid()
    x = jnp.asarray(interior)
    np.testing.assert_allclose(laplacian(exact, x), -2 * np.pi**2 * exact(x), rtol=1e-12)
    np.testing.assert_allclose(exact(jnp.asarray(boundary)), 0, atol=1e-15)
    assert (len(interior), len(boundary)) == (900, 120)
    assert len(np.unique(np.concatenate([interior, boundary]), axis=0)) == 1020


def test_the_laplacian_of_the_network():
    """Against the Hessian, at a few points."""
    problem = poisson_pde()
    params, x = problem.params, problem.data["interior"][0][:3]
    one = lambda x: jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"]) @ params["last"]["w"]
    expected = jnp.trace(jax.vmap(jax.hessian(one))(x), axis1=1, axis2=2)
    np.testing.assert_allclose(residual(params, x), expected + 2 * np.pi**2 * exact(x), rtol=1e-10)


# Parts and units


@hypothesis.given(st.integers(10, 500), st.floats(0, 0.9), st.integers(0, 100))
def test_parts_have_every_example_once(count, fraction, seed):
    training, held_out = split_examples(count, fraction, seed)
    assert sorted([*training, *held_out]) == list(range(count))
    assert len(training) >= 1 and abs(len(held_out) - fraction * count) <= 1


def test_columns_that_do_not_vary_become_zero():
    values = np.stack([np.full(50, 0.1), np.arange(50.0)], axis=1)
    standardised = column_scaling(values).standardise(values)
    np.testing.assert_array_equal(standardised[:, 0], 0)
    np.testing.assert_allclose([standardised[:, 1].mean(), standardised[:, 1].std()], [0, 1], atol=1e-12)


# Problems from tables


def table(path, header, rows, delimiter=",", end="\n", encoding="utf-8"):
    lines = [delimiter.join(map(str, row)) for row in [header, *rows]]
    path.write_bytes((end.join(lines) + end).encode(encoding))
    return path


def numbers(count=60, seed=0):
    """Columns `a`, `b` and `y = 2 a - 30 b + 5`."""
    a, b = np.random.default_rng(seed).normal(size=(2, count)) * [[3.0], [0.1]]
    return [(x, y, 2 * x - 30 * y + 5) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


@pytest.mark.parametrize(
    "options",
    [{}, {"delimiter": ";"}, {"delimiter": "\t"}, {"end": "\r\n"}, {"encoding": "utf-8-sig"}, {"delimiter": " , "}],
    ids=str,
)
def test_a_table_of_numbers(tmp_path, options):
    rows = numbers()
    problem = from_file(table(tmp_path / "rows.csv", ["a", "b", "y"], rows, **options), target="y", hidden=(8,))
    values = np.array(rows)[split_examples(60).training]
    np.testing.assert_allclose(problem.data[0], (values - values.mean(0))[:, :2] / values.std(0)[:2], rtol=1e-6)
    np.testing.assert_allclose(problem.data[1][:, 0], (values - values.mean(0))[:, 2] / values.std(0)[2], rtol=1e-6)
    assert (problem.num_examples, problem.num_held_out, problem.batch_size) == (48, 12, None)
    assert problem.name == "rows.csv" and problem.steps == 500
    assert "60 rows with 2 inputs, standardised" in problem.about and "regression of `y`" in problem.about


def test_errors_are_in_the_units_of_the_target(tmp_path):
    rows = numbers()
    problem = from_file(table(tmp_path / "rows.csv", ["a", "b", "y"], rows), target="y", hidden=(8,))
    z = jnp.zeros((12, 1))
    training, held_out = (np.array(rows)[part, 2] for part in split_examples(60))
    error = problem.metrics["root mean squared error"](z, problem.held_out[1])
    np.testing.assert_allclose(error, np.sqrt(np.mean((held_out - training.mean()) ** 2)), rtol=1e-5)
    assert set(problem.metrics) == {"explained variance", "root mean squared error"}


@pytest.mark.float32
@pytest.mark.parametrize("target", ["kind", "code"])
def test_a_table_of_classes(tmp_path, target):
    kinds = ["cat, wild", "dog", "newt"]
    rows = [(0.1 * k, 7, f'"{kinds[k % 3]}"', k % 3) for k in range(40)]
    path = table(tmp_path / "rows.csv", ["a", "constant", "kind", "code"], rows)
    path = path.rename(tmp_path / "rows.CSV")
    other = {"kind": "code", "code": "kind"}[target]
    problem = from_file(path, target=target, hidden=(), ignore=[other], seed=3)
    np.testing.assert_array_equal(problem.data[1], split_examples(40, seed=3).training % 3)
    np.testing.assert_array_equal(problem.data[0][:, 1], 0)
    assert jax.eval_shape(problem.model, problem.params, problem.data[0]).shape == (32, 3)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((problem.params, problem.data))} == {"float32", "int32"}
    assert "3 classes" in problem.about and set(problem.metrics) == {"accuracy"}


def test_the_task_may_be_given(tmp_path):
    path = table(tmp_path / "rows.csv", ["a", "y"], [(k**2, k % 4) for k in range(60)])
    assert isinstance(from_file(path, target="y").objective, ng.Categorical)
    assert isinstance(from_file(path, target="y", task="regression").objective, ng.LeastSquares)
    path = table(tmp_path / "rows.csv", ["a", "y"], [(k**2, k % 4) for k in range(40)])
    assert isinstance(from_file(path, target="y").objective, ng.LeastSquares)
    assert isinstance(from_file(path, target="y", task="classification").objective, ng.Categorical)


def test_a_class_may_be_seen_once(tmp_path):
    path = table(tmp_path / "rows.csv", ["a", "y"], [(k, "rare" if k == 5 else "ab"[k % 2]) for k in range(20)])
    assert "3 classes" in from_file(path, target="y").about


def test_nothing_need_be_held_out_and_batches_may_be_given(tmp_path):
    path = table(tmp_path / "rows.csv", ["a", "b", "y"], numbers())
    problem = from_file(path, target="y", held_out=0.0, batch_size=7)
    assert problem.held_out is None and problem.num_examples == 60 and problem.batch_size == 7


def test_a_long_compressed_table(tmp_path):
    rows = np.random.default_rng(0).normal(size=(5000, 20)).round(6)
    text = "\n".join([",".join(f"c{k}" for k in range(20)), *(",".join(map(str, row)) for row in rows.tolist())])
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(text.encode()))
    start = time.process_time()
    problem = from_file(tmp_path / "rows.csv.gz", target="c3")
    assert problem.batch_size == 256 and problem.num_examples == 4000
    assert time.process_time() - start < 5


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(-99, 99)), min_size=10, max_size=30),
    st.sampled_from([",", ";", "\t"]),
    st.sampled_from(["\n", "\r\n", "\n\n"]),
    st.sampled_from(["", " "]),
)
def test_cells_come_back(tmp_path, rows, delimiter, end, space):
    lines = [f'{space}{a}{space}{delimiter}"{b}"{delimiter}é' for a, b in rows]
    (tmp_path / "rows.csv").write_bytes(end.join([delimiter.join("aby"), *lines]).encode())
    source = read_csv(tmp_path / "rows.csv", "y", [])
    np.testing.assert_array_equal(source.inputs, np.array(rows, float))
    assert set(source.target) == {"é"}


# Problems from arrays


def idx(array, code=8):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape) + array.tobytes()


def images(folder, count=40, ending=""):
    pack = gzip.compress if ending else bytes
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3, 2), dtype=np.uint8)
    (folder / f"some-images-idx3-ubyte{ending}").write_bytes(pack(idx(pixels)))
    (folder / f"some-labels-idx1-ubyte{ending}").write_bytes(pack(idx(np.arange(count, dtype=np.uint8) % 3)))
    return folder / f"some-images-idx3-ubyte{ending}", pixels


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("where", ["next to it", "here"])
def test_images(tmp_path, monkeypatch, ending, where):
    path, pixels = images(tmp_path, ending=ending)
    if where == "here":
        monkeypatch.chdir(tmp_path)
    problem = from_file(path, target=f"some-labels-idx1-ubyte{ending}")
    rows = split_examples(40).training
    np.testing.assert_allclose(problem.data[0], pixels[rows].reshape(-1, 6) / 255, rtol=1e-6)
    np.testing.assert_array_equal(problem.data[1], rows % 3)
    assert "scaled to [0, 1]" in problem.about


@pytest.mark.parametrize(("code", "dtype"), [(9, ">i1"), (11, ">i2"), (12, ">i4"), (13, ">f4"), (14, ">f8")])
def test_types_of_idx(code, dtype):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    np.testing.assert_array_equal(idx_array(idx(array, code), "file"), array)


def test_an_archive_of_arrays(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(50, 2, 3)), "flag": rng.normal(size=50) > 0, "y": np.arange(50) % 4}
    np.savez(tmp_path / "all.npz", **arrays, other=np.zeros(7), name=np.array("text"), words=np.array(["w"] * 50))
    problem = from_file(tmp_path / "all.npz", target="y", ignore=["words"])
    assert problem.data[0].shape == (40, 7)
    assert (
        "Not used, because their lengths differ from the target: `name`, `other`." in problem.about
        and "4 classes" in problem.about
    )
    words = from_file(tmp_path / "all.npz", target="flag", ignore=["words", "y"])
    assert "classification of `flag`, 2 classes" in words.about


@pytest.mark.parametrize(("dtype", "expected"), [(int, ng.Categorical), (float, ng.LeastSquares)])
def test_integer_arrays_may_have_many_classes(tmp_path, dtype, expected):
    np.savez(
        tmp_path / "all.npz", x=np.random.default_rng(0).normal(size=(400, 2)), y=(np.arange(400) % 30).astype(dtype)
    )
    assert isinstance(from_file(tmp_path / "all.npz", target="y").objective, expected)


# What cannot be a problem

GOOD = "a,b,y\n" + "".join(f"{k},{k * k % 7},{k}.5\n" for k in range(12))
TABLES = {
    "no target": (GOOD, {"target": None}, "has `a`, `b`, `y`, but no target was given"),
    "unknown target": (GOOD.replace("b", "price"), {"target": "prize"}, "Did you mean `price`.*are `a`, `price`, `y`"),
    "unknown, ignored": (GOOD, {"ignore": ["zzz"]}, r"nothing named `zzz`\. Its names are"),
    "text": (GOOD.replace("\n3,2,", "\n3,two,"), {}, "Column `b` .* number is needed: `two` in row 5.*--ignore b"),
    "empty cells": (
        GOOD.replace("\n3,2,", "\n3,,").replace("\n5,4", "\n5,NA"),
        {},
        "`b` .* 2 empty .* row 5.*--ignore",
    ),
    "NaN": (GOOD.replace("\n3,2,", "\n3,nan,"), {}, "`b` .* has 1 empty or NaN cells, the first in row 5"),
    "empty target": (GOOD.replace(",3.5", ","), {}, r"`y` .* 1 empty .* row 5\. Fill them in, or remove their rows\.$"),
    "empty label": (GOOD.replace(".5", "x").replace(",3x", ","), {}, "`y` .* has 1 empty or NaN cells, .* row 5"),
    "missing label": (GOOD.replace(".5", "x").replace(",3x", ",NaN"), {}, "`y` .* has 1 empty or NaN cells, .* row 5"),
    "one text among numbers": (
        GOOD.replace(",3.5", ",3.5%"),
        {},
        r"`y` .* number is needed: `3.5%` in row 5.*by a number\.$",
    ),
    "infinite": (GOOD.replace("\n3,2,", "\n3,-inf,"), {}, "`b` .* has 1 infinite cells, the first in row 5"),
    "long row": (GOOD.replace("\n3,2,", "\n3,2,2,"), {}, "Row 5 of .* has 4 cells, but the header has 3"),
    "after a blank line": (GOOD.replace("\n3,2,", "\n\n3,2,2,"), {}, "Row 6 of .* has 4 cells"),
    "few rows": ("\n".join(GOOD.split("\n")[:10]), {}, "has 9 rows of data, but at least 10"),
    "only a header": ("a,b,y\n", {}, "has 0 rows of data"),
    "empty": ("\n \n", {}, "is empty. Its first row must name"),
    "no header": (GOOD.replace("a,b,y\n", ""), {}, "has only numbers, `0, 0, 0.5`.*Add a header"),
    "unnamed column": (GOOD.replace("a,b", ",b"), {}, "Column 1 of .* has no name.*index=False"),
    "repeated name": (GOOD.replace("a,b", "b,b"), {}, "has `b` more than once"),
    "one class": ("a,y\n" + "1,x\n" * 12, {}, "is `x` in all rows: there is only one class"),
    "constant": ("a,y\n" + "1,2.5\n" * 12, {}, "is 2.5 in all training rows: it is constant"),
    "no inputs": (GOOD, {"ignore": ["a", "b"]}, "no inputs besides the target `y`"),
    "regression of text": ("a,y\n" + "1,x\n" * 12, {"task": "regression"}, "has text, such as `x`.*not possible"),
    "unknown task": (
        GOOD,
        {"task": "rank"},
        "^`from_file` needs `task` to be .*`regression`.*got `rank`",
    ),
    "unit": (GOOD, {"hidden": (4, 0)}, "^`from_file` needs hidden layers of at least one unit each, but `hidden` is"),
    "fraction": (GOOD, {"held_out": 1.0}, "^`from_file` needs `held_out` .* from 0 to 0.9, but got 1.0"),
    "quotation": (GOOD + '1,"2"3,4\n', {}, "cannot be read as a table .*quotation marks"),
    "not UTF-8": (GOOD.encode("utf-16"), {}, "is not text in UTF-8"),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables_that_cannot_be_used(tmp_path, case):
    text, options, message = TABLES[case]
    (tmp_path / "rows.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        from_file(tmp_path / "rows.csv", **{"target": "y"} | options)


def test_files_that_are_not_there(tmp_path):
    table(tmp_path / "wine.csv", ["a", "b", "y"], numbers())
    with pytest.raises(FileNotFoundError, match="There is no file .*wines.csv`. Did you mean `wine.csv`"):
        from_file(tmp_path / "wines.csv", target="y")
    with pytest.raises(FileNotFoundError, match="There is no folder .*cellar` either"):
        from_file(tmp_path / "cellar" / "wine.csv", target="y")
    with pytest.raises(ValueError, match="is a folder. Name a file in it"):
        from_file(tmp_path, target="y")


def test_files_of_other_kinds(tmp_path):
    (tmp_path / "rows.xlsx").write_bytes(b"")
    with pytest.raises(ValueError, match=r"rows.xlsx` ends in none of `.csv`.*Convert it"):
        from_file(tmp_path / "rows.xlsx", target="y")
    (tmp_path / "rows.csv.gz").write_text(GOOD)
    with pytest.raises(ValueError, match="ends in `.gz`, but cannot be decompressed"):
        from_file(tmp_path / "rows.csv.gz", target="y")


ARRAYS = {
    "no target": ({"y": np.arange(20)}, {"target": None}, "has `x`, `y`, but no target"),
    "unknown target": ({"label": np.arange(20)}, {"target": "labels"}, "Did you mean `label`"),
    "lengths": ({"y": np.arange(19)}, {}, r"`y` .* has 19 rows, but no other array has as many: \{'x': \(20, 2\)\}"),
    "two targets a row": ({"y": np.ones((20, 2))}, {}, r"has shape \(20, 2\), but one number for every row"),
    "text": ({"y": np.arange(20), "w": np.array(["w"] * 20)}, {}, "`w` .* of type `<U1`, but real numbers"),
    "complex target": ({"y": np.arange(20) * 1j}, {}, "`y` .* of type `complex128`"),
    "objects": ({"y": np.arange(20), "o": np.array([{}] * 20)}, {}, "Array `o` .* cannot be read .*can run code"),
    "NaN": ({"y": np.arange(20), "v": np.full(20, np.nan)}, {}, "`v` .* 20 empty or NaN cells, the first in row 0"),
    "infinite": ({"y": np.full(20, np.inf)}, {}, "`y` .* has 20 infinite cells"),
    "no inputs": ({"y": np.arange(20)}, {"ignore": ["x"]}, "no inputs besides the target `y`"),
    "few": ({"y": np.arange(3), "x": np.arange(3)}, {}, "has 3 rows of data"),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_archives_that_cannot_be_used(tmp_path, case):
    arrays, options, message = ARRAYS[case]
    np.savez(tmp_path / "all.npz", **{"x": np.ones((20, 2))} | arrays)
    with pytest.raises(ValueError, match=message):
        from_file(tmp_path / "all.npz", **{"target": "y"} | options)


def test_archives_that_are_none(tmp_path):
    (tmp_path / "all.npz").write_bytes(b"something else")
    with pytest.raises(ValueError, match="is not an archive of arrays. Write it with `np.savez"):
        from_file(tmp_path / "all.npz", target="y")


def test_images_that_cannot_be_used(tmp_path):
    path, pixels = images(tmp_path)
    with pytest.raises(ValueError, match="holds only images.*Next to it: `some-labels-idx1-ubyte`"):
        from_file(path, target=None)
    with pytest.raises(FileNotFoundError, match="no file of labels `nothing`.*Next to it: `some-labels"):
        from_file(path, target="nothing")
    with pytest.raises(ValueError, match=r"nothing named `a`\. Its columns have no names"):
        from_file(path, target="some-labels-idx1-ubyte", ignore=["a"])
    labels = tmp_path / "some-labels-idx1-ubyte"
    labels.write_bytes(idx(np.zeros(39, np.uint8)))
    with pytest.raises(ValueError, match=r"has shape \(40, 3, 2\) and .* has shape \(39,\).*belong together"):
        from_file(path, target=labels.name)
    labels.write_bytes(idx(np.zeros(40, np.uint8))[:-1])
    with pytest.raises(ValueError, match=r"truncated: an array of shape \(40,\) takes 48 bytes, .* only 47"):
        from_file(path, target=labels.name)
    path.write_bytes(gzip.compress(idx(pixels)))
    with pytest.raises(ValueError, match="does not begin like an IDX file: its first bytes are `1f 8b 08 00`"):
        from_file(path, target=labels.name)


# Fetching

TEXT = b"Call me Ishmael." * 9000


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("NATGRAD_DATA", raising=False)
    monkeypatch.setattr(data, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def published(tmp_path, raw=TEXT, name="book.txt", **fields):
    path = tmp_path / "published.gz"
    path.write_bytes(gzip.compress(raw))
    return data.File(name, hashlib.sha256(TEXT).hexdigest(), path.as_uri(), **fields)


def test_what_is_fetched_is_kept(tmp_path, cache):
    file = published(tmp_path)
    assert data.content(file) == TEXT
    (tmp_path / "published.gz").unlink()
    assert data.content(file) == TEXT
    assert [path.name for path in cache.iterdir()] == ["book.txt.gz"]


def test_an_archive_is_unpacked(tmp_path, cache):
    file = published(tmp_path, member="package/data.txt")
    with tarfile.open(tmp_path / "published.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("package/data.txt")
        entry.size = len(TEXT)
        archive.addfile(entry, io.BytesIO(TEXT))
    assert data.content(file) == TEXT
    assert gzip.decompress((cache / "book.txt.gz").read_bytes()) == TEXT
    with pytest.raises(ValueError, match="is not `other.txt` as published"):
        data.content(file._replace(name="other.txt", member="package/missing.txt"))


def test_a_directory_of_ones_own_comes_first(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("NATGRAD_DATA", str(tmp_path))
    file = published(tmp_path, name="published")._replace(address="file:///nowhere")
    assert data.content(file) == TEXT
    assert not cache.exists()


PACKED = {"another": gzip.compress(b"another book"), "no gzip": b"no gzip", "cut short": gzip.compress(TEXT)[:-9]}


@pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED)
def test_another_file_is_not_taken(tmp_path, cache, packed):
    file = published(tmp_path)
    (tmp_path / "published.gz").write_bytes(packed)
    with pytest.raises(
        ValueError, match="The download from file:.* its checksum differs, so it was discarded.*NATGRAD_DATA"
    ):
        data.content(file)
    assert not cache.exists()
    cache.mkdir()
    (cache / "book.txt.gz").write_bytes(packed)
    with pytest.raises(ValueError, match="book.txt.gz` is not `book.txt` as published: .*Remove it and try again"):
        data.content(file)


def test_failure_says_where_to_put_the_file(tmp_path, cache):
    file = published(tmp_path)._replace(address=(tmp_path / "missing").as_uri())
    with pytest.raises(
        FileNotFoundError, match="could not be downloaded from file:.*Put `book.txt.gz` into `.*cache`, or"
    ):
        data.content(file)


class Server(http.server.BaseHTTPRequestHandler):
    """Half of what it announces, unless the whole is asked for."""

    def do_GET(self):
        packed = gzip.compress(TEXT)
        self.send_response(200)
        self.send_header("Content-Length", str(len(packed)))
        self.end_headers()
        self.wfile.write(packed if self.path == "/whole" else packed[: len(packed) // 2])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def address():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_half_a_file_is_not_kept(tmp_path, cache, address):
    file = published(tmp_path)
    with pytest.raises(ConnectionError, match=r"Only \d+ of \d+ bytes came from http.*they were discarded"):
        data.content(file._replace(address=f"{address}/half"))
    assert not cache.exists()
    assert data.content(file._replace(address=f"{address}/whole")) == TEXT


def test_nothing_partial_stays_in_the_cache(tmp_path, cache, monkeypatch):
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError("no space")))
    assert data.content(published(tmp_path)) == TEXT
    assert list(cache.iterdir()) == []


def test_texts_in_numbers():
    numbers, count = data.in_numbers("banana")
    assert (numbers.tolist(), count) == ([1, 0, 2, 0, 2, 0], 3)


def test_scikit_learn_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="`digits` come with scikit-learn, which is not installed. Install"):
        PROBLEMS["digits"].make(0)
