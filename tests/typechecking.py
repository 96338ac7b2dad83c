"""Checks of the package's signatures at run time, which tests alone make; see conftest.py."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float
