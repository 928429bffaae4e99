"""A module that is started this way is what `python -m` makes of it, in a process that rarely looks for garbage."""

from __future__ import annotations

import subprocess
from pathlib import Path

from symbiosis_priv import start

MODULE = """
import gc, sys
if __name__ == "__main__":
    print(sys.argv[1:], sys.modules["__main__"].__dict__ is globals(), gc.get_threshold()[0] > 10_000)
    sys.exit(7)
"""


def test_a_module_is_the_main_one_and_has_its_arguments_and_its_status(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(MODULE)
    done = subprocess.run(
        start.command("worker", "--rows", "3"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout == "['--rows', '3'] True True\n"
