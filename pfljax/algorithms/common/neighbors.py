"""Choice of neighbors: tables of candidate models and epsilon-greedy sampling."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.contract.types import Array, Cohort, Key, Mixture


class Candidates(NamedTuple):
    """The C candidate models that one client tracks, its own first.

    Stacked over clients, the tables are K x C instead of K x K.
    """

    ids: Array  # (C,) int32: owners of the models; slot 0 is the client itself
    last: Array  # (C,): loss of the model when the client last held it
    tracked: Array  # (C,): tracked loss; inf: not evaluated yet


def candidates(key: Key, own: Array, num: int, num_clients: int, tracked: float) -> Candidates:
    """A client's initial table: its own model and `num` - 1 others, drawn uniformly if C < K.

    Args:
        key: The client's key.
        own: Its id.
        num: C, at most K.
        num_clients: K.
        tracked: inf: models count as not evaluated yet; 0: as evaluated with a loss of zero (Alg. 1, l. 3).
    """
    if num == num_clients:
        ids = (jnp.arange(num, dtype=jnp.int32) + own) % num_clients
    else:
        ids = jnp.concatenate([own[None], sample_others(key, own, num_clients, num - 1)]).astype(jnp.int32)
    return Candidates(ids, jnp.zeros((num,)), jnp.full((num,), tracked, jnp.float32))


def remember(table: Candidates, held: Array, losses: Array) -> tuple[Candidates, Array]:
    """Records the losses of the models just held; a model new to the table replaces the worst candidate.

    Args:
        table: One client's candidates, C >= J.
        held: (J,) ids, distinct.
        losses: (J,) their losses on the client's data.

    Returns:
        The table with `last` and `ids` up to date (`tracked` is inf for new models), and the slots (J,) of the held
        models.
    """
    is_held = (table.ids[:, None] == held[None, :]).any(axis=1)

    def insert(carry, new):
        table, taken = carry
        held, loss = new
        known = table.ids == held
        # Models never evaluated (inf) leave first, then the worst; models held in this round stay.
        worst = jnp.where(taken, -jnp.inf, table.tracked)
        slot = jnp.where(known.any(), jnp.argmax(known), jnp.argmax(worst))
        tracked = table.tracked.at[slot].set(jnp.where(known.any(), table.tracked[slot], jnp.inf))
        table = Candidates(table.ids.at[slot].set(held), table.last.at[slot].set(loss), tracked)
        return (table, taken.at[slot].set(True)), slot

    (table, _), slots = jax.lax.scan(insert, (table, is_held), (held, losses))
    return table, slots


def track(table: Candidates, slots: Array, rounds: Array, beta: float | None) -> Candidates:
    """The table after a round in which the models in `slots` were held, whose newest losses it already remembers.

    Args:
        table: The client's table.
        slots: (J,) places of the held models.
        rounds: () int32, number of rounds before this one.
        beta: Weight of the newest loss in the moving average; None: losses are summed, as if a model that is seen for
            the first time had had its loss in all rounds.
    """
    unknown, held = jnp.isinf(table.tracked), jnp.zeros_like(table.ids, bool).at[slots].set(True)
    if beta is None:
        first, tracked = table.last * (rounds + 1), table.tracked + table.last  # Eq. 24
    else:
        old = jnp.where(unknown, table.last, table.tracked)
        first, tracked = table.last, (1 - beta) * old + beta * table.last
    return table._replace(tracked=jnp.where(unknown, jnp.where(held, first, jnp.inf), tracked))


def logits(table: Candidates, share: Array | float = 1.0) -> Array:
    """(C,) minus `share` x the tracked losses; -inf for models not evaluated yet."""
    return jnp.where(jnp.isinf(table.tracked), -jnp.inf, -share * table.tracked)


def heaviest(table: Candidates, num: int, scores: Array) -> Mixture:
    """A client's `num` candidates of highest score, of equal ones those of least loss, with the softmax of the scores.

    Before its first round, a client has evaluated nothing, and its own model has all the weight.

    Args:
        table: The client's candidates.
        num: Most models to mix, at most C.
        scores: (C,) logarithms of the weights, up to a constant; -inf: no weight.
    """
    nothing = jnp.isinf(table.tracked).all()
    scores = jnp.where(nothing & (jnp.arange(len(table.ids)) == 0), 0.0, scores)
    slots = jnp.lexsort((table.tracked, -scores))[:num]
    return Mixture(table.ids[slots], jax.nn.softmax(scores[slots]))


def sample_others(key: Key, own: Array, num: int, count: int) -> Array:
    """Draws `count` distinct positions from range(num) without `own`, uniformly, in random order; O(count^2).

    Uses Floyd's algorithm, which draws a subset without touching the other positions.
    """
    if count == 0:
        return jnp.zeros((0,), jnp.int32)
    draw_key, order_key = jax.random.split(key)

    def draw(chosen, step):
        top = num - 1 - count + step
        drawn = jax.random.randint(jax.random.fold_in(draw_key, step), (), 0, top + 1)
        drawn = jnp.where((chosen == drawn).any(), top, drawn)
        return chosen.at[step].set(drawn), None

    chosen, _ = jax.lax.scan(draw, jnp.full((count,), -1, jnp.int32), jnp.arange(count))
    chosen = jax.random.permutation(order_key, chosen)
    return chosen + (chosen >= own)


def best_candidates(key: Key, scores: Array, count: int, epsilon: Array | float = 0.0) -> tuple[Array, Array]:
    """The slots with the highest scores, each replaced by a uniformly drawn slot with probability epsilon.

    Args:
        key: Breaks ties and explores.
        scores: (C,); -inf for slots that are not eligible.
        count: M, number of distinct slots to choose.
        epsilon: Probability of exploring, independently for each choice.

    Returns:
        The slots (M,) int32, and (M,) bool whether they are eligible.
    """
    lots_key, coin_key = jax.random.split(key)
    # Separate keys: winning a tie must not lower the other slots' chances of being explored.
    tie, chance = jax.random.uniform(lots_key, (2, *scores.shape))
    explores = jax.random.bernoulli(coin_key, epsilon, (count,))

    def pick(scores, explores):
        best = jnp.where(explores, -jnp.inf, scores.max())
        lots = jnp.where(explores, chance, tie)
        slot = jnp.argmax(jnp.where((scores >= best) & (scores > -jnp.inf), lots, -1.0))
        return scores.at[slot].set(-jnp.inf), (slot, scores[slot] > -jnp.inf)

    return jax.lax.scan(pick, scores, explores)[1]


def epsilon_greedy(key: Key, table: Candidates, own: Array, cohort: Cohort, count: int, epsilon: float) -> Array:
    """The neighbors of one client in a round (FedeRiCo, Section 3.3).

    With probability epsilon, distinct other clients, drawn uniformly. Otherwise candidates that were never evaluated,
    then those with the lowest tracked loss, which have the highest weight; ties are broken at random. If too few
    candidates are in the cohort, random other clients fill up.

    Args:
        key: Key for this client and round.
        table: Its candidates.
        own: Its id.
        cohort: Only clients of the cohort can be neighbors.
        count: M.
        epsilon: Probability of exploring.

    Returns:
        (M,) int32 client ids, distinct and without `own`.
    """
    if count == 0:
        return jnp.zeros((0,), jnp.int32)
    coin_key, others_key, ties_key = jax.random.split(key, 3)
    num = cohort.ids.shape[0]
    others = sample_others(others_key, cohort.position(own), num, min(2 * count, num - 1))
    others = cohort.ids[others]
    eligible = (table.ids != own) & (cohort.position(table.ids) >= 0)
    scores = jnp.where(jnp.isinf(table.tracked), jnp.inf, -table.tracked)  # optimism: try every model once
    slots, known = best_candidates(ties_key, jnp.where(eligible, scores, -jnp.inf), min(count, len(table.ids)))
    known = known & ~jax.random.bernoulli(coin_key, epsilon)
    greedy = table.ids[slots]
    repeated = ((others[:, None] == greedy[None, :]) & known[None, :]).any(axis=1)
    pool = jnp.concatenate([greedy, others])
    first = jnp.argsort(jnp.concatenate([~known, repeated]), stable=True)[:count]
    return pool[first].astype(jnp.int32)
