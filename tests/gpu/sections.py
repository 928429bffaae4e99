"""The sections of `make gpu`. Each prints its rows of figures immediately, as lines of JSON."""

import argparse
import gc
import importlib.util
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]
_NEEDED = (
    *("accelerate", "cryptography", "huggingface-hub", "hypothesis", "jinja2", "msgspec", "numpy", "peft"),
    *("prometheus-client", "pytest", "pytest-timeout", "pyzmq", "rich", "safetensors", "tokenizers", "torch"),
    *("transformers", "triton", "typer"),
    *("cffi", "iniconfig", "pluggy", "psutil", "pycparser", "pygments", "sortedcontainers"),  # those that these need
)
_BESIDE_TRANSFORMERS = (  # what it needs too, where it is missing or too old
    *("annotated-doc", "annotated-types", "anyio", "click", "h11", "hf-xet", "httpcore2", "httpx2", "idna"),
    *("markdown-it-py", "mdurl", "packaging", "pydantic", "pydantic-core", "pyyaml", "regex", "shellingham"),
    *("tqdm", "truststore", "typing-inspection"),
)
_IMPORTED = "peft", "tenant.model.hf"  # with what packages need themselves
_LIBC = ("_2_28", "_2_17", "2014")


@dataclass(frozen=True)
class Options:
    """Options of every section. With `cpu`, shapes are small and there is no GPU."""

    cpu: bool

    @property
    def device(self) -> str:
        """The device of products. With its index: CUDA's current device is set to it."""
        return "cpu" if self.cpu else "cuda:0"


def machine(options: Options) -> Iterator[Row]:
    """Checks that all requirements are present: packages, a C compiler and Python's headers for Triton, a GPU."""
    yield {"python": platform.python_version(), "cpu": platform.processor(), "cores": os.cpu_count()}
    missing = []
    least = dict(re.findall(r'"([a-z-]+)>=([0-9.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    for name in _NEEDED:
        found = importlib.util.find_spec({"pyzmq": "zmq"}.get(name, name.replace("-", "_"))) is not None
        try:
            number = version(name)
        except PackageNotFoundError:
            number = ""
        found &= not number or _numbers(number) >= _numbers(least.get(name, ""))
        missing += [] if found else [name]
        yield {"package": name, "version": number, "here": found}
    try:
        for module in () if missing else _IMPORTED:
            importlib.import_module(module)
    except ImportError as error:
        missing = [error.name or str(error)]
        yield {"package": missing[0], "version": "", "here": False}
    if "transformers" in missing:
        missing += _BESIDE_TRANSFORMERS
    if missing:
        python = f"--python-version {platform.python_version()} --only-binary :all: --no-deps"
        builds = " ".join(f"--platform manylinux{libc}_{platform.machine()}" for libc in _LIBC)
        where = "where there is a network (this machine, or another clone whose folder .gpu you copy here)"
        command = f"python3 -m pip download --dest .gpu {python} {builds} --constraint constraints.txt"
        sys.exit(f"packages are missing, or too old. Type {where}, then make gpu again:\n{command} {' '.join(missing)}")
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    header = Path(sysconfig.get_path("include"), "Python.h")
    yield {"compiler": compiler, "python_h": header.is_file()}
    from symbiosis_priv import native

    yield {"native_library": native.library() is not None}
    import torch

    if options.device.startswith("cuda"):
        yield {"driver": (told := _driver()), "here": torch.cuda.is_available()}
        if not torch.cuda.is_available():
            sys.exit(f"torch {torch.__version__} sees no GPU (driver: {told or 'none'}): install a build for it")
        found_gpu = torch.cuda.get_device_properties(options.device)
        yield {
            "gpu": found_gpu.name,
            "capability": f"{found_gpu.major}.{found_gpu.minor}",
            "processors": found_gpu.multi_processor_count,
            "memory_mib": found_gpu.total_memory >> 20,
            "l2_mib": found_gpu.L2_cache_size >> 20,
            "cuda": torch.version.cuda,
        }


def _numbers(number: str) -> list[int]:
    return [int(part) for part in re.findall(r"[0-9]+", number.partition("+")[0])]


def _driver() -> str:
    """What NVIDIA's driver says of the first GPU, beside torch; empty without it."""
    facts = "driver_version,pcie.link.gen.max,pcie.link.width.max,power.limit,clocks.max.sm"
    try:
        words = ["nvidia-smi", f"--query-gpu={facts}", "--format=csv,noheader", "--id=0"]
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def kernels(options: Options) -> Iterator[Row]:
    """The self-test of every kernel that supports the device, with its error if it fails; on a GPU, of every tile."""
    import torch

    from symbiosis_priv.kernels import KERNELS, Kernel, self_test

    device = torch.device(options.device)
    for kernel, bits in product(KERNELS.values(), (10, 8)):
        if not kernel.supports(device) or (bits == 8 and not kernel.is_candidate(device)):
            continue
        found: list[Row] = []

        def passes(program: Kernel, bits: int = bits, found: list[Row] = found) -> bool:
            begun = time.perf_counter()
            try:
                result = "exact" if self_test(program, device, bits) else "NOT EXACT"
            except Exception as error:  # the section must show the error of any kernel
                result = f"{type(error).__qualname__}: {error}"[:2000]
            row = {"kernel": program.name, "weight_bits": bits, "result": result}
            found.append({**row, "seconds": time.perf_counter() - begun})
            return result == "exact"

        _ = passes(kernel) if options.cpu else kernel.admit(passes, device, bits)
        yield from found


def tests(options: Options) -> Iterator[Row]:
    """The tests that are marked `gpu`."""
    files = [
        str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout[-8000:], file=sys.stderr)
    yield {"files": len(files), "summary": done.stdout.strip().splitlines()[-1] if done.stdout else done.stderr[-500:]}
    if done.returncode:
        sys.exit(1)


def products(options: Options) -> Iterator[Row]:
    """Every exact kernel at the shapes of an 8 B model's MLP, compared with bfloat16; and the chosen kernel as `chips`
    computes it by data sheet."""
    import torch

    from symbiosis_priv.arithmetic.ring import DIRECTIONS
    from symbiosis_priv.kernels import KERNELS, RingMatrix, is_exact, probe_rows

    device = torch.device(options.device)
    if not options.cpu:
        yield from _chosen_kernel(device)
    kernels = [kernel for kernel in KERNELS.values() if kernel.supports(device)]
    for inputs, outputs in [(64, 96)] if options.cpu else [(4096, 28672), (14336, 4096)]:
        weight = torch.randint(-511, 512, (outputs, inputs), dtype=torch.int16, device="cpu")
        packed = {kernel.layout: kernel.pack(weight, weight_bits=10).to(device) for kernel in kernels}
        matrix = RingMatrix(weight, weight_bits=10, device=device)
        for direction, count in product(DIRECTIONS, [1, 4] if options.cpu else [1, 16, 256]):
            width, columns = matrix.columns(direction)
            left = torch.randn(count, width, dtype=torch.bfloat16, device=device)
            right = torch.randn(width, columns, dtype=torch.bfloat16, device=device)
            micros = 1e6 * _median_s(partial(torch.mm, left, right), options.device, repeat=5)
            rows = probe_rows(count, width).to(device)
            out = torch.empty((count, columns), dtype=torch.int32, device=device)
            shape = {"inputs": inputs, "outputs": outputs, "direction": direction, "rows": count, "bfloat16_us": micros}
            for kernel in kernels:
                data = packed[kernel.layout]
                try:
                    if not is_exact(kernel, weight, data, rows.cpu(), direction=direction):
                        continue
                except Exception:  # the section `kernels` shows it
                    continue
                run = partial(kernel.product, data, rows, direction, out)
                its_us = 1e6 * _median_s(run, options.device, repeat=5)
                chosen = "yes" if kernel is matrix.chosen(count) else ""
                row = {"kernel": kernel.name, "chosen": chosen, "product_us": its_us, "over_bfloat16": its_us / micros}
                yield {**shape, **row}


def _chosen_kernel(device: Any) -> Iterator[Row]:
    """The product of `chips.table` by device time, over many launches with weights that no cache holds."""
    import torch
    from triton.testing import do_bench

    from symbiosis_priv.kernels import RingMatrix, probe_rows
    from tests.gpu.chips import INPUTS, OUTPUTS, ROWS

    floats = torch.randn(INPUTS, OUTPUTS, dtype=torch.bfloat16, device=device)
    for weight_bits in (10, 8):
        top = (1 << (weight_bits - 1)) - 1
        weight = torch.randint(-top, top + 1, (OUTPUTS, INPUTS), dtype=torch.int16)
        matrix = RingMatrix(weight, weight_bits=weight_bits, device=device)
        for count in ROWS:
            rows, out = (
                probe_rows(count, INPUTS).to(device),
                torch.empty(count, OUTPUTS, dtype=torch.int32, device=device),
            )
            left = rows.to(torch.bfloat16)
            chosen_ms = do_bench(partial(matrix.product, rows, out=out))
            over = chosen_ms / do_bench(partial(torch.mm, left, floats))
            name = matrix.chosen(count).name
            yield {"weight_bits": weight_bits, "rows": count, "kernel": name, "ms": chosen_ms, "over_bfloat16": over}


def transfers(options: Options) -> Iterator[Row]:
    """Products of rows in host memory: with the copies, and the product alone; few rows also as one CUDA graph."""
    import numpy as np
    import torch

    from provider.products.model import Transfers
    from symbiosis_priv.arithmetic.ring import FORWARD
    from symbiosis_priv.kernels import RingMatrix, probe_rows
    from symbiosis_priv.network import wire

    device, size = torch.device(options.device), 64 if options.cpu else 4096
    weight = torch.randint(-511, 512, (size, size), dtype=torch.int16, generator=torch.Generator().manual_seed(0))
    there, here = RingMatrix(weight, weight_bits=10, device=device), RingMatrix(weight, weight_bits=10)
    moved = Transfers(device, widest=size)
    for count in [1, 8] if options.cpu else [1, 16, 64, 256, 1024]:
        rows = probe_rows(count, size)
        near = rows.to(device)
        whole = _median_s(partial(moved.product, there, rows, FORWARD), options.device, repeat=20)
        alone = _median_s(partial(there.product, near), options.device, repeat=20)
        yield {
            "size": size,
            "rows": count,
            "host_to_host_us": 1e6 * whole,
            "product_us": 1e6 * alone,
            "copies_us": 1e6 * (whole - alone),
            "equal": torch.equal(moved.product(there, rows, FORWARD), expected := here.product(rows)),
        }
        packed = wire.BYTES24.unpack(wire.RING24.pack(rows), rows=count)
        narrow = partial(moved.product, there, packed, FORWARD, ring_bits=24)
        equal = narrow().numpy().tobytes() == bytes(wire.RING24.pack(expected))
        narrow_us = 1e6 * _median_s(narrow, options.device, repeat=20)
        yield {"size": size, "rows": count, "ring_bits": 24, "host_to_host_us": narrow_us, "equal": equal}
        for ring_bits in (32, 24) if count <= 16 else ():
            few, encoding = moved.few(there, FORWARD, count, ring_bits), wire.encoding_of("ring", ring_bits)
            sent, space = (np.frombuffer(bytearray(encoding.pack(part)), np.uint8) for part in (rows, expected))
            assert few is not None
            answer = bytes(space)
            space[:] = 0
            few_us = 1e6 * _median_s(partial(few, sent.ctypes.data, space.ctypes.data), options.device, repeat=20)
            shape = {"size": size, "rows": count, "ring_bits": ring_bits}
            yield {**shape, "host_to_host_us": few_us, "graph": few.args[0].captured, "equal": bytes(space) == answer}


def provider(options: Options) -> Iterator[Row]:
    """A model over an executor and a helper on the device has the same bits as the tenant's own products on the CPU."""
    import torch

    from symbiosis_priv.harness.local import LocalFederation
    from tenant.model.hf import RemoteConfig, backend_of
    from tenant.model.loading import load_model

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        model = _save_llama(run / "model", width=128 if options.cpu else 1024, inner=256, layers=2, device="cpu")
        ids = torch.arange(24, dtype=torch.long).reshape(1, 24)
        settings = {"executor": {"device": options.device}}
        with LocalFederation(model, run / "federation", provider_options=settings) as local:
            logits = {}
            for name, remote in {
                "cpu": RemoteConfig(masking="simulate", cache=run / "simulated"),
                "pad": RemoteConfig(federation=local.federation, masking="pad", cache=run / "tenant"),
            }.items():
                loaded = load_model(model, remote=remote, dtype=torch.float32)
                embeddings = loaded.get_input_embeddings()(ids).detach().requires_grad_()
                found = loaded(inputs_embeds=embeddings).logits
                found.square().sum().backward()
                logits[name] = (found.detach(), embeddings.grad)
                backend_of(loaded).close()
            for what, index in (("forward", 0), ("backward", 1)):
                yield {"what": what, "equal": torch.equal(logits["cpu"][index], logits["pad"][index])}


def nccl(options: Options) -> Iterator[Row]:
    """Two ranks, one where there is one GPU: both ways to divide a product, compared with products without a group; of
    few rows, and of more than shared memory holds at a time; also from a second thread."""
    import torch
    from torch.multiprocessing import get_context

    with tempfile.TemporaryDirectory() as folder:
        model = _save_llama(Path(folder, "model"), width=128, inner=256, layers=1, device="cpu")
        world = 2 if options.cpu else min(2, torch.cuda.device_count())
        context = get_context("spawn")
        follow = partial(context.Process, target=_follow, daemon=True)  # ends with this process, if that fails
        ranks = [follow(args=(options, model, rank, world)) for rank in range(1, world)]
        for rank in ranks:
            rank.start()
        yield from _lead(options, model, world)
        for rank in ranks:
            rank.join(10)


def _join(options: Options, model: Path, rank: int, world: int) -> Any:
    """Join the group. Returns the weights."""
    from provider.shards.sharded import join
    from symbiosis_priv.checkpoints.weights import WeightStore

    join(rank, world, model.parent, options.device.removesuffix(":0"), timeout=timedelta(seconds=20))
    return WeightStore(model, cache=model.parent / "cache", device=options.device.replace("cuda:0", f"cuda:{rank}"))


def _follow(options: Options, model: Path, rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    from provider.shards.sharded import ShardedOperands

    with torch.no_grad():
        store = _join(options, model, rank, world)
        ShardedOperands(store).follow()
        dist.destroy_process_group()


def _lead(options: Options, model: Path, world: int) -> Iterator[Row]:
    import torch
    import torch.distributed as dist

    from provider.products.model import LocalOperands
    from provider.shards.sharded import Mode, ShardedOperands
    from symbiosis_priv.arithmetic.ring import DIRECTIONS
    from symbiosis_priv.kernels import probe_rows

    with torch.no_grad(), ThreadPoolExecutor(1) as other:
        store = _join(options, model, 0, world)
        local, index = LocalOperands(store), 2  # gate and up, the widest
        operands = ShardedOperands(store)
        for mode, direction, count in product((Mode.COLUMNS, Mode.GATHERED), DIRECTIONS, (65, 300)):
            rows = probe_rows(count, store.manifest().groups[index].columns(direction)[0])
            which: dict[str, Any] = {"index": index, "direction": direction}
            want = local.product(rows, **which)
            multiply = torch.no_grad()(partial(operands.product, rows, **which, mode=mode))
            equal = all(torch.equal(got, want) for got in (multiply(), other.submit(multiply).result()))
            what = {"backend": dist.get_backend(), "ranks": world, "sharding": mode.name, "direction": direction}
            yield {**what, "rows": count, "equal": equal}
        operands.close()
        dist.destroy_process_group()


def llama_1b(options: Options) -> Iterator[Row]:
    """A masked LoRA step and a token of a Llama of 1 B weights, compared with bfloat16 without a provider."""
    yield from _llama(options, width=2048, inner=8192, layers=16)


def llama_8b(options: Options) -> Iterator[Row]:
    """The same at the widths of an 8 B Llama, with 4 of its 32 layers, because quantising all of them takes too
    long."""
    yield from _llama(options, width=4096, inner=14336, layers=4)


def _llama(options: Options, *, width: int, inner: int, layers: int) -> Iterator[Row]:
    import torch

    from symbiosis_priv.harness.local import LocalFederation
    from tenant.model.hf import RemoteConfig, backend_of
    from tenant.model.loading import load_model

    if options.cpu:
        width, inner, layers = 64, 128, 1
    shape = {"width": width, "inner": inner, "layers": layers}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        begun = time.perf_counter()
        model = _save_llama(run / "model", **shape, device=options.device)
        yield {**shape, "made_s": time.perf_counter() - begun}
        plain = load_model(model, dtype=torch.bfloat16).to(options.device)
        figures = _step_and_token(plain, options)
        yield {**shape, "variant": "bfloat16", **figures}
        del plain
        gc.collect()
        begun = time.perf_counter()
        settings = {"executor": {"device": options.device}}
        with LocalFederation(model, run / "federation", provider_options=settings, deadline_s=80) as local:
            remote = RemoteConfig(federation=local.federation, masking="pad", cache=run / "federation" / "cache")
            split = load_model(model, remote=remote, dtype=torch.bfloat16).to(options.device)
            yield {**shape, "ready_s": time.perf_counter() - begun}
            masked = _step_and_token(split, options)
            over = {f"{name}_over_bfloat16": masked[name] / figures[name] for name in figures}
            yield {**shape, "variant": "pad", **masked, **over}
            backend_of(split).close()


def _step_and_token(base: Any, options: Options) -> dict[str, float]:
    """Median seconds of a LoRA step over 256 tokens, and of a token after them."""
    import torch
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=8))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
    ids = torch.arange(16 if options.cpu else 256, dtype=torch.long, device=options.device)[None]

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step_s = _median_s(step, options.device, repeat=3)
    with torch.no_grad():
        model.eval()
        output = model(input_ids=ids, use_cache=True)

        def token() -> None:
            nonlocal output
            latest = output.logits[:, -1:].argmax(-1)
            output = model(input_ids=latest, past_key_values=output.past_key_values, use_cache=True)

        token_s = _median_s(token, options.device, repeat=8)
    return {"step_s": step_s, "token_s": token_s}


def _save_llama(folder: Path, *, width: int, inner: int, layers: int, device: str) -> Path:
    """Write random weights in bfloat16, made on the device because that is fast."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(1, width // 128)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        vocab_size=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            LlamaForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(before)
    return folder


def _median_s(work: Callable[[], object], device: str, *, repeat: int) -> float:
    """Median seconds after one warm-up run. Each run ends when the device has finished."""
    import torch

    seconds = []
    for _ in range(1 + repeat):
        begun = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


SECTIONS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "machine": machine,
    "kernels": kernels,
    "tests": tests,
    "products": products,
    "transfers": transfers,
    "provider": provider,
    "nccl": nccl,
    "llama-1b": llama_1b,
    "llama-8b": llama_8b,
}


def main() -> None:
    """Run the section that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sections")
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--cpu", action="store_true")
    chosen = parser.parse_args()
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries and other processes print is no row
    wrong = False
    for row in SECTIONS[chosen.section](Options(chosen.cpu)):
        wrong |= row.get("equal") is False or row.get("result", "exact") != "exact"
        report.write(json.dumps(row) + "\n")
        report.flush()
    if wrong:
        sys.exit("a result is wrong, or a kernel cannot run: see the rows")


if __name__ == "__main__":
    main()
