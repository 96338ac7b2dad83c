"""FedSim and FedAlt: personal parameters of the user's choice, trained with the shared ones or in turn.

Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao, "Federated learning with partial model personalization" (ICML 2022,
Algorithms 2 and 3).

    A round: client k receives the shared parameters u.
    FedSim: it trains u and its own v_k together. FedAlt: it trains v_k, u fixed, then u, v_k fixed.
    v_k stays; u <- sum_k n_k u_k / sum_k n_k.

With the last layer they are FedPer and FedRep; with `personal=prompt`, federated prompt tuning.

Departures from the paper: The mean is weighted by n_k (the paper weights clients equally). v_k is trained for whole
epochs. Newcomers train their own v with u fixed, for as many rounds as the run has.
"""

from __future__ import annotations

import dataclasses

from pfljax.algorithms.common.layers import Phase, named, sharing_layers
from pfljax.contract import tree
from pfljax.contract.types import Algorithm, MethodReport, Params, PyTree
from pfljax.local.problem import Problem
from pfljax.settings.method import hyperparameter, method

PERSONAL = "regular expression that paths of personal parameters contain, such as prompt; '': the last layer's"


@method(name="fedsim", keeps="its personal parameters", travels="the shared parameters, both ways")
@dataclasses.dataclass(frozen=True)
class FedSim:
    """FedSim (Pillutla et al., 2022): trains shared and personal parameters together.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedSim(personal="prompt")
        FedSim(personal='prompt')
    """

    personal: str = hyperparameter("", help=PERSONAL)

    def build(self, problem: Problem) -> Algorithm:
        return partial(problem, self.personal)


@method(name="fedalt", keeps="its personal parameters", travels="the shared parameters, both ways")
@dataclasses.dataclass(frozen=True)
class FedAlt:
    """FedAlt (Pillutla et al., 2022): trains personal parameters, then shared ones.

    Examples:
        >>> import pfljax as pfl
        >>> pfl.methods.FedAlt(personal="prompt", personal_epochs=5)
        FedAlt(personal='prompt', personal_epochs=5)
    """

    personal: str = hyperparameter("", help=PERSONAL)
    personal_epochs: int = hyperparameter(
        1,
        at_least=1,
        grid=(1, 5),
        help="number of epochs for the personal parameters, with the shared ones fixed",
    )

    def build(self, problem: Problem) -> Algorithm:
        return partial(problem, self.personal, self.personal_epochs)


def partial(problem: Problem, personal: str, epochs: int | None = None) -> Algorithm:
    """An algorithm with personal parameters, which are trained first if they have `epochs` of their own."""
    by_name = named(problem, personal) if personal else None

    def is_personal(params: Params) -> PyTree:
        """v: the parameters of these names, or the last layer's."""
        return problem.model.mask(params, 1) if by_name is None else by_name(params)

    def is_shared(params: Params) -> PyTree:
        """u: all others."""
        return tree.complement(is_personal(params))

    # FedSim has no phases: it trains u and v_k together.
    # FedAlt: v_k, u fixed; then u, v_k fixed.
    phases = [] if epochs is None else [Phase(is_personal, epochs), Phase(is_shared)]
    report = MethodReport(scored="each client's own parameters with the shared ones")
    return sharing_layers(problem, is_shared, phases=phases, report=report)
