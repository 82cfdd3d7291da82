"""Populations of tiny transformers, trained, opened and judged beside what papers print. The parts are `tasks`, `models`,
`training`, `instruments`, `language`, `evidence`, `studies` and `record`; each, and each room of it, is imported when it
is asked for."""
__version__ = "0.1.0"

import sys
from importlib import import_module
from pkgutil import iter_modules


def imported_late(package: str, path: list) -> tuple:
    "`__getattr__` and `__dir__` of a package: each of its modules is listed, and imported when it is asked for."
    def rooms(): return {m.name for m in iter_modules(path) if m.name[0] != "_"}
    def late(name):
        if name[0] != "_" and name in rooms(): return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return late, lambda: sorted(rooms() | vars(sys.modules[package]).keys())


__getattr__, __dir__ = imported_late(__name__, __path__)
