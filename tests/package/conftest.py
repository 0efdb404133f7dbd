"""On which device and over which backend the tests of the package run.

    pytest tests/package --device cuda --backend nccl --max-ranks 4

Without options: the CPU, gloo, and as many ranks as each test wants. Needs torch, numpy,
cloudpickle and pytest alone.
"""

import os

import pytest

from .. import parity
from . import ranks


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    group = parser.getgroup("miniddp")
    group.addoption("--device", choices=["cpu", "cuda"], default="cpu")
    group.addoption("--backend", choices=["gloo", "nccl"], default="gloo")
    group.addoption("--max-ranks", type=int, help="skip what needs more ranks")
    pluginmanager.register(parity)
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "of pytest-timeout, which is not installed here")


def pytest_configure(config: pytest.Config) -> None:
    device = config.getoption("device")
    ranks.backend = config.getoption("backend")
    ranks.max_ranks = config.getoption("max_ranks")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gpus = ranks.gpus()
    if device == "cuda" and not gpus:
        raise pytest.UsageError("--device cuda: torch sees no GPU")
    if ranks.backend == "nccl":
        if not gpus:
            raise pytest.UsageError("--backend nccl needs --device cuda")
        ranks.max_ranks = min(ranks.max_ranks or gpus, gpus)
