"What was claimed and printed, what was asked before a run, and which rows answer it."
from moe_redistribution import imported_late

__getattr__, __dir__ = imported_late(__name__, __path__)
