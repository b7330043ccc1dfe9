"""Tests of the plan share what is planned and traced: a plan depends on nothing but its model and its setup."""

from __future__ import annotations

import pytest

from zerocli.plan.memory import build, quick


@pytest.fixture(autouse=True)
def own_plans():
    """Leave the plans of other tests as they are; a test that replaces parts of a plan asks for `forget_plans`."""


@pytest.fixture
def forget_plans():
    """Return a function that drops all plans made so far; what a test has made with replaced parts is dropped too."""

    def forget() -> None:
        for each in (build._plan_eager, quick._plans):
            each.cache_clear()

    forget()
    yield forget
    forget()


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A cache of traces that has no measurements of this machine."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def no_gpu(monkeypatch, cache):
    """Let commands find no GPU, no rates that were measured here, and no launcher."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setenv("ZEROCLI_DEBUG", "0")
    monkeypatch.delenv("RANK", raising=False)
