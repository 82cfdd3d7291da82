"Errors, files, the tables in which tasks, routers and studies stand, and the form of a command."
from moe_redistribution import imported_late

__getattr__, __dir__ = imported_late(__name__, __path__)
