"""Serialization: nested state as tensors and plain values, which can be read without running code."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_ARRAY = "__ndarray__"


def pack(tree: Any) -> Any:
    """Return an independent copy of `tree`: tensors on the CPU, NumPy arrays as marked tensors.

    tree: dicts, lists and tuples of tensors, arrays, numbers, text, bytes, None. Errors: TypeError for anything else.
    """
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, np.ndarray):
        return {_ARRAY: torch.from_numpy(tree.copy())}
    if isinstance(tree, np.generic):
        return tree.item()
    if isinstance(tree, Mapping):
        return {pack(key): pack(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(pack(value) for value in tree)
    if tree is None or type(tree) in {bool, int, float, str, bytes}:  # an enum is not: its class would be loaded
        return tree
    raise TypeError(f"{type(tree).__name__} has no place in a checkpoint")


def unpack(tree: Any) -> Any:
    """Return what `pack` was given: arrays are arrays again; tensors stay on the CPU."""
    if isinstance(tree, Mapping):
        if tree.keys() == {_ARRAY}:
            return tree[_ARRAY].numpy()
        return {key: unpack(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(unpack(value) for value in tree)
    return tree


def serialized(content: Mapping[str, Any]) -> bytes:
    """Return tensors and plain values as the bytes of a file.

    `torch.save` does not write the file itself: on a full disk it raises an error of another kind than OSError.
    """
    stream = io.BytesIO()
    torch.save(dict(content), stream)
    return stream.getvalue()


def first_not_finite(tree: Any, path: str = "") -> str | None:
    """Return the path of the first tensor in nested dicts and lists that is not finite, None if all are."""
    if isinstance(tree, torch.Tensor):
        return path if tree.is_floating_point() and not bool(tree.isfinite().all()) else None
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    found = (first_not_finite(value, f"{path}.{key}" if path else str(key)) for key, value in items)
    return next((place for place in found if place is not None), None)
