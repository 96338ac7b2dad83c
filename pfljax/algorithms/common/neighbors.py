"""Who downloads whose model: tables of candidate models and epsilon-greedy sampling."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfljax.core.types import Array, Cohort, Key


class Candidates(NamedTuple):
    """What one client knows of other clients' models: the C that it keeps in mind, its own first.

    Stacked over clients, the tables are K x C and not K x K.
    """

    ids: Array  # (C,) int32: whose model; slot 0 is the client's own
    last: Array  # (C,): the loss of the model when the client last held it
    tracked: Array  # (C,): the tracked loss; inf: not evaluated yet


def candidates(key: Key, own: Array, num: int, num_clients: int, tracked: float) -> Candidates:
    """The table of a client at the start: its own model and `num` - 1 others, drawn uniformly where C < K.

    Args:
        key: For this client.
        own: Its id.
        num: C, at most K.
        num_clients: K.
        tracked: inf for models that are not evaluated yet; 0 as if they were, with a loss of zero (Alg. 1, l. 3).
    """
    if num == num_clients:
        ids = (jnp.arange(num, dtype=jnp.int32) + own) % num_clients
    else:
        ids = jnp.concatenate([own[None], sample_others(key, own, num_clients, num - 1)]).astype(jnp.int32)
    return Candidates(ids, jnp.zeros((num,)), jnp.full((num,), tracked, jnp.float32))


def remember(table: Candidates, held: Array, losses: Array) -> tuple[Candidates, Array]:
    """Notes the losses of the models just held; a model new to the table takes the place of the worst candidate.

    Args:
        table: One client's candidates, C >= J.
        held: (J,) ids, distinct.
        losses: (J,) their losses on the client's data.

    Returns:
        The table with `last` and `ids` up to date (a newcomer's `tracked` is inf), and the slots (J,) of the held.
    """
    is_held = (table.ids[:, None] == held[None, :]).any(axis=1)

    def insert(carry, new):
        table, taken = carry
        held, loss = new
        known = table.ids == held
        # Models that were never evaluated (inf) leave first, then the worst; never one that is held in this round.
        worst = jnp.where(taken, -jnp.inf, table.tracked)
        slot = jnp.where(known.any(), jnp.argmax(known), jnp.argmax(worst))
        tracked = table.tracked.at[slot].set(jnp.where(known.any(), table.tracked[slot], jnp.inf))
        table = Candidates(table.ids.at[slot].set(held), table.last.at[slot].set(loss), tracked)
        return (table, taken.at[slot].set(True)), slot

    (table, _), slots = jax.lax.scan(insert, (table, is_held), (held, losses))
    return table, slots


def logits(table: Candidates, share: Array | float = 1.0) -> Array:
    """(C,) minus `share` x the tracked losses; -inf for models that were not evaluated yet."""
    return jnp.where(jnp.isinf(table.tracked), -jnp.inf, -share * table.tracked)


def heaviest(table: Candidates, num: int, share: Array | float = 1.0) -> tuple[Array, Array]:
    """A client's candidates of highest weight, the softmax of `logits`: ids (num,), and weights among them.

    Before its first round a client has evaluated nothing; then its own model has all the weight.
    """
    nothing = jnp.isinf(table.tracked).all()
    scores = jnp.where(nothing & (jnp.arange(len(table.ids)) == 0), 0.0, logits(table, share))
    scores, slots = jax.lax.top_k(scores, num)
    return table.ids[slots], jax.nn.softmax(scores)


def sample_others(key: Key, own: Array, num: int, count: int) -> Array:
    """`count` distinct positions out of range(num) without `own`, uniformly, in random order; O(count^2).

    Floyd's algorithm: it draws a subset without touching the other positions.
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
    """Slots of the highest scores, each with probability epsilon one drawn uniformly in its place.

    Args:
        key: Breaks ties, and explores.
        scores: (C,); -inf where a slot is not eligible.
        count: M, how many slots to choose, all different.
        epsilon: Probability, of each choice on its own, of exploring.

    Returns:
        The slots (M,) int32, and which of them are eligible.
    """
    lots_key, coin_key = jax.random.split(key)
    # Of its own each: what has won a tie must not lower the others' chances to be explored.
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

    With probability epsilon, uniform distinct others. Else candidates that were never evaluated, and then those of the
    lowest tracked loss, which have the highest weight, ties broken at random. Where too few of the candidates are in
    the cohort, random others fill up.

    Args:
        key: For this client and round.
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
    scores = jnp.where(jnp.isinf(table.tracked), jnp.inf, -table.tracked)  # optimism: everyone is tried once
    slots, known = best_candidates(ties_key, jnp.where(eligible, scores, -jnp.inf), min(count, len(table.ids)))
    known = known & ~jax.random.bernoulli(coin_key, epsilon)
    greedy = table.ids[slots]
    repeated = ((others[:, None] == greedy[None, :]) & known[None, :]).any(axis=1)
    pool = jnp.concatenate([greedy, others])
    first = jnp.argsort(jnp.concatenate([~known, repeated]), stable=True)[:count]
    return pool[first].astype(jnp.int32)
