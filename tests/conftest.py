from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import sys
import tempfile

import hypothesis
import pytest

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")
# Ranks and test processes share few cores: more threads would only wait for each other. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# On ARM torch's allocator is mimalloc, which keeps freed memory for a while: tests look at resident memory.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "0")

# Else each of some hundred processes would compile all that it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have this environment
    # No test goes by what `zerocli env --bench` has measured on this machine.
    CACHE = tempfile.TemporaryDirectory(prefix="zerocli-cache-")
    os.environ["XDG_CACHE_HOME"] = CACHE.name


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Run the whole suite in a few processes where pytest-xdist is there; `-n 0` runs it in one.

    One more than there are cores, at most four: a test often waits for its ranks, and each process costs its imports.
    """
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    if "PYTEST_XDIST_WORKER" in os.environ:  # which itself must start none
        return
    os.environ["ZEROCLI_TEST_WHOLE"] = str(int(whole))
    if whole and getattr(config.option, "numprocesses", 0) is None and not config.option.collectonly:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        config.option.numprocesses, config.option.dist = min(cores + 1, 4), "loadscope"


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config, log):
    """Give each process one test after another, but all of a file to one where they share fixtures, plans or traces."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        @functools.cache  # noqa: B019, one object
        def _shares(self, path):
            text = (config.rootpath / path).read_text()
            shared = ('\n@pytest.fixture(scope="module"', "\n@functools.cache")
            return path.startswith("tests/plan/") or any(each in text for each in shared)

        def _split_scope(self, nodeid):
            path = nodeid.partition("::")[0]
            return path if self._shares(path) else nodeid

    return Scheduling(config, log) if config.option.dist == "loadscope" else None


def pytest_collection(session):
    """Let each process of the whole suite begin with other files: what one has compiled, the others need not."""
    if "PYTEST_XDIST_WORKER" not in os.environ or os.environ.get("ZEROCLI_TEST_WHOLE") != "1":
        return
    number, count = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    paths = sorted((session.config.rootpath / "tests").rglob("test_*.py"))
    first = len(paths) * number // count
    for path in paths[first:] + paths[:first]:
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))  # as pytest does
        with contextlib.suppress(Exception, pytest.skip.Exception):  # said when the file is collected
            importlib.import_module(path.stem)


PASSED = os.environ.get("ZEROCLI_TEST_PASSED")
"""A file of the tests that passed before, which are left out; the first run, which finds no file, writes it."""
passed: list[str] = []


def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed:
        passed.append(report.nodeid)


def pytest_sessionfinish():
    if PASSED and "PYTEST_XDIST_WORKER" not in os.environ and not os.path.exists(PASSED):
        with open(PASSED, "w") as file:
            file.writelines(f"{name}\n" for name in passed)


def pytest_collection_modifyitems(config, items):
    import torch
    from lengths import LONG, in_third

    if PASSED and os.path.exists(PASSED):
        with open(PASSED) as file:
            before = set(file.read().splitlines())
        again = [i for i in items if i.nodeid in before and not {"long", "longer"} & set(i.keywords)]
        config.hook.pytest_deselected(items=again)
        items[:] = [item for item in items if item not in set(again)]

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device on this machine")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
    long = [item for item in items if "long" in item.keywords]
    if not LONG and os.environ.get("ZEROCLI_TEST_WHOLE") != "1":
        skip = pytest.mark.skip(reason="takes long: ZEROCLI_TEST_LONG=1")
        for item in long:
            item.add_marker(skip)
        return
    others = {item for item in items if ("long" in item.keywords or "longer" in item.keywords)}
    others = {item for item in others if not in_third(item.nodeid)} if LONG else set(long)
    if others:
        config.hook.pytest_deselected(items=[item for item in items if item in others])
        items[:] = [item for item in items if item not in others]


@pytest.fixture(scope="session", autouse=True)
def ready():
    """Set the objects of imported modules aside, and fork the process that ranks are forked from.

    Tests that collect garbage or look for tensors then see newer objects only.
    """
    import seeding  # noqa: F401, makes it cheaper

    gc.collect()
    gc.freeze()
    if "ranks" in sys.modules:
        sys.modules["ranks"].start_server()


@pytest.fixture(autouse=True)
def own_kernels():
    """Let a test that turns torch's oneDNN off in this process leave others as they were: the kernels round apart."""
    import torch

    enabled = torch._C._get_mkldnn_enabled()
    yield
    torch._C._set_mkldnn_enabled(enabled)


@pytest.fixture(autouse=True)
def own_plans(request):
    """Let a test that replaces parts of a plan see no plan of other tests, and leave none to them."""
    kept = {"memory.build": "_plan_eager", "memory.quick": "_plans"}
    modules = {name: sys.modules.get(f"zerocli.plan.{name}") for name in kept}
    caches = [getattr(module, kept[name]) for name, module in modules.items() if module is not None]
    if "monkeypatch" not in request.fixturenames:
        caches = []
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()
