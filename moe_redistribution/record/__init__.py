"What was recorded, whether it is what was found, and the commands."
from moe_redistribution import imported_late

__getattr__, __dir__ = imported_late(__name__, __path__)
