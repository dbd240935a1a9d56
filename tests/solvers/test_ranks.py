"""Sums over processes: what is said when one of them is gone, or asked for what cannot be."""

import pytest
import torch
import torch.distributed as dist

from ntkgp.solvers import Ranks


def test_a_lost_rank_is_told_with_what_to_do(monkeypatch):
    def gone(tensor):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "all_reduce", gone)
    with pytest.raises(RuntimeError, match=r"rank 0 of 2 lost another rank.*last checkpoint.*closed by peer"):
        Ranks(0, 2).summed(torch.ones(2))


def test_gradients_do_not_flow_between_processes():
    with pytest.raises(RuntimeError, match="gradients do not flow between processes"):
        Ranks(0, 2).summed(torch.ones(2, requires_grad=True))


@pytest.mark.parametrize(("n", "world"), [(7, 2), (3, 4), (8, 4)])
def test_parts_are_a_partition(n, world):
    points = [i for rank in range(world) for i in range(n)[Ranks(rank, world).part(n)]]
    assert points == list(range(n))
