"""Laws of the simulator: what any queue of servers obeys, and what can be computed by hand."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from doubles.serving_costs import ON_CPU, ON_GPU, ROUND_S, ROW_S, costs_of
from foreword.errors import InputError
from foreword.simulate.arrivals import Arrival, Lengths, poisson
from foreword.simulate.costs import MethodCosts, Scheduling
from foreword.simulate.figures import ServingFigures, figures
from foreword.simulate.fleet import Fleet, Routing, simulate
from foreword.simulate.replica import HttpCosts
from foreword.simulate.sizing import LatencyGoal, Load, smallest_fleet

MIXED = poisson(6.0, 400, Lengths.parse("exp:200"), Lengths.parse("1-120"), seed=3)


def served(
    costs: MethodCosts, fleet: Fleet, arrivals: Sequence[Arrival] = MIXED, scheduling: Scheduling = ON_CPU, seed: int = 0
) -> ServingFigures:
    return figures(simulate(costs, scheduling, fleet, arrivals, seed), fleet)


@pytest.mark.parametrize("scheduling", [ON_CPU, ON_GPU])
@pytest.mark.parametrize("replicas", [1, 3])
def test_tokens_are_conserved(drafting, scheduling, replicas):
    ledger = simulate(drafting, scheduling, Fleet(replicas, 8, max_queued=10_000), MIXED)
    assert ledger.tokens.tolist() == [one.output_tokens for one in MIXED] and not ledger.refused.any()
    arrived = np.array([one.second for one in MIXED])
    assert (arrived <= ledger.admitted).all() and (ledger.admitted < ledger.first).all()
    assert (ledger.first <= ledger.ended).all()


@pytest.mark.parametrize("scheduling", [ON_CPU, replace(ON_GPU, late=False)])
def test_littles_law(drafting, scheduling):
    """The mean number of requests in slots is their rate times how long each holds a slot. One is counted over time, step
    by step, the other over requests."""
    fleet = Fleet(2, 8, max_queued=10_000)
    ledger = simulate(drafting, scheduling, fleet, MIXED)
    found = figures(ledger, fleet)
    held = float((ledger.ended - ledger.admitted).mean())
    assert found.mean_requests == pytest.approx(found.requests_per_s * held, rel=1e-6)


@pytest.mark.parametrize("scheduling", [ON_CPU, ON_GPU])
@pytest.mark.parametrize("tokens", [1, 2, 50])
def test_a_request_alone_takes_its_prompt_and_its_rounds(plain, scheduling, tokens):
    http = HttpCosts(request_s=0.003, chunk_s=0.0005)
    ledger = simulate(plain, scheduling, Fleet(http=http), [Arrival(0.0, 101, tokens)])
    assert ledger.first[0] == pytest.approx(0.003 + 100 * ROW_S + ROUND_S + 0.0005)
    assert ledger.ended[0] == pytest.approx(0.003 + 100 * ROW_S + tokens * ROUND_S + 0.0005)


def test_a_long_prompt_is_read_in_chunks_between_the_rounds_of_others(plain):
    """The second request has three chunks, of 256, 256 and 88 rows; the first one's stream pauses for each."""
    ledger = simulate(plain, ON_CPU, Fleet(), [Arrival(0.0, 1, 40), Arrival(0.001, 601, 5)])
    pauses = sorted({round(gap, 4) for gap, _ in ledger.gaps}, reverse=True)
    assert pauses[:3] == [0.276, round(0.088 + 1.1 * ROUND_S, 4), round(1.1 * ROUND_S, 4)]
    assert ledger.first[1] == pytest.approx(ROUND_S + 600 * ROW_S + 2 * ROUND_S + 1.1 * ROUND_S)


def test_one_slot_is_the_queue_of_the_textbook(plain):
    """Requests that all take the same time, one at a time: the mean wait is that of Pollaczek and Khinchine."""
    arrivals = poisson(2.0, 5_000, Lengths.parse("101"), Lengths.parse("10"), seed=1)
    service, utilisation = 100 * ROW_S + 10 * ROUND_S, 2.0 * (100 * ROW_S + 10 * ROUND_S)
    found = served(plain, Fleet(1, 1, max_queued=10_000), arrivals)
    assert found.queue_s is not None
    assert found.queue_s.mean == pytest.approx(utilisation * service / (2 * (1 - utilisation)), rel=0.15)
    assert found.busy == pytest.approx(utilisation, rel=0.05)


@pytest.mark.parametrize("scheduling", [ON_CPU, ON_GPU])
def test_more_replicas_never_lower_throughput(drafting, scheduling):
    burst = [one._replace(second=one.second / 50) for one in MIXED]
    found = [served(drafting, Fleet(count, 8, max_queued=10_000), burst, scheduling) for count in (1, 2, 4, 8)]
    speeds = [one.tokens_per_s for one in found]
    assert speeds == sorted(speeds) and speeds[2] > 3 * speeds[0]
    waits = [one.queue_s.mean for one in found if one.queue_s is not None]
    assert waits == sorted(waits, reverse=True)


def test_a_seed_decides_everything(drafting):
    fleet = Fleet(2, 4, max_queued=10_000)
    assert served(drafting, fleet, seed=5) == served(drafting, fleet, seed=5) != served(drafting, fleet, seed=6)


def test_drafting_brings_what_it_was_measured_to_bring(plain, drafting):
    """One slot, always busy: tokens per round are those of the costs, but for the rounds that an output's end cuts."""
    burst = [Arrival(0.0, 1, 600)] * 40
    found = [served(costs, Fleet(1, 1), burst) for costs in (plain, drafting)]
    assert found[0].tokens_per_round == 1 and found[1].tokens_per_round == pytest.approx(2.0, rel=0.02)
    assert found[1].tokens_per_s / found[0].tokens_per_s == pytest.approx(2.0 / 1.3, rel=0.02)


def test_a_captured_round_is_padded_to_a_power_of_two():
    """Three sequences run as four do, unless there are only three slots."""
    costs = costs_of("plain", (1.0,), per_sequence=1.0)
    talk = [Arrival(0.0, 1, 1)] + [Arrival(0.01, 1, 1)] * 3
    ended = [simulate(costs, replace(ON_GPU, late=False), Fleet(1, slots), talk).ended.max() for slots in (3, 4)]
    assert ended == pytest.approx([ROUND_S + 3 * ROUND_S, ROUND_S + 4 * ROUND_S])


def test_on_a_gpu_a_request_waits_for_the_round_that_was_launched(plain):
    """The second request arrives in the first round. The second round was launched by then, and it joins the third."""
    talk = [Arrival(0.0, 1, 5), Arrival(0.5 * ROUND_S, 1, 1)]
    late, at_once = (simulate(plain, replace(ON_GPU, late=late), Fleet(1, 2), talk) for late in (True, False))
    two = plain.seconds_by_batch(2)[2]
    assert at_once.first[1] == pytest.approx(ROUND_S + two)
    assert late.first[1] == pytest.approx(2 * ROUND_S + two)
    assert late.ended[0] == pytest.approx(2 * ROUND_S + 2 * two + ROUND_S)  # the ended one takes part once more


def test_the_least_loaded_replica_gets_the_request(plain):
    """A long request holds one replica. The short ones that follow go to the other."""
    arrivals = [Arrival(0.0, 1, 500), *(Arrival(1.0 + 0.5 * number, 1, 2) for number in range(8))]
    ledger = simulate(plain, ON_CPU, Fleet(2, 1, max_queued=100), arrivals)
    assert (
        ledger.ended[1:].max() < ledger.ended[0]
        and (ledger.admitted[1:] - [one.second for one in arrivals[1:]]).max() < 1e-9
    )


def test_a_session_starts_from_what_its_slot_holds(plain):
    """The second prompt continues the first. After others have taken the slot, nothing is left."""
    first = [Arrival(0.0, 201, 10, "a"), Arrival(10.0, 301, 10, "a")]
    again = simulate(plain, ON_CPU, Fleet(1, 1, Routing.SESSION), first)
    assert again.reused == 210 and again.first[1] == pytest.approx(10.0 + 90 * ROW_S + ROUND_S)
    others = [first[0], Arrival(5.0, 50, 2, "b"), first[1]]
    assert simulate(plain, ON_CPU, Fleet(1, 1, Routing.SESSION), others).reused == 0
    assert simulate(plain, ON_CPU, Fleet(1, 2, Routing.SESSION), others).reused == 210
    assert simulate(plain, ON_GPU, Fleet(1, 2, Routing.SESSION), others).reused == 0


def test_a_session_stays_on_its_replica(plain):
    talk = [Arrival(10.0 * turn, 100 + 20 * turn, 10, f"user {user}") for turn in range(5) for user in range(6)]
    everywhere = simulate(plain, ON_CPU, Fleet(4, 8), talk)
    at_home = simulate(plain, ON_CPU, Fleet(4, 8, Routing.SESSION), talk)
    assert at_home.reused == 6 * sum(109 + 20 * turn for turn in range(4)) > everywhere.reused


def test_a_full_queue_refuses(plain):
    burst = [Arrival(0.0, 10, 10)] * 20
    found = served(plain, Fleet(1, 2, max_queued=3), burst)
    assert (found.requests, found.refused, found.tokens) == (5, 15, 50) and not found.keeps_up


def test_http_on_the_same_core_and_neighbours_make_steps_longer(plain):
    rare = poisson(1.0, 200, Lengths.parse("100"), Lengths.parse("40"), seed=3)
    alone = served(plain, Fleet(2, 4), rare)
    assert served(plain, Fleet(2, 4, contention=1.2), rare).busy > 1.05 * alone.busy
    http = HttpCosts(0.001, 0.002)
    apart, together = (served(plain, Fleet(2, 4, http=replace(http, shares_core=shared)), rare) for shared in (False, True))
    assert apart.busy == pytest.approx(alone.busy, rel=0.02) and together.busy > 1.05 * alone.busy


def test_a_queue_that_grows_is_seen(plain):
    capacity = served(plain, Fleet(1, 8, max_queued=10_000)).requests_per_s
    for share, keeps_up in ((0.8, True), (1.3, False)):
        arrivals = poisson(share * capacity, 600, Lengths.parse("exp:200"), Lengths.parse("1-120"), seed=3)
        assert served(plain, Fleet(1, 8, max_queued=10_000), arrivals).keeps_up is keeps_up


def test_the_smallest_fleet_meets_the_goal_and_one_less_does_not(drafting):
    load, goal = Load(MIXED, ON_CPU), LatencyGoal(first_token_s=0.6)

    def serve(fleet: Fleet) -> ServingFigures:
        return load.served_by(drafting, None, fleet)

    fleet, found = smallest_fleet(serve, Fleet(slots=4), goal, len(MIXED))
    assert goal.is_met(found) and found == serve(fleet) and fleet.replicas > 1
    assert not goal.is_met(serve(replace(fleet, replicas=fleet.replicas - 1)))


def test_a_goal_that_no_fleet_meets_is_refused(plain):
    def serve(fleet: Fleet) -> ServingFigures:
        return Load(MIXED[:20], ON_CPU).served_by(plain, None, fleet)

    with pytest.raises(InputError, match=r"with 20 replicas the first token is .* ms at p95 and the goal is 1\.0 ms"):
        smallest_fleet(serve, Fleet(), LatencyGoal(first_token_s=0.001), 20)


def test_sessions_that_the_load_does_not_have_are_refused(plain):
    with pytest.raises(InputError, match="--routing session needs requests with a session"):
        simulate(plain, ON_CPU, Fleet(routing=Routing.SESSION), MIXED)


def test_batches_that_nobody_measured_are_refused(plain):
    with pytest.raises(InputError, match="up to batch size 16, and --slots is 32"):
        simulate(plain, ON_CPU, Fleet(1, 32), MIXED)
