"""Shared by all tests: no network, a separate cache, and Hypothesis without time limits."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd"))):  # no driver of a GPU; asking torch takes seconds
    # tests the GPU kernel without a GPU; read when Triton is imported; `make gpu` has set it
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Read when transformers is imported, so before any test module is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

from symbiosis_priv.system.processes import end_quickly
from tests import warm

if TYPE_CHECKING:
    from tests.vouching import Vouching

# Otherwise each of some hundred processes compiles every module of this project again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Examples are random (a failure prints the blob that reproduces it). Timing is not a property, because machines are
# shared.
settings.register_profile(
    "default",
    max_examples=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=2000)
settings.register_profile("quick", settings.get_profile("default"), max_examples=20)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Under pytest-xdist, the longest files start first, so that the workers end together.
LONGEST = (
    "tests/threat_model/",
    "tests/tenant/bench/",
    "tests/provider/shards/",
    "tests/end_to_end/",
    "tests/compatibility/",
    "tests/tenant/cli/",
    "tests/tenant/demo/",
    "tests/provider/gateway/",
    "tests/symbiosis_priv/kernels/",
    "tests/examples/",
    "tests/tenant/",
    "tests/provider/",
)
ONE_REPORT = (
    "tests/threat_model/active/test_lying_providers.py",
    "tests/threat_model/active/test_machine.py",
    "tests/threat_model/test_planted.py",
    "tests/threat_model/test_suite.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--compatibility",
        choices=("some", "all", "write"),
        default="some",
        help="which pairs of architecture and PEFT method to try; write: try all, and write docs/compatibility/",
    )


def pytest_configure(config: pytest.Config) -> None:
    end_quickly()  # the command line's processes set this, too
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        os.environ[warm.ADDRESS] = warm.start()
        return  # pytest-xdist's controller runs no test
    gc.disable()  # until `pytest_collection_finish`: imports free next to nothing
    import torch

    # Matrices in tests are tiny, and providers need the other core. Set here, because session fixtures run first.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def order(item: pytest.Item) -> tuple[int, str]:
        file = item.nodeid.partition("::")[0]
        return next((i for i, part in enumerate(LONGEST) if file.startswith(part)), len(LONGEST)), file

    items.sort(key=order)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With pytest-xdist, one worker runs all tests of a file, because they share its fixtures."""
    from xdist.scheduler.loadscope import LoadScopeScheduling  # type: ignore[import-untyped]

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "report" if file in ONE_REPORT else file

    return ByFile(config, log)


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()  # torch and transformers make a million objects; later collections skip them


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    """The last lines say where each test hung: a record of a run may keep no others."""
    yield
    for report in (*terminalreporter.getreports("error"), *terminalreporter.getreports("failed")):
        if "from pytest-timeout" in report.longreprtext:
            entries = [each.reprfileloc for each in report.longrepr.reprtraceback.reprentries]
            where = " > ".join(f"{place.path}:{place.lineno}" for place in entries if place is not None)
            terminalreporter.write_line(f"{report.nodeid} hung in {report.when}: {where}")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the quantised weights and verification keys of tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SYMBIOSIS_PRIV_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _services_are_forks() -> Iterator[None]:
    """Start services of `LocalFederation`, and executors of their own process, as forks, which import torch no second
    time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("symbiosis_priv.harness.managed_process.Popen", warm.Popen)
        patch.setattr("provider.executor.supervisor.Popen", warm.Popen)
        yield


@pytest.fixture(scope="module", autouse=True)
def _collections_are_short() -> None:
    """Let the collections of a module skip what earlier modules have left. Trainer collects twice in each run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Set torch back to one thread for each module."""
    yield
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def python_interrupts() -> Iterator[None]:
    """Python's handler of SIGINT, which is ignored if the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def vouching(tmp_path_factory: pytest.TempPathFactory) -> "Vouching":
    from tests.vouching import Vouching  # imports torch

    return Vouching.in_folder(tmp_path_factory.mktemp("vouching"))


@pytest.fixture(scope="session")
def save_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`save_llama(...)` writes a Llama with grouped queries: 2 blocks of 4 layer groups, and an untied head."""
    from tests.compatibility.families import build

    def save(**changes: Any) -> Path:
        path = tmp_path_factory.mktemp("llama")
        tokens = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 2048}
        sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "head_dim": None}
        build("LlamaForCausalLM", **tokens | sizes | changes).save_pretrained(path)
        return path

    return save


def _base_model(tmp_path_factory: pytest.TempPathFactory, **recipe: Any) -> Path:
    """A base model that the workers of pytest-xdist share. No test changes it."""
    from symbiosis_priv.harness.base_model import Pretraining, cached_base_model

    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    return cached_base_model(shared / "base-models", tmp_path_factory.mktemp("base"), recipe=Pretraining(**recipe))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama trained on the demo's text, with its tokenizer."""
    return _base_model(tmp_path_factory, steps=100, batch=4, window=64, sentences=4_000, vocab=512, width=128, blocks=2)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that is hardly trained, with a byte-level tokenizer: 2 blocks of 4 layer groups, and a tied head."""
    return _base_model(tmp_path_factory, steps=4, batch=2, window=16, sentences=300, vocab=320, width=64, blocks=2)


@pytest.fixture(scope="session")
def save_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`save_gpt2(...)` writes a GPT-2: transposed weights (`Conv1D`), a tied head, biases that are not zero."""

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    def save(*, bias_std: float = 1.0, **sizes: Any) -> Path:
        path = tmp_path_factory.mktemp("gpt2")
        torch.manual_seed(1)
        model = GPT2LMHeadModel(GPT2Config(n_head=4, **sizes))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=bias_std)
        model.save_pretrained(path)
        return path

    return save
