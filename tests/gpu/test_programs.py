"""Programs that people run, under a quota: the results of a bare run, and their own error past the quota."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "clients" / "programs"
GIB = 1 << 30
SECONDS = 240


def needs(*modules: str) -> None:
    """Skips without them."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"no {module} on this machine")


def both(env, program: str, limit: str = "12g", **more: str) -> tuple[list[str], list[str]]:
    """The lines of a program under a quota and bare, run side by side."""
    more.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    runs = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / program)],
            env=env(limit=kind, **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for kind in (limit, None)
    ]
    lines = []
    for run, kind in zip(runs, ("under the quota", "bare"), strict=True):
        try:
            out, errors = run.communicate(timeout=SECONDS)
        finally:
            run.kill()
        assert run.returncode == 0, f"{kind}: {out}{errors}"
        assert "isolator" not in errors
        lines.append(out.splitlines())
    return lines[0], lines[1]


def results(lines: list[str]) -> list[str]:
    """What must not depend on the quota."""
    found = [line for line in lines if line.startswith("result ")]
    assert found
    return found


def check(held: list[str], bare: list[str], refusals: int = 1) -> None:
    """Same results, the program's own error past the quota, and alive after it."""
    assert results(held) == results(bare)
    assert sum(bool(re.match(r"refused \w*(Error|Exception)", line)) for line in held) == refusals, held
    assert held.count("alive") == refusals and "granted" not in held


TORCH = ["fp32", "amp", "graph", "conv", "resnet"]


@pytest.mark.parametrize("name", TORCH)
def test_torch(env, name):
    """PyTorch trains in fp32, in mixed precision, from graphs and with cuDNN as it does bare (B022, B188)."""
    needs("torch", *(["torchvision"] if name == "resnet" else []))
    check(*both(env, f"torch_{name}.py"))


@pytest.mark.parametrize("mode", ["LAZY", "EAGER"])
def test_torch_loads_its_kernels_either_way(env, mode):
    """Lazy and eager loading give the same training (B172)."""
    needs("torch")
    check(*both(env, "torch_fp32.py", CUDA_MODULE_LOADING=mode))


def test_torch_compile(env, tmp_path):
    """A compiled function gives the bare run's sum."""
    needs("torch", "triton")
    check(
        *both(env, "torch_compile.py", TORCHINDUCTOR_CACHE_DIR=str(tmp_path), TRITON_CACHE_DIR=str(tmp_path))
    )


def test_triton(env, tmp_path):
    """A Triton kernel is right, and PyTorch beside it is held."""
    needs("torch", "triton")
    check(*both(env, "triton_softmax.py", TRITON_CACHE_DIR=str(tmp_path)))


@pytest.mark.parametrize("preallocate", ["true", "false"])
def test_jax(env, preallocate):
    """JAX sizes its pool from the quota, with and without taking it at once (B022)."""
    needs("jax")
    held, bare = both(env, "jax_train.py", XLA_PYTHON_CLIENT_PREALLOCATE=preallocate)
    check(held, bare)
    pool = int(held[0].split()[1])
    assert 0.70 * 12 * GIB < pool <= 12 * GIB
    assert int(bare[0].split()[1]) > 60 * GIB


def test_cupy(env):
    """CuPy's pools, ordered and managed ones included, are held."""
    needs("cupy")
    check(*both(env, "cupy_pools.py"), refusals=4)


def test_numba(env):
    """A Numba kernel runs, and its arrays are held."""
    needs("numba")
    check(*both(env, "numba_kernel.py"))
