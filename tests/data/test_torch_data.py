"""PyTorch's data sets and loaders become federations with the same examples."""

import numpy as np
import pytest

import pfljax as pfl

torch = pytest.importorskip("torch", reason="needs the extra torch")
data = torch.utils.data

X = np.arange(60, dtype=np.float32).reshape(20, 1, 3, 1) / 7
Y = np.arange(20) % 3


def tensors(rows=slice(None)):
    return data.TensorDataset(torch.from_numpy(X[rows]), torch.from_numpy(Y[rows]))


class Pairs(data.Dataset):
    """Examples one by one, with Python's integers as classes."""

    def __len__(self):
        return len(Y)

    def __getitem__(self, row):
        return {"a": torch.from_numpy(X[row]), "b": torch.tensor([float(row)])}, int(Y[row])


class Stream(data.IterableDataset):
    def __iter__(self):
        return zip(map(torch.from_numpy, X), Y.tolist(), strict=True)


class Lists(data.Dataset):
    """Examples whose inputs are lists of numbers."""

    def __len__(self):
        return len(Y)

    def __getitem__(self, row):
        return X[row].tolist(), Y[row]


def examples(clients, client):
    parts = [clients.examples(client, part) for part in ("train", "test")]
    x = np.concatenate([np.asarray(x) for x, _ in parts])
    y = np.concatenate([y for _, y in parts])
    order = np.argsort(x.reshape(len(x), -1)[:, 0])
    return x[order], y[order]


@pytest.mark.parametrize(
    "source",
    [
        tensors,
        Stream,
        lambda: data.DataLoader(tensors(), batch_size=7),
        lambda: data.DataLoader(tensors(), batch_size=7, shuffle=True, drop_last=True),
        lambda: data.ConcatDataset([tensors(slice(9)), tensors(slice(9, None))]),
        lambda: data.ChainDataset([Stream()]),
        lambda: Lists(),
    ],
)
@pytest.mark.parametrize("read", [pfl.Federation.from_arrays, pfl.data.read])
def test_examples_are_those_of_the_data_set(source, read):
    """In its order, so that `client` has its rows."""
    clients = read(source(), client=np.arange(20) // 10, standardize=False)
    assert clients.num_clients == 2
    for client, rows in enumerate((slice(10), slice(10, None))):
        x, y = examples(clients, client)
        np.testing.assert_array_equal(x, X[rows])
        np.testing.assert_array_equal(y, Y[rows])


def test_a_sampler_chooses_the_examples():
    loader = data.DataLoader(tensors(), batch_size=4, sampler=data.SubsetRandomSampler([2, 3, 5]))
    clients = pfl.Federation.from_arrays(loader, client=np.zeros(3, int), standardize=False)
    x, _ = examples(clients, 0)
    np.testing.assert_array_equal(x, X[[2, 3, 5]])


def test_each_client_may_have_a_loader():
    loaders = {"north": data.DataLoader(tensors(slice(6))), "south": tensors(slice(6, None))}
    clients = pfl.Federation.from_arrays(loaders, standardize=False)
    assert list(clients.client_names) == ["north", "south"]
    x, y = examples(clients, "south")
    np.testing.assert_array_equal(x, X[6:])
    np.testing.assert_array_equal(y, Y[6:])
    several = pfl.data.read([tensors(slice(6)), tensors(slice(6, None))])
    assert several.num_clients == 2


def test_each_client_may_have_data_sets_to_train_and_to_test():
    pairs = {
        "north": (data.DataLoader(tensors(slice(6))), tensors(slice(6, 8))),
        "south": (tensors(slice(8, 15)), tensors(slice(15, None))),
    }
    clients = pfl.Federation.from_arrays(pairs, standardize=False)
    rows = {"north": (slice(6), slice(6, 8)), "south": (slice(8, 15), slice(15, None))}
    for client, (train, test) in rows.items():
        np.testing.assert_array_equal(
            np.sort(clients.examples(client, "train")[0], axis=0), X[train]
        )
        np.testing.assert_array_equal(np.sort(clients.examples(client, "test")[0], axis=0), X[test])
    assert pfl.data.read(list(pairs.values())).test.size.tolist() == [2, 5]


def test_inputs_may_be_trees():
    clients = pfl.Federation.from_arrays(Pairs(), client=np.zeros(20, int), standardize=False)
    x, _ = clients.examples(0)
    assert {name: leaf.shape[1:] for name, leaf in x.items()} == {"a": (1, 3, 1), "b": (1,)}


def test_images_are_scaled_by_channel():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 3, 4, 4)) * np.array([1, 5, 9])[:, None, None]
    pairs = data.TensorDataset(torch.from_numpy(x), torch.from_numpy(np.arange(12) % 2))
    clients = pfl.Federation.from_arrays(pairs, client=np.zeros(12, int))
    train, _ = clients.examples(0, "train")
    mean = np.mean(train, axis=(0, 2, 3), keepdims=True)[0]
    std = np.std(train, axis=(0, 2, 3), keepdims=True)[0]
    np.testing.assert_allclose(clients.scaling.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(clients.scaling.std, std, rtol=1e-6)


class Images(Pairs):
    def __getitem__(self, row):
        from PIL import Image

        return Image.new("L", (3, 3)), 0


class Ragged(Pairs):
    def __getitem__(self, row):
        return torch.zeros(1 + row % 2), 0


@pytest.mark.parametrize(
    ("source", "options", "text"),
    [
        (data.TensorDataset(torch.zeros(4, 2)), {}, "^x: is a data set of tuple; accepted: pairs"),
        (Images(), {}, r"^x: is a data set of PIL.*ToTensor\(\) converts images"),
        (Ragged(), {}, "^x: is a data set of examples that differ in shape"),
        (data.TensorDataset(torch.zeros(0, 2), torch.zeros(0)), {}, "^x: is empty"),
        (tensors(), {"y": Y}, "^y: accepted with arrays"),
        ([tensors(), tensors()], {"client": Y}, "^client: accepted with one data set"),
        (X, {}, "^y: is missing"),
        ([tensors(), tensors(slice(0))], {}, r"^x\[1\]: is a data set without examples"),
        ([tensors(), X], {}, "^x: has a data set for some clients"),
        ([(tensors(), tensors()), tensors()], {}, "^x: has a data set for some clients"),
        ([(tensors(), tensors())], {"is_test": Y > 1}, "^is_test: accepted with one data set"),
        (
            [tensors(), data.TensorDataset(torch.zeros(4, 2), torch.zeros(4).long())],
            {},
            r"^x\[1\]: has examples floats \(2,\), but the first data set has floats \(1, 3, 1\)",
        ),
        (
            [tensors(), data.TensorDataset(torch.zeros(4, 1, 3, 1).byte(), torch.zeros(4).long())],
            {},
            r"^x\[1\]: has examples pixels .*, but the first data set has floats",
        ),
        (
            [tensors(), data.TensorDataset(torch.zeros(4, 1, 3, 1), torch.zeros(4))],
            {},
            r"^x\[1\]: has targets floats \(\), but the first data set has integers",
        ),
        (
            [tensors(), data.TensorDataset(torch.zeros(4, 1, 3, 1), torch.zeros(4, 2).long())],
            {},
            r"^x\[1\]: has targets integers \(2,\), but the first data set has integers \(\)",
        ),
    ],
)
def test_other_data_sets_are_refused(source, options, text):
    with pytest.raises(pfl.ArgumentError, match=text) as info:
        pfl.Federation.from_arrays(source, **options)
    assert "\n" not in str(info.value)
