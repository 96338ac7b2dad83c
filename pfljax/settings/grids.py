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

    def spread(steps: np.ndarray) -> np.floating:
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
    # The neighbor of the edge, and the bounds on the edge's side.
    ascending = sorted({*values})
    upward = edge == ascending[-1]
    if upward:
        neighbor = ascending[-2]
        inclusive = field.limits.get("at_most")
        exclusive = field.limits.get("below")
    else:
        neighbor = ascending[1]
        inclusive = field.limits.get("at_least")
        exclusive = field.limits.get("above")
    if not upward and ascending[0] > 0 >= max(inclusive or 0, exclusive or 0):
        inclusive = None
        exclusive = 0

    # The last ratio or step once more.
    if is_geometric(ascending):
        value = edge * edge / neighbor
    else:
        value = 2 * edge - neighbor

    def is_past(bound: float) -> bool:
        return value >= bound if upward else value <= bound

    if inclusive is not None and is_past(inclusive):
        value = inclusive
    elif exclusive is not None and is_past(exclusive):
        value = (edge + exclusive) / 2
    if value_type(field.hint) is int:
        value = round(value)
    else:
        value = float(f"{value:.{DIGITS}g}")

    is_further = value > edge if upward else value < edge
    return value if is_further and value != exclusive else None


def beyond_edges(
    tried: Sequence[Mapping[str, Any]], best: Mapping[str, Any], fields: Mapping[str, Field]
) -> dict[str, float | int]:
    """Returns the values that continue the grids at whose edge the best values lie, by name.

    Args:
        tried: All points of the grids, values by name.
        best: The best of them.
        fields: The fields that the values are of, by name.
    """
    further = {}
    for name, value in best.items():
        values = [point[name] for point in tried if is_number(point[name])]
        if not is_number(value) or len(set(values)) < 2:
            continue
        if value in (min(values), max(values)):
            following = beyond(values, value, fields[name])
            if following is not None:
                further[name] = following
    return further
