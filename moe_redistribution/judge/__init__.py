"What numbers of a handful of seeds prove: intervals, tests, survival, verdicts."
from moe_redistribution import imported_late

__getattr__, __dir__ = imported_late(__name__, __path__)
