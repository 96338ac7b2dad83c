"""When a run stops before its last round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from pfljax.settings.fields import hyperparameter, settings
from pfljax.training.scoring import best_row

Stop = Callable[[Sequence[dict]], bool | str]


@settings
class Patience:
    """Stops a run that no longer improves.

    Attributes:
        patience: Stop after this many rounds without a better validation score, or training loss without validation.
    """

    patience: int = hyperparameter(at_least=1)

    def __call__(self, rows: Sequence[dict]) -> str:
        """Returns why to stop after the last row; "" to go on."""
        return _why_to_stop(rows, best_row(rows), self.patience)

    def with_score(self, score: str, higher_is_better: bool) -> PatienceWithScore:
        """Returns the rule for another score than that of the task."""
        return PatienceWithScore(self.patience, score, higher_is_better)


@dataclasses.dataclass(frozen=True)
class PatienceWithScore:
    """`Patience` with a score that the run has chosen.

    Attributes:
        patience: See `Patience`.
        score: The name of the score.
        higher_is_better: Whether high values of the score are good.
    """

    patience: int
    score: str
    higher_is_better: bool

    def __call__(self, rows: Sequence[dict]) -> str:
        """Returns why to stop after the last row; "" to go on."""
        best = best_row(rows, self.score, self.higher_is_better)
        return _why_to_stop(rows, best, self.patience)


def _why_to_stop(rows: Sequence[dict], best: dict, patience: int) -> str:
    """Returns why to stop after the last row, given the best one; "" to go on."""
    if rows[-1]["round"] - best["round"] < patience:
        return ""
    score = best["selected_by"].replace("_", " ")
    return f"no better {score} than in round {best['round']}"


def patience(rounds: int) -> Patience:
    """Returns a rule for `Run(stop=...)`: see `Patience`.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.patience(20)
        Patience(patience=20)
    """
    return Patience(rounds)
