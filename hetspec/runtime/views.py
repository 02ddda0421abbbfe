"""Views of a model: modules that share its weights, but not its attributes nor its list of children."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any


def shallow_view(module: Any) -> Any:
    """A module of the same class that shares everything, with its own attributes and its own list of children."""
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    return clone


def mapped_view(module: Any, change: Callable[[Any], None]) -> Any:
    """A view of a whole tree of modules, with something changed in each view.

    Args:
        module: the root; it and all below stay as they are.
        change: is given every view once, children first; a module that occurs twice has one view.
    """
    views: dict[int, Any] = {}

    def view_of(part: Any) -> Any:
        if part is None:
            return None
        if id(part) not in views:
            view = shallow_view(part)
            view._modules = {name: view_of(child) for name, child in part._modules.items()}
            change(view)
            views[id(part)] = view
        return views[id(part)]

    return view_of(module)
