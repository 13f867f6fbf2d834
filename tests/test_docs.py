"""The documentation builds without a warning. Its code blocks are tests of their own."""

import os
import subprocess
import sys
from pathlib import Path


def test_documentation_builds_strictly(tmp_path):
    # Not `--quiet`, which would also keep warnings from failing the build.
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    assert (tmp_path / "index.html").exists()
