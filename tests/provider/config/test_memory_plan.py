"""The memory plan: its figures, their truth, and the refusal of a provider that does not fit."""

from pathlib import Path

import msgspec
import pytest
import torch

from provider.config.memory_plan import check_plan, memory_plan
from provider.config.schema import MIB, ExecutorConfig, RelayConfig
from provider.serve import Provider
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import ConfigError
from symbiosis_priv.kernels import bits_per_weight
from tests.provider.conftest import Configure


def test_the_plan_equals_the_memory_that_is_loaded(configure: Configure, store: WeightStore) -> None:
    manifest = store.manifest()
    packed = sum(store.matrix(index).nbytes for index in range(len(manifest.groups)))
    needs = {need.what: need for need in memory_plan(configure(), manifest, store.served)}
    ring = needs["ring weights, both directions"]
    assert ring.size <= packed <= 1.5 * ring.size  # small matrices are padded to a kernel's block size
    assert (ring.place, ring.kind) == ("cpu", f"int{bits_per_weight(10, 'cpu')}")
    assert needs["matrices in flight"].size == 64 * MIB
    assert "float weights" not in needs
    with_floats = configure(executor=ExecutorConfig(float_path=True, float_memory_mib=100))
    floats = next(need for need in memory_plan(with_floats, manifest, store.served) if need.what == "float weights")
    assert (floats.size, floats.kind) == (100 * MIB, "float32")


def test_the_plan_counts_every_process(configure: Configure, store: WeightStore) -> None:
    """Four ranks share the weights; each of them gathers a layer group and is a separate process."""

    def needs(executor: ExecutorConfig) -> dict[str, int]:
        return {n.what: n.size for n in memory_plan(configure(executor=executor), store.manifest(), store.served)}

    alone, ranks = needs(ExecutorConfig()), needs(ExecutorConfig(ranks=4))
    apart = needs(ExecutorConfig(endpoint="ipc:///run/somewhere/executor.sock"))
    ring, python = "ring weights, both directions", "Python and torch"
    assert ranks[ring] == apart[ring] == alone[ring]
    assert (apart[python], ranks[python]) == (2 * alone[python], 5 * alone[python])
    largest = max(group.inputs * group.stacked_outputs for group in store.manifest().groups)
    assert ranks["a layer group, gathered by each rank"] == 4 * largest * bits_per_weight(10, "cpu") // 8


def test_a_narrow_weight_takes_less_memory(configure: Configure, store: WeightStore) -> None:
    plans = {bits: msgspec.structs.replace(store.manifest(), weight_bits=bits) for bits in (8, 10, 12)}
    sizes = {bits: memory_plan(configure(), plan, store.served)[0].size for bits, plan in plans.items()}
    assert sizes[8] * 2 == sizes[12]
    assert sizes[8] * bits_per_weight(10, "cpu") == sizes[10] * 8


def test_a_plan_that_does_not_fit_is_refused_with_the_numbers(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = r"needs [\d,]+ MiB on cpu, of [\d,]+ MiB .* in flight 1,048,576 MiB"
    with pytest.raises(ConfigError, match=numbers):
        Provider(configure(max_inflight_mib=1 << 20)).start()
    monkeypatch.setattr("provider.config.memory_plan._container_limit", lambda: 10 * MIB)
    with pytest.raises(ConfigError, match="of 10 MiB"):
        Provider(configure()).start()


def test_a_plan_that_fits_passes(configure: Configure, store: WeightStore) -> None:
    check_plan(memory_plan(configure(), store.manifest(), store.served))


def test_the_memory_for_blocks_is_counted_where_they_are_accepted(configure: Configure, store: WeightStore) -> None:
    def size(relay: RelayConfig) -> int:
        config = configure(relay=relay)
        return sum(need.size for need in memory_plan(config, store.manifest(), store.served))

    accepts = RelayConfig(helpers=(Path("beta.pem"),), memory_mib=3)
    assert size(accepts) - size(RelayConfig(memory_mib=3)) == 3 * MIB


def test_only_served_layers_are_counted(configure: Configure, store: WeightStore) -> None:
    manifest = store.manifest()
    whole, *parts = (
        memory_plan(configure(), manifest, groups)[0].size for groups in (store.served, range(3), range(3, 9))
    )
    assert len(store.served) == 9
    assert sum(parts) == whole


def test_available_gpu_memory_excludes_other_processes(
    configure: Configure, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan reads the free memory of the configured device, and of one device per rank."""
    asked: list[torch.device] = []

    def free(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 1000, 80 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    for executor in (ExecutorConfig(device="cuda:1"), ExecutorConfig(device="cuda", ranks=2)):
        with pytest.raises(ConfigError, match="on cuda:"):
            check_plan(memory_plan(configure(executor=executor), store.manifest(), store.served))
    assert asked == [torch.device("cuda:1"), torch.device("cuda:0")]
    alone = memory_plan(configure(executor=ExecutorConfig(device="cuda")), store.manifest(), store.served)
    ranks = memory_plan(configure(executor=ExecutorConfig(device="cuda", ranks=2)), store.manifest(), store.served)
    ring = {need.place: need.size for need in ranks if need.what.startswith("ring weights")}
    assert ring == dict.fromkeys(("cuda:0", "cuda:1"), alone[0].size // 2)
