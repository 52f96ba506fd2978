"""A clock that only moves when told to, and functions that take simulated time."""

import gc
import math
import random

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def small_heap():
    """Each measurement collects garbage once; what other tests left behind needs no second look each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class FakeClock:
    """Call it for the time; `spend` makes time pass. Every reading costs nothing, so a time is exact."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def spend(self, seconds):
        self.now += seconds


class Machine:
    """Builders of functions that take simulated time on one clock, under noise that is the same for everybody."""

    def __init__(self, seed=0, noise=0.0, drift=0.0, spike=0.0, instance=0.0):
        self.clock, self.rng = FakeClock(), random.Random(seed)
        self.noise, self.drift, self.spike, self.instance = noise, drift, spike, instance
        self.built = 0
        self.calls = 0

    def seconds(self, typical):
        slow = 1 + self.drift * (self.clock.now - 100.0)
        value = typical * slow * math.exp(self.rng.gauss(0, self.noise))
        return value * 5 if self.rng.random() < self.spike else value

    def builder(self, typical, result=lambda x: x * 2, first=0.0):
        """Builds functions of `typical` seconds; the first call of an instance takes `first` seconds more."""

        def build():
            self.built += 1
            luck = math.exp(self.rng.gauss(0, self.instance))
            pending = [first]

            def fn(*args):
                self.calls += 1
                self.clock.spend(self.seconds(typical * luck) + pending[0])
                pending[0] = 0.0
                return result(*args)

            return fn

        return build


def inputs(index):
    return (torch.arange(4.0) + index,)
