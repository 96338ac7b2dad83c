"""When a run stops before its last round."""

from __future__ import annotations

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
        best = best_row(list(rows))
        if rows[-1]["round"] - best["round"] < self.patience:
            return ""
        score = best["selected_by"].replace("_", " ")
        return f"no better {score} than in round {best['round']}"


def patience(rounds: int) -> Patience:
    """Returns a rule for `Run(stop=...)`: see `Patience`."""
    return Patience(rounds)
