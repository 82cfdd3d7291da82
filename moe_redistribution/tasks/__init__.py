"What is learned: add-7, modular addition, histogram counting, and tasks of yours."
from moe_redistribution import imported_late

__getattr__, __dir__ = imported_late(__name__, __path__)
