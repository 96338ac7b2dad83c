"""Signs that a method's file is written for the former contract, and what replaces them."""

from __future__ import annotations

import linecache
import re

REPLACED = {
    r"\bkept_optimizer(s)?\b|\bround_optimizer\b": "rows have no optimizers, which the engine keeps",
    r"\bOwnModel\b|\bown_model\(": "OwnModel is pfl.author.Personal, made by problem.init_personal",
    r"\bproblem\.fit\(context, models, [\w.]+, data\.train": "problem.fit returns a pfl.author.Trained",
    r"\{\"loss\":": "the server is told pfl.author.Told(loss, entries={...})",
    r"\baveraging\([^)]*\b(row|own|beside|server)=": "averaging has first_row=, own_model=, server_optimizer=",
    r"\bsharing_layers\([^)]*\bserver=": "sharing_layers has server_optimizer=",
    r"\.alone\(|\bproblem\.newcomer\b": "alone is problem.train_newcomer",
    r"aggregate\.report\[|told=|\.told|Told\(": "told is report, a pfl.ClientReport with entries",
    r"whom=": "whom is select_models",
    r"Prediction\.one\(": "Prediction.one is Prediction.single",
    r"\baggregate\.upload\[|\bweighted\(": "uploads are pfl.author.Upload(update, weight), not dicts",
    r"\bstate\._replace\((models|server|clients)=": "state._replace is state.with_models, with_server or with_rows",
}
GUIDE = "see docs/howto/method.md, From the former contract"


def hint(file: str) -> str:
    """What a method's file should change, in one clause that begins with "; "; "" if nothing is known."""
    source = "".join(linecache.getlines(file))
    changes = [text for pattern, text in REPLACED.items() if re.search(pattern, source)]
    if not changes:
        return ""
    return (
        f"; the file is written for the former contract of methods: {'; '.join(changes)}; {GUIDE}"
    )
