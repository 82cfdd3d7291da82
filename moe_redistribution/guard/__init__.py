"What looks at a user's code: its properties, in a process of its own."
from moe_redistribution import imported_late

__getattr__, __dir__ = imported_late(__name__, __path__)
