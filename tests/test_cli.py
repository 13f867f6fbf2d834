"""The command line, as a person at a terminal meets it."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

for package in ("plotly", "rich", "typer"):
    pytest.importorskip(package, reason=f"the command line needs {package}")

from typer.main import get_command  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from natgrad import _backend  # noqa: E402
from natgrad.cli import app  # noqa: E402

pytestmark = [pytest.mark.users_defaults, pytest.mark.float32]
ROOT = Path(__file__).parents[1]
COMMANDS = ("compare", "train", "inspect", "new", "doctor", "figures")

PROBLEM = """
import jax
import jax.numpy as jnp
import natgrad as ng


def model(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


def problem(seed=0):
    x = jax.random.normal(jax.random.key(0), (30, 2))
    y = (x[:, 0] > x[:, 1]).astype(int)
    first, second = jax.random.split(jax.random.key(seed))
    params = {"in": jax.random.normal(first, (2, 4)), "out": jax.random.normal(second, (4, 2))}
    data, held_out = (x[:20], y[:20]), (x[20:], y[20:])
    return ng.Problem(model, ng.Categorical(), params, data, held_out=held_out, batch_size=10, steps=20)
"""

# A metric that interrupts its process when it is looked at for the fortieth time.
LOOKS = """

numbers = iter(range(100_000))


def tick():
    import os, signal, threading

    if next(numbers) == 40:
        threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


def look(z, y):
    jax.debug.callback(tick)
    return 0.0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to work in, with a problem file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PROBLEM)
    return tmp_path


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def started(folder: Path, *arguments: str) -> subprocess.Popen:
    """The command in a process of its own, with the compilation cache of the tests."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    # Background jobs of a shell ignore SIGINT, and so do their children unless told otherwise.
    code = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('natgrad', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=os.environ | cache, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def report_in(folder: Path) -> dict:
    jsonschema = pytest.importorskip("jsonschema")
    report = json.loads((folder / "report.json").read_text())
    schema = json.loads((ROOT / "natgrad" / "report" / "schema.json").read_text())
    jsonschema.validate(report, schema)
    return report


# What works ----------------------------------------------------------------------------------------------------------


def test_compare_writes_a_report_and_says_where(folder):
    result = run(
        "compare", "mine.py:problem", "--methods", "kfac,adam", "--steps", "10", "--out", "found", "--seed", "4"
    )
    assert result.exit_code == 0, result.output
    assert "Report: found/report.html" in result.stdout
    assert "\x1b" not in result.stdout and result.stderr == ""
    assert max(map(len, result.stdout.splitlines())) <= 100
    report = report_in(folder / "found")
    assert [each["name"] for each in report["methods"]] == ["K-FAC", "Adam"]
    assert report["settings"] == {"command": "compare", "steps": 10, "seconds": None, "seed": 4}
    assert report["verdict"] in " ".join(result.stdout.split())
    for each in report["methods"]:
        assert each["curve"][-1]["step"] == 10
        assert each["final_loss"] == each["curve"][-1]["loss"] < each["curve"][0]["loss"]
    assert "runpy.run_path('mine.py')['problem'](seed=4)" in report["recommended"][0]["code"]
    names = {each["structure"] for each in report["geometry"]["approximations"]}
    assert names == {"exact", "gradient", "K-FAC"}


@pytest.mark.slow
def test_json_is_all_there_is_and_quiet_is_nothing(folder):
    arguments = ("compare", "mine.py:problem", "--methods", "adam", "--steps", "2", "--out", "found")
    printed = run(*arguments, "--json").stdout
    assert json.loads(printed) == report_in(folder / "found")
    assert run(*arguments, "--quiet").output == ""


@pytest.mark.slow
def test_inspect_at_the_start_and_at_a_checkpoint(folder):
    assert run("train", "mine.py:problem", "--steps", "3", "--out", "run", "--quiet").exit_code == 0
    result = run("inspect", "mine.py:problem", "--checkpoint", "run", "--out", "seen")
    assert result.exit_code == 0, result.output
    report = report_in(folder / "seen")
    assert [point["name"] for point in report["geometry"]["points"]] == ["at the start", "after 3 steps"]
    assert report["methods"] == [] and "rank" in report["verdict"]
    trained = report_in(folder / "run")["geometry"]["points"][0]["spectrum"]
    np.testing.assert_allclose(report["geometry"]["points"][1]["spectrum"], trained, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_training_on_a_table(folder):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2))
    rows = [f"{a},{b},{3 * a - b + 100}" for a, b in x]
    (folder / "houses.csv").write_text("\n".join(["area,age,price", *rows]))
    result = run("train", "houses.csv", "--target", "price", "--hidden", "4", "--steps", "15", "--out", "run")
    assert result.exit_code == 0, result.output
    report = report_in(folder / "run")
    assert report["methods"][0]["final_metrics"]["explained variance"] > 0.9
    assert "regression of `price`" in report["problem"]["about"]


@pytest.mark.slow
def test_new_problems_run(folder):
    assert "natgrad compare own/first.py:problem" in run("new", "own/first.py").stdout
    result = run("compare", "own/first.py:problem", "--methods", "sgd", "--steps", "2", "--out", "found")
    assert result.exit_code == 0, result.output
    again = run("new", "own/first.py")
    assert again.exit_code == 1 and "exists already" in again.stderr and "--force" in again.stderr
    assert run("new", "own/first.py", "--force").exit_code == 0
    assert run("new", "own/first").exit_code == 2


def test_doctor_tests_and_tells(monkeypatch):
    from natgrad.cli import doctor

    sound = run("doctor")
    assert sound.exit_code == 0 and "All tests passed" in sound.stdout
    assert re.search(r"jax +\d", sound.stdout) and "Devices:" in sound.stdout and "Precision:" in sound.stdout
    monkeypatch.setattr(doctor, "checks", lambda: [doctor.Check("a product", float("inf"), 1.0)])
    broken = run("doctor")
    assert broken.exit_code == 1 and "FAILED" in broken.stdout and "cannot be trusted" in broken.stderr
    monkeypatch.setattr(_backend, "error_of", lambda backend: 0.78)
    miscompiled = run("doctor")
    assert miscompiled.exit_code == 1 and "FAILED compiled programs" in miscompiled.stdout
    assert "computes wrong numbers" in miscompiled.stderr and "bug in natgrad" not in miscompiled.stderr


@pytest.mark.slow
def test_tensorboard_events(folder):
    pytest.importorskip("tensorboardX")
    result = run("train", "mine.py:problem", "--steps", "2", "--out", "run", "--tensorboard", "--quiet")
    assert result.exit_code == 0, result.output
    assert [path.stat().st_size > 0 for path in (folder / "run" / "tensorboard").iterdir()] == [True]


# Interruptions -------------------------------------------------------------------------------------------------------


def parameters(folder: Path) -> dict[str, np.ndarray]:
    (newest,) = sorted((folder / "checkpoints").glob("step-*30.npz"))
    with np.load(newest) as arrays:
        return {name: arrays[name] for name in arrays.files}


def wait_for(condition, process: subprocess.Popen) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_parameters(folder):
    arguments = ("train", "mine.py:problem", "--steps", "30", "--checkpoint-every", "7")
    whole = started(folder, *arguments, "--out", "whole")
    cut = started(folder, *arguments, "--out", "cut")
    wait_for(lambda: (folder / "cut" / "checkpoints" / "step-000000014.npz").exists(), cut)
    cut.send_signal(signal.SIGKILL)
    cut.communicate()
    steps_before = len((folder / "cut" / "log.jsonl").read_text().splitlines())
    _, error = whole.communicate()
    assert whole.returncode == 0, error
    again = started(folder, *arguments, "--out", "cut", "--resume")
    _, error = again.communicate()
    assert again.returncode == 0, error
    expected, found = parameters(folder / "whole"), parameters(folder / "cut")
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    lines = [json.loads(line) for line in (folder / "cut" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(31)) and steps_before >= 14
    curves = [
        [(point["step"], point["loss"]) for point in report_in(folder / name)["methods"][0]["curve"]]
        for name in ("whole", "cut")
    ]
    assert curves[0] == curves[1]


def test_an_interrupted_comparison_leaves_a_report(folder):
    (folder / "mine.py").write_text(PROBLEM.replace("steps=20", "metrics={'looks': look}") + LOOKS)
    process = started(folder, "compare", "mine.py:problem", "--methods", "adam", "--steps", "5000", "--out", "found")
    out, error = process.communicate(timeout=120)
    assert process.returncode == 130, (out, error)
    assert "interrupted" in out and "Traceback" not in error
    report = report_in(folder / "found")
    assert report["status"] == "interrupted" and 0 < report["methods"][0]["curve"][-1]["step"] < 5000


@pytest.mark.slow
def test_runs_are_not_mixed_up(folder):
    arguments = ("train", "mine.py:problem", "--steps", "2", "--out", "run", "--quiet")
    nothing = run(*arguments, "--resume")
    assert nothing.exit_code == 1 and "There is no run in `run` to resume" in nothing.stderr
    assert run(*arguments).exit_code == 0
    again = run(*arguments)
    assert again.exit_code == 1 and "already holds a run" in again.stderr and "--resume" in again.stderr
    other = run(*arguments, "--resume", "--structure", "diagonal")
    assert other.exit_code == 1 and "was started with another structure" in other.stderr
    for change, match in (
        (("(30, 2)", "(31, 2)"), "other data or initial parameters"),
        (("jnp.tanh", "jnp.sin"), "another model or objective"),
        (("batch_size=10", "batch_size=5"), "another batch size"),
    ):
        (folder / "mine.py").write_text(PROBLEM.replace(*change))
        other = run(*arguments, "--resume")
        assert other.exit_code == 1 and match in other.stderr
    (folder / "mine.py").write_text("# The same.\n" + PROBLEM)
    assert run(*arguments, "--resume").exit_code == 0
    assert run(*arguments[:2], "--steps", "4", *arguments[4:], "--resume").exit_code == 0
    assert len((folder / "run" / "log.jsonl").read_text().splitlines()) == 5


# Mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "match"),
    [
        ("compare digit", 1, "no problem `digit`. Did you mean `digits`?"),
        ("compare no.py:problem", 1, "no file `no.py`. Write one to start from with `natgrad new no.py`"),
        ("compare mine.py:other", 1, "has no `other`. It has model, problem"),
        (
            "compare mine.py:model",
            1,
            "needs the arguments params, x, but the command line passes only `seed`",
        ),
        ("compare mine.py:problem --hidden 3", 1, "`--hidden` is for data files"),
        ("compare digits --batch-size 3", 1, "`--batch-size` is for data files"),
        ("compare mine.py:problem --out mine.py", 1, "cannot be written to `mine.py`"),
        ("compare mine.py:problem --methods kfac,adamm", 2, "no method `adamm`"),
        ("compare mine.py:problem --steps 0", 2, "1"),
        ("train mine.py:problem --structure dense", 2, "no structure `dense`"),
        ("train data.csv --target price", 1, "There is no file `data.csv`"),
        ("train data.csv --target price --hidden 3,x", 1, "`--hidden` needs the widths"),
        ("inspect mine.py:problem --checkpoint nowhere", 1, "neither a file nor the folder of a run"),
        ("figures nothing", 2, "no figure named nothing"),
        ("sail", 2, "No such command"),
    ],
)
def test_mistakes_get_a_sentence_and_an_exit_code(folder, arguments, code, match):
    result = run(*arguments.split())
    assert result.exit_code == code, result.output
    assert match in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("change", "line", "match"),
    [
        (('params["out"]\n', 'params["up"]\n'), 8, "KeyError: 'up'"),
        (("(4, 2))}", "(5, 2))}"), 8, "TypeError"),
        (("def problem(seed=0):", "def problem(seed=0)"), 11, "SyntaxError"),
        (("jax.random.split(jax.random.key(seed))", "undefined"), 14, "NameError"),
    ],
)
def test_mistakes_in_a_problem_file_point_to_its_line(folder, change, line, match):
    assert change[0] in PROBLEM
    (folder / "mine.py").write_text(PROBLEM.replace(*change))
    result = run("compare", "mine.py:problem", "--methods", "adam", "--steps", "1")
    assert result.exit_code == 1
    assert f"Error: mine.py, line {line}:" in result.stderr and match in result.stderr
    assert PROBLEM.replace(*change).splitlines()[line - 1].strip() in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in run("compare", "mine.py:problem", "--methods", "adam", "--steps", "1", "--debug").stderr


def test_a_problem_that_is_none(folder):
    (folder / "mine.py").write_text("def problem():\n    return 3\n")
    result = run("compare", "mine.py")
    assert result.exit_code == 1 and "gave `int`, but the command line needs `ng.Problem(" in result.stderr


def test_a_loss_that_is_not_finite_at_the_start(folder):
    (folder / "mine.py").write_text(PROBLEM.replace('params["out"]\n', 'params["out"] + jnp.log(-1.0)\n'))
    result = run("compare", "mine.py:problem", "--methods", "adam", "--steps", "1")
    assert result.exit_code == 1 and "The loss at the initial parameters is nan" in result.stderr


def test_files_and_metrics_may_have_any_name(folder):
    (folder / "types.py").write_text(PROBLEM.replace("steps=20", "metrics={'[/loss]': lambda z, y: z.mean()}"))
    result = run("compare", "types.py:problem", "--methods", "adam", "--steps", "1", "--out", "found")
    assert result.exit_code == 0 and "[/loss]" in result.stdout, result.output


def test_a_comparison_of_which_nothing_runs_fails(folder):
    (folder / "wide.py").write_text(
        PROBLEM.replace("(2, 4)", "(2, 900)").replace("(4, 2)", "(900, 2)").replace("(30, 2)", "(1500, 2)")
        .replace("[:20]", "[:1400]").replace("[20:]", "[1400:]").replace("batch_size=10", "batch_size=1200")
    )  # fmt: skip
    result = run("compare", "wide.py:problem", "--methods", "exact", "--out", "found")
    assert result.exit_code == 1 and "No method could run" in result.stderr
    assert "3,600 parameters and 2,400 outputs" in report_in(folder / "found")["methods"][0]["note"]


# Help ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command):
    result = run(command, "--help")
    assert result.exit_code == 0 and re.search(r"Examples?: natgrad", result.stdout)


def test_commands_of_the_guide_exist():
    group = get_command(app)
    lines = re.findall(r"^\$ (natgrad .*)$", (ROOT / "docs" / "command_line.md").read_text(), re.MULTILINE)
    assert len(lines) > 10
    for line in lines:
        words = shlex.split(line.partition("#")[0])[1:]
        named = group.commands.get(words[0])
        options = {option for each in (named or group).params for option in each.opts}
        assert named is not None or words[0] in options | {"--install-completion"}, line
        assert {word for word in words[1:] if word.startswith("--")} <= options, line


def test_completion_knows_the_problems():
    from natgrad.cli.options import complete_problem

    assert [name for name, _ in complete_problem("digits")] == ["digits", "digits-autoencoder"]
