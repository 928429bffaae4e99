"""A module that is started this way runs as with `python -m`; its process skips the last garbage collection."""

import subprocess
from pathlib import Path

import pytest

from symbiosis_priv.system import processes as start

MODULE = """
import gc, sys

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):
        print("found")

if __name__ == "__main__":
    print(sys.argv[1:], sys.modules["__main__"].__dict__ is globals())
    if "collect" in sys.argv:
        Garbage()
        gc.collect()
    Garbage()
    sys.exit(7)
"""


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--rows", "3"], "['--rows', '3'] True\n"), (["collect"], "['collect'] True\nfound\n")]
)
def test_a_module_runs_as_main_with_its_arguments_and_status(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "worker.py").write_text(MODULE)
    done = subprocess.run(
        start.command("worker", *arguments), capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout == said
