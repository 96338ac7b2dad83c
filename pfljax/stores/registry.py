"""The client stores by name."""

from pfljax.run.experiment import Experiment
from pfljax.stores.device_store import DeviceStore
from pfljax.stores.host_store import DiskStore, HostStore
from pfljax.stores.store import Store

STORES: dict[str, Store] = {"device": DeviceStore(), "host": HostStore(), "disk": DiskStore()}


def store_of(experiment: Experiment) -> Store:
    """Returns the client store of a run."""
    return STORES[experiment.client_store]
