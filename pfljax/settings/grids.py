"""Grids of numbers, and the values that continue them beyond their edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pfljax.settings.fields import Field, value_type

DIGITS = 3  # significant digits of a further value


def is_number(value: Any) -> bool:
    """Whether a value is a number; bool does not count."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_geometric(values: Sequence[float]) -> bool:
    """Whether the ratios of ascending values vary less than their differences, relative to their means."""
    if min(values) <= 0:
        return False

    def spread(steps):
        return np.ptp(steps) / np.mean(steps)

    return bool(spread(np.diff(np.log(values))) <= spread(np.diff(values)))


def beyond(values: Sequence[float], edge: float, field: Field) -> float | int | None:
    """Returns the value that continues a grid beyond its least or largest value.

    It repeats the last ratio of a geometric grid, or the last step of another. A value beyond an inclusive bound
    becomes the bound; beyond an exclusive bound, it goes half the way to it. Grids of positive values stay positive,
    since 0 often stands for another method or for "all".

    Args:
        values: At least two different values.
        edge: The least or the largest of them.
        field: The field that the values are of; it says what is accepted.

    Returns:
        The value, or None if there is none that the field accepts.
    """
    ascending = sorted({*values})
    limits = field.limits
    up = edge == ascending[-1]
    inner = ascending[-2 if up else 1]
    found = edge * edge / inner if is_geometric(ascending) else 2 * edge - inner
    inclusive, exclusive = (
        limits.get(name) for name in (("at_most", "below") if up else ("at_least", "above"))
    )
    if not up and ascending[0] > 0 >= max(inclusive or 0, exclusive or 0):
        inclusive = None
        exclusive = 0

    def past(bound):
        return found >= bound if up else found <= bound

    if inclusive is not None and past(inclusive):
        found = inclusive
    elif exclusive is not None and past(exclusive):
        found = (edge + exclusive) / 2
    found = round(found) if value_type(field.hint) is int else float(f"{found:.{DIGITS}g}")
    further = found > edge if up else found < edge
    return found if further and found != exclusive else None


def beyond_edges(
    tried: Sequence[Mapping[str, Any]], best: Mapping[str, Any], fields: Mapping[str, Field]
) -> dict[str, float | int]:
    """Returns the values that continue the grids at whose edge the best values lie, by name.

    Args:
        tried: All points of the grids, values by name.
        best: The best of them.
        fields: The fields that the values are of, by name.
    """
    found = {}
    for name, value in best.items():
        values = {point[name] for point in tried if is_number(point[name])}
        if is_number(value) and len(values) > 1 and value in (min(values), max(values)):
            found[name] = beyond([*values], value, fields[name])
    return {name: value for name, value in found.items() if value is not None}
