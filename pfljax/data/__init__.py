"""Data: sources of examples, partitions among clients, and their packing into a Federation."""

from collections.abc import Callable

from pfljax.core.types import UsageError
from pfljax.data import latent, packing, partitions, sources
from pfljax.data.federation import Federation
from pfljax.data.packing import (
    describe,
    digest,
    heterogeneity,
    keep_own,
    pad_alike,
    random_pixels,
    shuffle_targets,
    split_unseen,
)

__all__ = [
    "Federation",
    "describe",
    "digest",
    "heterogeneity",
    "keep_own",
    "make",
    "pad_alike",
    "random_pixels",
    "shuffle_targets",
    "split_unseen",
]

DEFAULT_CLIENTS = 16


def make(
    *,
    dataset: str = "digits",
    data_file: str | None = None,
    data_dir: str | None = None,
    data_fraction: float = 1.0,
    standardize: bool = True,
    text_stride: int = 1,
    task: str = "auto",
    partition: str = "auto",
    num_clients: int = 0,
    num_distributions: int = 2,
    dirichlet_alpha: float = 0.4,
    classes_per_client: int = 2,
    replacement: bool = False,
    official_test: bool = False,
    train_examples: int = 0,
    test_examples: int = 0,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    targets: str = "own",
    embed: latent.Embed | None = None,
    cache: str | None = None,
    seed: int = 0,
    own: Callable[[int], slice] | None = None,
) -> Federation:
    """Loads a data set, divides it among clients and packs it.

    Args:
        dataset: "digits", "sine", "synthetic", "npz", "text" or "tfds:NAME"; this and the next six as in
            `sources.load`.
        data_file: File of the data sets npz and text.
        data_dir: Folder of prepared TFDS data sets.
        data_fraction: Share of the examples to use.
        standardize: Whether npz and TFDS data are standardized.
        text_stride: How many characters the windows of text are apart.
        task: "classification", "regression" or "auto".
        partition: A partition's name, or "auto": natural where the examples have clients, else label groups
            (iid for a regression); this and the rest as in `partitions.partition` and `packing.build`.
        num_clients: K; 0 for all of a natural partition's, else 16.
        num_distributions: Label groups; clusters of latent; components of synthetic.
        dirichlet_alpha: Concentration of the Dirichlet partitions, of pachinko and of synthetic.
        classes_per_client: Classes a client, of pathological and pairs.
        replacement: Whether clients share examples.
        official_test: Whether the source's own test examples are the test examples.
        train_examples: Cap on a client's training part; 0 for none.
        test_examples: Cap on a client's test part; 0 for none (synthetic draws 5,000).
        test_fraction: Share of a client's examples for testing.
        validation_fraction: Share of a client's training part for validation.
        targets: "own", or "shuffled": the clients' (validation, test) pairs are dealt among them.
        embed: How latent embeds examples; None: by their pixels.
        cache: Folder for latent's clusterings; None: `latent.cache_folder`.
        seed: Decides everything.
        own: K -> the clients whose examples are wanted here, the others' being on other processes; None: all.

    Raises:
        UsageError: On a user's mistake, naming the flag or file.
    """
    if targets not in ("own", "shuffled"):
        raise UsageError(f"--targets={targets}: accepted: own, shuffled")
    source = sources.load(
        dataset,
        data_file=data_file,
        data_dir=data_dir,
        seed=seed,
        num_clients=num_clients or DEFAULT_CLIENTS,
        num_distributions=num_distributions,
        dirichlet_alpha=dirichlet_alpha,
        test_examples=test_examples,
        text_stride=text_stride,
        fraction=data_fraction,
        standardize=standardize,
        task=task,
    )
    if partition == "auto":
        labels = "label_groups" if source.task == "classification" else "iid"
        partition = labels if source.client is None else "natural"
    assignment = partitions.partition(
        partition,
        source,
        num_clients=num_clients if partition == "natural" else num_clients or DEFAULT_CLIENTS,
        num_distributions=num_distributions,
        dirichlet_alpha=dirichlet_alpha,
        classes_per_client=classes_per_client,
        replacement=replacement,
        train_examples=train_examples,
        test_fraction=test_fraction,
        official_test=official_test,
        clusters=lambda: latent.clusters(source, embed, num_distributions, seed, cache),
        seed=seed,
    )
    federation = packing.build(
        source,
        assignment,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        train_examples=train_examples,
        test_examples=test_examples,
        seed=seed,
        name=f"{source.name}, {partition}" + (", shuffled targets" if targets == "shuffled" else ""),
        own=own if targets == "own" else None,
    )
    if targets == "own":
        return federation
    federation = packing.shuffle_targets(federation, seed)  # which needs all of them
    return packing.keep_own(federation, own(federation.num_clients)) if own else federation
