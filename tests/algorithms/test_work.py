"""How much a client computes in a round, for every method: gradients of a mini-batch, and epochs, by its listing.

Privacy's accounting, clocks and tables of work rest on these numbers.
"""

import pytest
import toys

from pfljax.algorithms import METHODS

EPOCHS = 3  # E, of local training
# M, by default
NEIGHBORS = 3
COMPONENTS = 3

# Gradients that a client computes of each mini-batch; 1 for methods that are not listed.
GRADIENTS = {
    "per_fedavg": 2,  # of the inner and the outer step
    "pfedme": 5,  # K inner steps
    "ditto": 2,  # of w and of v_k
    "apfl": 2,  # of w and of v_k
    "fml": 2,  # of the client's own model and of the meme
    "fedkd": 2,  # of the teacher and of the student
    "fedsam": 2,  # there and at the point of ascent
    "mofedsam": 2,
    "fedrod": 2,  # of the generic model and of the personal head
    "feddpa": 2,  # of both adapters
    "fedem": COMPONENTS,
    "dfedem": COMPONENTS,
    "federico": 1 + NEIGHBORS,  # of its own model and of those that it holds
    "federico_centralized": 4,  # of all K = 4 models
    "federico_friends": 3 + NEIGHBORS,  # of two references, too
    "fedavg_data": 0,  # the examples themselves are sent
    "perada": 0,  # the server has examples
}
# Epochs of a client's phases in a round; E in one phase for methods that are not listed.
PHASES = {
    "fedrep": (10, EPOCHS),  # the head, the body
    "flute": (10, EPOCHS),
    "fedala": (10, EPOCHS),  # the weights of what is adopted
    "fedah": (1, 1, EPOCHS),  # the weights of the head, the head, the body
    "fedas": (1, EPOCHS),  # the alignment
    "fedpac": (1, EPOCHS),  # the head, the body
    "fedalt": (1, EPOCHS),  # the personal parameters, the shared ones
    "pfedmb": (EPOCHS, EPOCHS),  # the branches' weights, the branches
}


@pytest.mark.parametrize("name", METHODS)
def test_what_a_client_computes_in_a_round(name):
    options = toys.network(name) or {"hidden": (3,)}
    problem = toys.make_problem(toys.make_federation((2, 5, 1, 3)), epochs=EPOCHS, **options)
    ledger = toys.make_algorithm(name, problem).ledger
    assert ledger.gradients == GRADIENTS.get(name, 1)
    assert ledger.passes == pytest.approx(sum(PHASES.get(name, (EPOCHS,))) / EPOCHS)
