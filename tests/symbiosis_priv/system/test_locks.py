"""One holder at a time, whose lock ends with its descriptor."""

import os
import threading
from pathlib import Path

from symbiosis_priv.system.locks import lock


def test_a_folder_has_one_holder(tmp_path: Path) -> None:
    first, second = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    try:
        assert lock(first)
        assert not lock(second)
        assert not lock(second, patience_s=0.1)
        release = threading.Timer(0.1, os.close, [first])
        release.start()
        assert lock(second, patience_s=60)
        release.join()
    finally:
        os.close(second)
