"""Texts as numbers of their characters."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from pfljax.contract.errors import ArgumentError
from pfljax.contract.reading import check_memory

MOST = 255  # different characters: one token of uint8 is padding


def tokens(texts: Sequence[str], file: str) -> np.ndarray:
    """Texts (n,) as uint8 (n, length of the longest): characters from 1 in sorted order, and 0 as padding.

    Raises `ArgumentError`, which names their file, for too many different characters or too little memory.
    """
    letters = sorted(set().union(*texts) - {"\0"})
    if len(letters) > MOST:
        text = f"has {len(letters)} different characters; accepted: at most {MOST}"
        raise ArgumentError("file", text, file)
    longest = max(1, *map(len, texts))
    check_memory(5 * len(texts) * longest, file)
    # Token of each Unicode character
    token = np.zeros(sys.maxunicode + 1, np.uint8)
    token[[ord(letter) for letter in letters]] = np.arange(1, len(letters) + 1)
    characters = np.array(texts, f"U{longest}").view(np.uint32)
    return token[characters.reshape(len(texts), longest)]
