"""The simulation of a queue over replicas, where a formula says what it must give."""

from __future__ import annotations

from statistics import fmean

import pytest

from scripts.simulate_replicas import Fleet, erlang_c_wait, simulate


def test_the_waiting_time_of_a_queue_without_failures_is_erlang_cs() -> None:
    # M/M/1: rho / (mu - lambda); two servers at half load: 1/3 of the service time (tables of queueing theory).
    assert erlang_c_wait(1, 0.8, 1.0) == pytest.approx(4.0)
    assert erlang_c_wait(2, 1.0, 1.0) == pytest.approx(1 / 3)
    for servers, load in ((1, 0.5), (4, 0.6), (32, 0.8)):
        fleet = Fleet(replicas=servers, rate=servers * load / 2.0, service=2.0)
        means = [simulate(fleet, 30_000, seed=seed).mean_wait for seed in range(4)]
        expected = erlang_c_wait(servers, fleet.rate, fleet.service)
        assert fmean(means) == pytest.approx(expected, rel=0.08), servers


def test_replicas_run_for_their_share_and_a_request_is_lost_after_two_failures() -> None:
    fleet = Fleet(replicas=16, rate=4.0, service=2.0, mtbf=100.0, repair=20.0, start=5.0)
    result = simulate(fleet, 40_000, seed=2)
    assert result.up_share == pytest.approx(100 / 125, abs=0.01)
    assert len(result.waits) + result.lost == 40_000
    # An exponential service is cut short with probability s / (s + mtbf); so is the second try.
    assert result.again / 40_000 == pytest.approx(2 / 102, rel=0.1)
    assert result.lost / result.again == pytest.approx(2 / 102, rel=0.6)


def test_loading_takes_the_bytes_over_the_bandwidth_that_replicas_share() -> None:
    for replicas, seconds in ((1, 10 + 50), (4, 10 + 50), (100, 10 + 1000)):
        cold = Fleet(
            replicas=replicas,
            rate=1.0,
            service=0.1,
            start=10.0,
            model_bytes=100.0,
            node_bandwidth=2.0,
            cache_bandwidth=10.0,
            is_warm=False,
        )
        assert simulate(cold, 3000).all_up == pytest.approx(seconds)
