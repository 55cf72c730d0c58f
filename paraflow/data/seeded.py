"""A dataset whose randomness is a function of seed, epoch and sample, whatever the ranks and workers."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset, Subset

from paraflow.data.order import preserved_random_state, seed_generators

_MIX = 0xD1B54A32D192ED03


class SeededDataset(Dataset[Any]):
    """Fetches samples of a map-style dataset, each with torch's, Python's and numpy's generators at a seed of its own.

    Elsewhere the generators are as if nothing had been drawn. So a sample is augmented alike in whatever process and
    order it is fetched, by a run that was resumed as well. It is asked for pairs (seed of the epoch, index).

    A dataset that fetches many samples at once (`__getitems__`) is seeded once for each such fetch.

    Args:
        dataset: The dataset; attributes other than this class's own are read from it and set on it.
    """

    def __init__(self, dataset: Any) -> None:
        self.__dict__["wrapped"] = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.wrapped, name, value)

    def __len__(self) -> int:
        return len(self.wrapped)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        """Returns the samples of pairs (seed of the epoch, index)."""
        dataset = self.wrapped
        fetch_many = None if type(dataset) is Subset else getattr(dataset, "__getitems__", None)
        with preserved_random_state():
            if fetch_many is not None:
                seed_generators(_sample_seed(*keys[0]))
                fetched: list[Any] = fetch_many([index for _, index in keys])
                return fetched
            samples = []
            for epoch_seed, index in keys:
                seed_generators(_sample_seed(epoch_seed, index))
                samples.append(dataset[index])
            return samples


def _sample_seed(epoch_seed: int, index: Any) -> int:
    place = index if isinstance(index, int) else hash(index)
    mixed = (epoch_seed + (place + 1) * _MIX) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 29)) & 0x7FFFFFFFFFFFFFFF
