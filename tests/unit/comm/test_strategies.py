"""Strategies by name."""

from __future__ import annotations

import pytest

import dptrain.api as api
from dptrain.comm import STRATEGIES, make_gradient_sum
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.network import Dense, Network
from dptrain.plan import make_buckets


@pytest.mark.parametrize("name", STRATEGIES)
def test_one_rank_sums_nothing(name: str) -> None:
    replica = api.make_replica(Network((2,), [Dense(2)]), "reference", 1)
    sums = make_gradient_sum(name, World.single(), replica, make_buckets(replica.plan, 1))
    assert sums.name == "none"


def test_an_unknown_name_is_an_error_that_suggests() -> None:
    replica = api.make_replica(Network((2,), [Dense(2)]), "reference", 1)
    with pytest.raises(UserError, match=r"no strategy 'miror'.*did you mean 'mirrored'"):
        make_gradient_sum("miror", World.single(), replica, make_buckets(replica.plan, 1))
